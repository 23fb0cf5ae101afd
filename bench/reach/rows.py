"""The rows of bench/reach: each measures one kind of work with every tool that can do it, in turn."""

from __future__ import annotations

import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.reach.field import (
    DEST,
    SETTINGS,
    Field,
    OneDefaultSshd,
    Place,
    Sample,
    digest,
    make_payload,
    make_tree,
)
from bench.reach.figures import Measured, Sizes
from bench.reach.inside import IDLE, TEN, Watched
from bench.reach.launches import Launches
from bench.reach.model import Point

OURS = "clusterctl"
PACKAGES = {
    "pdsh": "pdsh",
    "pdcp": "pdsh",
    "clush": "clustershell",
    "rsync": "rsync",
    "scp": "openssh-client",
}
UPLINK = "200mbit"
MARK = b" of what a program prints"
EXECS, BULK = tuple(SETTINGS)[:2], tuple(SETTINGS)


Method = Callable[[], Sample]
"""Runs one tool once."""
Log = Callable[[str], None]


class Bench:
    """The methods that measure the rows, all on one field."""

    def __init__(self, field: Field, sizes: Sizes, log: Log) -> None:
        self.field = field
        self.sizes = sizes
        self.log = log
        self.points: list[Point] = []
        self.launches = Launches(field, min(3, sizes.runs), log)
        self.payload = make_payload(field.folder / "payload", sizes.megabytes)
        self.tree = make_tree(field.folder / "tree", sizes.files)

    # -- commands

    def exec(self) -> Iterator[Measured]:
        """Measure `hostname` on every node: cold, and over connections that an earlier command left open."""
        for count in self.sizes.nodes:
            yield from self.compared("exec, cold", count, self.hostnames(count))
            yield from self.warm(count)
        yield from self.ten()

    def hostnames(self, count: int) -> dict[str, Method]:
        f = self.field
        cold = f.clusterctl("exec", f.names(count), "--", "hostname")
        methods: dict[str, Method] = {OURS: lambda: self.named(cold, count)}
        for transport in ("paramiko", "openssh"):
            argv = f.clusterctl("exec", "--ssh", transport, f.names(count), "--", "hostname")
            methods[f"{OURS} --ssh {transport}"] = lambda a=argv: self.named(a, count)
        for setting in EXECS:
            methods[f"pdsh, {setting}"] = lambda s=setting: self.named(
                self.pdsh(count, 32, "hostname"), count, s
            )
            methods[f"pdsh -f {count}, {setting}"] = lambda s=setting: self.named(
                self.pdsh(count, count, "hostname"), count, s
            )
            methods[f"clush -f {count}, {setting}"] = lambda s=setting: self.named(
                self.clush(count, s, "hostname"), count
            )
        return methods

    def warm(self, count: int) -> Iterator[Measured]:
        f = self.field
        persist = f.clusterctl("exec", "--persist", "10m", f.names(count), "--", "hostname")
        options = " ".join(f.ssh_options("curve25519", masters=True))
        pdsh = self.pdsh(count, count, "hostname")
        methods: dict[str, Method] = {
            f"{OURS} --persist": lambda: self.named(persist, count),
            "pdsh over ControlMasters": lambda: self.counted(
                f.run(pdsh, PDSH_SSH_ARGS_APPEND=options), count
            ),
        }
        for name, method in methods.items():
            if not missing_tool(name):
                # This command opens the connections that stay open.
                method()
        yield from self.compared("exec, warm", count, methods)
        self.log(f"    {f.end_background()} background processes ended")

    def ten(self) -> Iterator[Measured]:
        """Measure ten commands in a row over one set of connections, as `launch` and `doctor` run them."""
        count = min(64, max(self.sizes.nodes))
        f = self.field
        argv = [sys.executable, "-c", TEN, str(f.inventory), f.names(count)]
        methods: dict[str, Method] = {f"{OURS}, whole process": lambda: f.run(argv)}
        for setting in EXECS:
            options = " ".join(f.ssh_options(setting))
            script = (
                "for i in 0 1 2 3 4 5 6 7 8 9; do " + " ".join(self.pdsh(count, count, "hostname")) + "; done"
            )
            methods[f"ten pdsh -f {count}, {setting}"] = lambda s=script, o=options: f.run(
                ["/bin/sh", "-c", s], PDSH_SSH_ARGS_APPEND=o
            )
        rows = list(self.compared("ten commands", count, methods, runs=min(3, self.sizes.runs)))
        own = Measured("ten commands", count, f"{OURS}, connected")
        for sample in rows[0].samples:
            with_cpu = sample.output.split()
            own.samples.append(
                Sample(float(with_cpu[0]), float(with_cpu[1]), 0) if len(with_cpu) == 2 else sample
            )
        yield from (own, *rows)

    # -- trees

    def push(self) -> Iterator[Measured]:
        """Measure the push of one large file to many nodes."""
        yield from self.pushed("push, one file", self.sizes.push_nodes, self.sizes.runs, BULK)

    def uplink(self) -> Iterator[Measured]:
        """Measure the same push with a limited uplink of the launcher; traffic between nodes is not limited."""
        shape = ["tc", "qdisc", "add", "dev", "br0", "root"]
        limit = ["tbf", "rate", UPLINK, "burst", "256kb", "latency", "400ms"]
        subprocess.run([*shape, *limit], check=True, env=self.field.env)
        try:
            runs = self.sizes.uplink_runs
            yield from self.pushed(f"push, uplink {UPLINK}", self.sizes.uplink_nodes, runs, (EXECS[1],))
        finally:
            subprocess.run([*shape[:2], "del", *shape[3:]], check=True, env=self.field.env)

    def pushed(self, row: str, count: int, runs: int, settings: Sequence[str]) -> Iterator[Measured]:
        """Measure clusterctl's variants with the full number of runs, and the peers with `runs`."""
        size = (self.payload / "data").stat().st_size
        ours = {
            f"{OURS}{' --relay ' + how if how else ''}": self.relayed(count, how)
            for how in ("", "plain", "on", "off")
            # Without a relay the limited link decides the time, as it does for all peers.
            if how != "off" or settings == BULK
        }
        peers = {
            f"{name}, {setting}": method
            for setting in settings
            for name, method in self.copies(self.payload, count, setting).items()
        }
        for methods, times in ((ours, None), (peers, runs)):
            yield from self.compared(
                row,
                count,
                methods,
                runs=times,
                before=self.field.clear,
                after=lambda: self.field.lacking(count, "payload/data", size),
            )
            if methods is ours:
                self.verify(count)

    def relayed(self, count: int, how: str) -> Method:
        f = self.field
        argv = f.clusterctl("push", str(self.payload), f"{DEST}/payload", "-n", f.names(count))
        return lambda: f.run([*argv, *(["--relay", how] if how else [])])

    def verify(self, count: int) -> None:
        """Exit if the first or the last node has other bytes than the last push sent."""
        wanted = digest(self.payload / "data")
        for place in (self.field.places[0], self.field.places[count - 1]):
            path = place.path(f"{DEST}/payload/data")
            if path.exists() and digest(path) != wanted:
                raise SystemExit(f"{place.name} has other bytes than were pushed")

    def small(self) -> Iterator[Measured]:
        """Measure many small files: to nodes that have none of them, and to nodes that have all of them."""
        f = self.field
        for count in self.sizes.small_nodes:
            push = f.clusterctl("push", str(self.tree), f"{DEST}/tree", "-n", f.names(count))
            last = f"d{19:02}/f{self.sizes.files // 20 - 1:04}"
            size = (self.tree / last).stat().st_size

            def lacking(count: int = count, last: str = last, size: int = size) -> int:
                return f.lacking(count, f"tree/{last}", size)

            methods: dict[str, Method] = {OURS: lambda a=push: f.run(a)}
            for setting in EXECS:
                for name, method in self.copies(self.tree, count, setting).items():
                    methods[f"{name}, {setting}"] = method
            yield from self.compared("small files, cold", count, methods, before=f.clear, after=lacking)
            f.clear()
            same: dict[str, Method] = {OURS: lambda a=push: f.run(a)}
            for setting in EXECS:
                method = self.copies(self.tree, count, setting)["rsync"]
                same[f"rsync, {setting}"] = method
            f.run(push)
            if not missing_tool("rsync"):
                self.everywhere(lambda place: self.rsync(self.tree, EXECS[1], place), count)
            yield from self.compared("small files, unchanged", count, same, after=lacking)

    def copies(self, source: Path, count: int, setting: str) -> dict[str, Method]:
        """Return, for every peer that can copy a folder, a method that copies it to all nodes at the same time."""
        f = self.field
        options = f.ssh_options(setting)
        ssh = " ".join(["ssh", *options])
        target = f"{self.field.made.state.user}@"
        tar = f"tar -C {source.parent} -c {source.name}"
        clush = ["clush", "-f", str(count), "-o", " ".join(options), "-w", f.addresses(count)]
        clush += ["--copy", str(source)]
        pdcp = ["pdcp", "-R", "ssh", "-r", "-f", str(count), "-w", f.addresses(count), str(source), DEST]
        found: dict[str, Method] = {
            "clush --copy": lambda: f.run([*clush, "--dest", f"{DEST}/"]),
            "pdcp": lambda: f.run(pdcp, PDSH_SSH_ARGS_APPEND=" ".join(options)),
            "rsync": lambda: self.everywhere(lambda place: self.rsync(source, setting, place), count),
            "scp": lambda: self.everywhere(
                lambda place: ["scp", "-q", "-r", *options, str(source), f"{target}{place.address}:{DEST}/"],
                count,
            ),
            "tar over ssh": lambda: self.everywhere(
                lambda place: ["/bin/sh", "-c", f"{tar} | {ssh} {place.address} tar -C {DEST} -x"], count
            ),
        }
        return found

    def rsync(self, source: Path, setting: str, place: Place) -> list[str]:
        ssh = " ".join(["ssh", *self.field.ssh_options(setting)])
        return ["rsync", "-a", "-W", "-e", ssh, str(source), f"{place.address}:{DEST}/"]

    def everywhere(self, argv: Callable[[Place], list[str]], count: int) -> Sample:
        """Run one process per node, all at the same time."""
        return self.field.measure(
            lambda: [self.field.start(argv(place)) for place in self.field.places[:count]]
        )

    # -- output, memory

    def lines(self) -> Iterator[Measured]:
        """Measure long output of many nodes into a file, each line prefixed with its node."""
        command, quoted, total = self.sequence()
        count, f, held = self.sizes.line_nodes, self.field, self.field.folder / "lines.txt"

        def lines(argv: list[str], **extra: str) -> Sample:
            sample = f.run(argv, output=held, **extra)
            return Sample(sample.wall, sample.cpu, int(counted(held) != total))

        ours = f.clusterctl("exec", f.names(count), "--", *command)
        methods: dict[str, Method] = {OURS: lambda: lines(ours)}
        for name, argv, options in self.printing(quoted):
            methods[name] = lambda a=argv, o=options: lines(a, PDSH_SSH_ARGS_APPEND=o)
        yield from self.rated(self.compared("lines", count, methods), total)
        held.unlink(missing_ok=True)

    def logs(self) -> Iterator[Measured]:
        """Measure the lines of ranks into one file each and onto the screen; the peers' lines go through tee into one.

        clusterctl needs two commands, `launch` and `logs tail`, and its time includes the supervision of a run. Its
        processor time does not count the controller, which continues after them.
        """
        command, quoted, total = self.sequence()
        count, f, screen = self.sizes.line_nodes, self.field, self.field.folder / "screen.txt"
        kept = f.folder / "kept.txt"
        launch = f.clusterctl("launch", "-n", f.names(count), "--no-code", "--detach", "--", *command)
        tail = [
            launch[0],
            "logs",
            "tail",
            "last",
            "-f",
            "-n",
            str(self.sizes.lines),
            "--rank",
            f"0-{count - 1}",
        ]

        def ours() -> Sample:
            sample = f.run(["sh", "-c", f"{shlex.join(launch)} && {shlex.join(tail)}"], output=screen)
            copies = [counted(path) for path in (f.folder / "runs").glob("*/attempts/1/logs/*/rank-*.out")]
            good = counted(screen) == total and copies == [self.sizes.lines] * count
            shutil.rmtree(f.folder / "runs", ignore_errors=True)
            return Sample(sample.wall, sample.cpu, int(not good))

        def peer(argv: list[str], options: str) -> Sample:
            script = f"{shlex.join(argv)} | tee {shlex.quote(str(kept))}"
            sample = f.run(["sh", "-c", script], output=screen, PDSH_SSH_ARGS_APPEND=options)
            return Sample(sample.wall, sample.cpu, int(not counted(screen) == counted(kept) == total))

        methods: dict[str, Method] = {OURS: ours}
        for name, argv, options in self.printing(quoted):
            methods[name] = lambda a=argv, o=options: peer(a, o)
        yield from self.rated(self.compared("logs", count, methods), total)

    def sequence(self) -> tuple[list[str], str, int]:
        """Return a program that prints many lines, as words and quoted, and the lines of all nodes together."""
        command = ["seq", "-f", f"line %.0f{MARK.decode()}", "1", str(self.sizes.lines)]
        return command, shlex.join(command), self.sizes.line_nodes * self.sizes.lines

    def printing(self, quoted: str) -> Iterator[tuple[str, list[str], str]]:
        """Yield the peers that run a command on the nodes of `lines`: name, words and ssh options."""
        count = self.sizes.line_nodes
        for setting in EXECS:
            options = " ".join(self.field.ssh_options(setting))
            yield f"pdsh, {setting}", self.pdsh(count, count, quoted), options
            yield f"clush, {setting}", self.clush(count, setting, quoted), options

    def rated(self, found: list[Measured], total: int) -> Iterator[Measured]:
        for measured in found:
            if measured.samples:
                measured.note = f"{total / measured.wall:,.0f} lines/s"
            yield measured

    def memory(self) -> Iterator[Measured]:
        """Measure the memory of the client while a command runs on every node, and of an idle agent."""
        count = max(self.sizes.nodes)
        f = self.field
        ours = f.clusterctl("exec", f.names(count), "--", "sleep", "3")
        methods = {OURS: (ours, {})}
        if shutil.which("pdsh"):
            pdsh_options = " ".join(f.ssh_options(EXECS[1]))
            methods[f"pdsh -f {count}"] = (
                self.pdsh(count, count, "sleep 3"),
                {"PDSH_SSH_ARGS_APPEND": pdsh_options},
            )
        for name, (argv, extra) in methods.items():
            process = f.start(argv, **extra)
            watched = Watched(process.pid)
            process.communicate()
            watched.join()
            note = f"{watched.rss:.0f} MB resident, {watched.pss:.0f} MB of its own share, "
            note += f"{watched.processes} processes, {watched.threads} threads"
            yield Measured(
                "memory of the client", count, name, [Sample(0, 0, int(process.returncode != 0))], note=note
            )
        done = f.run([sys.executable, "-c", IDLE, str(f.inventory), "node1"])
        note = done.output.decode().strip()
        yield Measured("memory of an idle agent", 1, OURS, [Sample(0, 0, done.failed)], note=note)

    # -- storms

    def storm(self) -> Iterator[Measured]:
        """Measure many names for one sshd with default limits, then many nodes behind one bastion of this kind."""
        count, runs = self.sizes.storm_nodes, self.sizes.storm_runs
        f = self.field
        with OneDefaultSshd(f, f.places[0], count) as addresses:
            behind = f.folder / "bastion.yaml"
            bastion = f"{f.made.state.user}@{addresses[0]}:{OneDefaultSshd.PORT}"
            f.write_inventory(
                behind,
                {place.name: {"host": place.address, "gateway": bastion} for place in f.places[:count]},
            )
            same = f.folder / "storm.yaml"
            nodes = {
                f"node{place + 1}": {"host": host, "port": OneDefaultSshd.PORT}
                for place, host in enumerate(addresses)
            }
            f.write_inventory(same, nodes)
            for row, inventory in (("storm, one sshd", same), ("storm, one bastion", behind)):
                argv = f.clusterctl("exec", "all", "--", "hostname", inventory=inventory)
                methods: dict[str, Method] = {OURS: lambda a=argv: self.counted(f.run(a), count)}
                if inventory is same:
                    methods.update(self.storm_peers(addresses))
                yield from self.compared(row, count, methods, runs=runs)

    def storm_peers(self, addresses: Sequence[str]) -> dict[str, Method]:
        """Return pdsh and clush for the same sshd."""
        f, count = self.field, len(addresses)
        options = " ".join([*f.ssh_options(EXECS[1]), "-p", str(OneDefaultSshd.PORT)])
        pdsh = ["pdsh", "-R", "ssh", "-f", str(count), "-w", ",".join(addresses), "hostname"]
        clush = ["clush", "-f", str(count), "-o", options, "-w", ",".join(addresses), "hostname"]
        return {
            "pdsh": lambda: self.counted(f.run(pdsh, PDSH_SSH_ARGS_APPEND=options), count),
            "clush": lambda: self.counted(f.run(clush), count),
        }

    def launch(self) -> Iterator[Measured]:
        """Measure launches compared with `exec`, and idle controllers; their report is printed at the end."""
        for count in self.sizes.nodes:
            yield from self.launches.measure(count)

    # -- the model

    def model(self) -> Iterator[Measured]:
        """Measure clusterctl at doubling sizes, with the processor time of launcher and nodes separate."""
        for count in self.sizes.model_nodes:
            samples, servers = [], []
            argv = self.field.clusterctl("exec", self.field.names(count), "--", "hostname")
            for _ in range(self.sizes.runs):
                places = self.field.places[:count]
                before = sum(place.cpu() for place in places)
                samples.append(self.named(argv, count))
                # Wait until the nodes' daemons have counted the processes that ended.
                time.sleep(0.3)
                servers.append(sum(place.cpu() for place in places) - before)
            measured = Measured(
                "model", count, OURS, samples, note=f"nodes {statistics.median(servers):.2f} s"
            )
            self.points.append(Point(count, measured.wall, measured.cpu, statistics.median(servers)))
            yield measured

    # -- how

    def compared(
        self,
        row: str,
        count: int,
        methods: dict[str, Method],
        *,
        runs: int | None = None,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], int] = lambda: 0,
    ) -> list[Measured]:
        """Measure all methods in turn for every run, so that a slow minute affects all of them."""
        found = {name: Measured(row, count, name, missing=missing_tool(name)) for name in methods}
        for turn in range(runs or self.sizes.runs):
            self.log(f"    {row}, {count} nodes, turn {turn + 1}")
            for name, method in methods.items():
                if found[name].missing:
                    continue
                before()
                self.field.forget_words()
                sample = method()
                failed = max(sample.failed, after())
                if failed:
                    self.log(f"    {name}: {failed} failed: {self.field.last_words()}")
                found[name].samples.append(Sample(sample.wall, sample.cpu, failed, sample.output[-200:]))
        return list(found.values())

    def pdsh(self, count: int, fanout: int, command: str) -> list[str]:
        return ["pdsh", "-R", "ssh", "-f", str(fanout), "-w", self.field.addresses(count), command]

    def clush(self, count: int, setting: str, command: str) -> list[str]:
        options = " ".join(self.field.ssh_options(setting))
        return ["clush", "-o", options, "-f", str(count), "-w", self.field.addresses(count), command]

    def named(self, argv: list[str], count: int, setting: str = "") -> Sample:
        """Run a command that prints one line per node; return its sample with the number of failed nodes."""
        options = {"PDSH_SSH_ARGS_APPEND": " ".join(self.field.ssh_options(setting))} if setting else {}
        return self.counted(self.field.run(argv, **options), count)

    def counted(self, sample: Sample, count: int) -> Sample:
        """Return the sample with the number of nodes that did not answer.

        An answer is `label: hostname`; each label is counted once.
        """
        lines = [line.split(b":") for line in sample.output.splitlines()]
        answered = {
            fields[0] for fields in lines if len(fields) > 1 and fields[-1].strip().startswith(b"node")
        }
        return Sample(sample.wall, sample.cpu, count - len(answered), sample.output)


def counted(path: Path) -> int:
    with path.open("rb") as file:
        return sum(MARK in line for line in file)


def missing_tool(name: str) -> str:
    """Return why a tool with this name cannot run here, or ""."""
    program = next((word for word in re.split("[ ,]+", name) if word in PACKAGES), "")
    if not program or shutil.which(program):
        return ""
    return f"{program} is not installed (package {PACKAGES[program]})"
