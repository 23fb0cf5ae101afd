"""Measure launches on many nodes, compared with `exec` in time and processor time; and an idle controller."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.field import cpu_of, status_of, wait_for
from bench.reach.field import Field, Sample
from bench.reach.figures import Measured
from bench.reach.model import fit
from clusterctl.jobs.run_folder import RunDir

Log = Callable[[str], None]
# Variants of a launch, with the options of each.
LAUNCHES = {"launch --no-checks": ("--no-checks",), "launch with checks": ()}
# Per node, the ranks while the controller is idle, and their command.
RANKS, SLEEP = 2, "100000"
# Seconds to wait until agents are installed and the first heartbeats have passed; seconds of the measurement.
SETTLE, MEASURED = 5.0, 20.0
# Seconds for a controller to exit after the end of its run.
ENDS = 30.0
# The limits for a controller of 256 nodes: megabytes, and share of a core.
MOST_MB, MOST_CPU = 60.0, 0.02
# The limits for a launch, as multiples of the time of `exec`.
MOST_RATIO = {"launch --no-checks": 3.0, "launch with checks": 5.0}
LARGE = (1_000, 10_000)


@dataclass(frozen=True)
class Launched:
    """The medians of one number of nodes: `exec` and both variants of a launch."""

    nodes: int
    walls: dict[str, float]
    ratios: dict[str, float]
    node_cpu: dict[str, float]
    """Processor time per node, in seconds, by variant and for `exec`."""


@dataclass(frozen=True)
class Idle:
    """What an idle controller uses while its ranks sleep."""

    nodes: int
    start_cpu: float
    """Processor time in seconds until the run was started."""
    cpu: float
    """Processor time as a share of a core."""
    megabytes: float
    threads: int
    files: int


class Launches:
    """Measures launches of `true`, and controllers of runs that sleep."""

    def __init__(self, field: Field, runs: int, log: Log) -> None:
        self.field, self.runs, self.log = field, runs, log
        self.folder = field.folder / "runs"
        self.started: list[Launched] = []
        self.idle: list[Idle] = []
        self.inventory = field.folder / "launches.yaml"
        places = {place.name: {"host": place.address, "devices": RANKS} for place in field.places}
        field.write_inventory(self.inventory, places)

    def measure(self, count: int) -> list[Measured]:
        """Measure launches on `count` nodes in turn with `exec`, then an idle controller."""
        # The first command installs the agent, which a cluster does only once.
        self._timed(self._launch(count, "--no-checks"), count)
        found = {name: Measured("launch", count, f"clusterctl {name}") for name in ("exec", *LAUNCHES)}
        cpus: dict[str, list[float]] = {name: [] for name in found}
        for turn in range(self.runs):
            self.log(f"    launch, {count} nodes, turn {turn + 1}")
            for name, measured in found.items():
                sample, cpu = self._timed(self._argv(name, count), count)
                measured.samples.append(sample)
                cpus[name].append(cpu / count)
        walls = {name: measured.wall for name, measured in found.items()}
        # Compare each launch with the `exec` of its own turn, because the load of the machine may vary.
        ratios = {
            name: statistics.median(
                own.wall / base.wall
                for own, base in zip(found[name].samples, found["exec"].samples, strict=True)
            )
            for name in LAUNCHES
        }
        node_cpu = {name: statistics.median(values) for name, values in cpus.items()}
        self.started.append(Launched(count, walls, ratios, node_cpu))
        self.idle.append(self._idle(count))
        for name, measured in found.items():
            ratio = f"{ratios[name]:.2f} times exec, " if name in ratios else ""
            measured.note = f"{ratio}{node_cpu[name] * 1000:.0f} ms of CPU per node"
        return list(found.values())

    def _argv(self, name: str, count: int) -> list[str]:
        if name == "exec":
            return self.field.clusterctl("exec", self.field.names(count), "--", "true")
        return self._launch(count, *LAUNCHES[name])

    def _launch(
        self, count: int, *options: str, command: Sequence[str] = ("true",), devices: int = 1
    ) -> list[str]:
        nodes = ("-n", self.field.names(count), "--devices", str(devices), "--no-code")
        arguments = (*nodes, *options, "--", *command)
        return self.field.clusterctl("launch", *arguments, inventory=self.inventory)

    def _timed(self, argv: list[str], count: int) -> tuple[Sample, float]:
        """Run a command; return its sample and the nodes' processor time. A failure ends the benchmark."""
        places = self.field.places[:count]
        before = sum(place.cpu() for place in places)
        sample = self._must_work(argv)
        self._await_controllers()
        # Wait until the nodes' daemons have counted the processes that ended.
        time.sleep(0.3)
        return sample, sum(place.cpu() for place in places) - before

    def _runs(self) -> list[RunDir]:
        return [RunDir(path) for path in sorted(self.folder.iterdir())] if self.folder.exists() else []

    def _await_controllers(self) -> None:
        wait_for(lambda: not any(run.controller() for run in self._runs()), ENDS, 0.05)

    def _idle(self, count: int) -> Idle:
        """Start ranks that sleep, measure their controller, and stop them."""
        shutil.rmtree(self.folder)
        argv = self._launch(count, "--no-checks", "--detach", command=("sleep", SLEEP), devices=RANKS)
        self._must_work(argv)
        (run,) = self._runs()
        pid = run.controller()
        if pid is None:
            raise SystemExit(f"the run has no controller: {self.field.last_words()}")
        start_cpu = cpu_of(pid)
        time.sleep(SETTLE)
        before, began = cpu_of(pid), time.monotonic()
        time.sleep(MEASURED)
        share = (cpu_of(pid) - before) / (time.monotonic() - began)
        files = len(os.listdir(f"/proc/{pid}/fd"))
        megabytes = status_of(pid, "VmRSS") / 1024
        found = Idle(count, start_cpu, share, megabytes, status_of(pid, "Threads"), files)
        program = self.field.clusterctl("stop")[0]
        self.field.run([program, "stop", "--grace", "0", run.run_id], CLUSTERCTL_RUNS=str(self.folder))
        self._await_controllers()
        shutil.rmtree(self.folder)
        return found

    def _must_work(self, argv: list[str]) -> Sample:
        sample = self.field.run(argv, CLUSTERCTL_RUNS=str(self.folder))
        if sample.failed:
            raise SystemExit(f"{' '.join(argv[1:])} failed: {self.field.last_words()}")
        return sample


def report(started: Sequence[Launched], idle: Sequence[Idle]) -> str:
    """Return the measured launches and controllers as text, with an estimate for more nodes by fitted lines."""
    lines = [f"{'launch of `true`':<22}{'nodes':>6}{'wall s':>9}{'x exec':>8}{'ms of CPU a node':>18}"]
    for entry in started:
        for name, wall in entry.walls.items():
            ratio = f"{entry.ratios[name]:.2f}" if name in entry.ratios else ""
            lines.append(
                f"{name:<22}{entry.nodes:>6}{wall:>9.2f}{ratio:>8}{entry.node_cpu[name] * 1000:>18.0f}"
            )
    lines.append(
        f"{'idle controller':<22}{'nodes':>6}{'start s':>9}{'% core':>8}{'MB':>8}{'threads':>9}{'files':>8}"
    )
    lines += [_idle_line("measured", entry) for entry in idle]
    if len(idle) > 1:
        lines += [_idle_line("by the model", entry) for entry in (modelled(idle, count) for count in LARGE)]
        lines.append(limit(idle))
    return "\n".join(lines)


def _idle_line(name: str, entry: Idle) -> str:
    return (
        f"{name:<22}{entry.nodes:>6}{entry.start_cpu:>9.2f}{entry.cpu * 100:>8.2f}{entry.megabytes:>8.1f}"
        f"{entry.threads:>9}{entry.files:>8}"
    )


def modelled(idle: Sequence[Idle], count: int) -> Idle:
    """Estimate what a controller of `count` nodes uses, by lines fitted to the measured ones."""

    def at(value: Callable[[Idle], float]) -> float:
        return fit([(entry.nodes, value(entry)) for entry in idle]).at(count)

    return Idle(
        count,
        at(lambda entry: entry.start_cpu),
        at(lambda entry: entry.cpu),
        at(lambda entry: entry.megabytes),
        round(at(lambda entry: entry.threads)),
        round(at(lambda entry: entry.files)),
    )


def limit(idle: Sequence[Idle]) -> str:
    """Return a sentence with the number of nodes whose heartbeats need one core; a controller uses only one."""
    line = fit([(entry.nodes, entry.cpu) for entry in idle])
    if line.each <= 0:
        return "an idle controller's processor time does not grow with the nodes"
    return (
        f"heartbeats fill one core at {(1 - line.start) / line.each:,.0f} nodes: a controller is one process"
    )


def missed(started: Sequence[Launched], idle: Sequence[Idle], nodes: int = 256) -> list[str]:
    """Return the missed targets: of the times of launches, and of a controller of `nodes` nodes."""
    found = [
        f"{name} on {entry.nodes} nodes takes {entry.ratios[name]:.2f} times `exec`; at most {most:g}"
        for entry in started
        for name, most in MOST_RATIO.items()
        if entry.ratios[name] > most
    ]
    for entry in idle:
        name = f"the idle controller of {nodes} nodes"
        if entry.nodes == nodes and entry.megabytes > MOST_MB:
            found.append(f"{name} has {entry.megabytes:.0f} MB; at most {MOST_MB:.0f}")
        if entry.nodes == nodes and entry.cpu > MOST_CPU:
            found.append(f"{name} uses {entry.cpu:.2%} of a core; at most {MOST_CPU:.0%}")
    return found
