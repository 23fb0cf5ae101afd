"""Inject one fault: start a run, wait for the moment, strike, act as the user would, and check what is left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.field import Answer, wait_for
from clusterctl.jobs.run_folder import RunDir
from tests.faults.draw import (
    ANY,
    BEFORE,
    CHECKPOINT,
    FIRST_STEP,
    NODES,
    PUSH,
    RUNNING,
    SAVE_EVERY,
    STARTING,
    STEPS,
    STOP,
    Fault,
)  # fmt: skip
from tests.faults.field import (
    PROGRAM,
    Desk,
    Lane,
    Scanner,
    aside_in,
    is_dead,
    marked,
    words_of,
)  # fmt: skip
from tests.faults.judge import Story
from tests.faults.seen import (
    compiling,
    differing,
    known_after,
    last_lines,
    noticed_after,
    shown,
    stopped_after,
    struck_from_within,
)

# Seconds to wait for the moment, on a busy machine.
COMES = 90.0
# Seconds for a run to end after a fault.
ENDS = 300.0
# Seconds for cleaning up: agents time out after 10 s, and the clean-up runs every 5 s.
SETTLES = 40.0
# Seconds of an outage.
SHORT, LONG = 4.0, 22.0
# Seconds that a disk stays full.
FREED = 3.0
# Relative to the stand-in's steps: a step of a tiny model takes 20 ms.
REAL = 3
RANK, SUPERVISOR = "ranks/{rank}.json", "supervisor.json"
# Kinds that send a signal to a process of the node: the record with its pid, and the signal.
TARGETS = {
    "rank killed": (RANK, signal.SIGKILL),
    "rank frozen": (RANK, signal.SIGSTOP),
    "manifest damaged": (RANK, signal.SIGKILL),
    "children left behind": (RANK, signal.SIGKILL),
    "clock skewed": (RANK, signal.SIGKILL),
    "daemon left behind": (RANK, signal.SIGKILL),
    "supervisor killed": (SUPERVISOR, signal.SIGKILL),
    "supervisor stopped": (SUPERVISOR, signal.SIGSTOP),
}
FROM_WITHIN = ("rank crashed", "crash at the same step", "user's mistake", "slow rank")


class NotPlayed(Exception):
    """The fault could not strike, because a condition was not met in time; there is nothing to judge."""


class Play:
    """A run with one fault in it."""

    def __init__(
        self, lane: Lane, scanner: Scanner, fault: Fault, folder: Path, data: Path | None = None
    ) -> None:
        self.lane, self.scanner, self.fault = lane, scanner, fault
        self.shared = lane.shared / f"f{fault.number}"
        self.ballast = lane.small_disk(fault.node) if fault.kind == "disk full" else None
        skewed = lane.skewed(fault.node) if fault.kind == "clock skewed" else None
        self.desk = Desk(folder, skewed or lane.box.cluster_file)
        # It would end normally before it can be stopped.
        ends_early = fault.phase == STOP or fault.kind == "Ctrl-C"
        self.steps = STEPS * (REAL if fault.real else 1) * (10 if ends_early else 1)
        self.codes: dict[str, int] = {}
        self.struck = self.healed = 0.0
        self.damaged = self.target = 0
        self.missed = ""
        self.run: RunDir | None = None
        self.script = (
            lane.prolong_login(fault.node, fault.detail) if fault.kind == "login without end" else None
        )
        self._write_job(data)

    # -- the job

    def _write_job(self, data: Path | None) -> None:
        job: dict[str, Any] = {"name": "drill", "nodes": "node[1-2]", "grace": 5.0}
        if self.fault.kind == "rank frozen":
            job["hang_after"] = "9s"
        # The code then takes longer to push than a run takes to start.
        backoff = 2.0 if self.fault.kind == "disk full" else 0.2
        job["restart"] = {"max": 6, "backoff": backoff}
        if self.fault.spare:
            job["restart"]["spare_nodes"] = "node3"
        job |= self._training(data) if self.fault.real and data else self._stand_in()
        (self.desk.folder / "job.yaml").write_text(json.dumps(job))

    def _stand_in(self) -> dict[str, Any]:
        code = self.desk.folder / "code"
        code.mkdir()
        shutil.copy(PROGRAM, code / "program.py")
        # Writing a checkpoint then takes time.
        if self.fault.phase == PUSH or (self.fault.phase == ANY and self.fault.number % 2):
            (code / "ballast").write_bytes(os.urandom(24 << 20))
        env = {"STEPS": self.steps, "STEP_SECONDS": 0.1, "SAVE_EVERY": SAVE_EVERY, "SAVE_SECONDS": 0.25}
        if self.fault.kind != "disk full":
            env["CHECKPOINTS"] = str(self.shared)
        env |= self._arranged()
        return {"code": "code", "command": ["python3", "program.py"],
                "env": {f"DRILL_{name}": str(value) for name, value in env.items()}}  # fmt: skip

    def _arranged(self) -> dict[str, Any]:
        """Return the environment for faults that the program itself causes."""
        fault = self.fault
        where = f"{fault.rank}:{fault.step}"
        arranged = {
            "rank crashed": {"FAULT": f"{where}:{fault.detail}"},
            "crash at the same step": {"FAULT": f"{where}:exit3:always"},
            "user's mistake": {"FAULT": "import"},
            "children left behind": {"CHILDREN": 1},
            "daemon left behind": {"DAEMON": 1},
            "slow rank": {"SLOW": fault.rank},
        }
        return arranged.get(fault.kind, {})

    def _training(self, data: Path) -> dict[str, Any]:
        """Return the config of a GPT so small that two processes start and train it in seconds."""
        train = {
            "model": {"layers": 1, "hidden": 32, "heads": 2, "sequence": 32, "vocab": 512},
            "data": {"prefix": "{data}/text_document", "tokenizer": "{data}/tokenizer.json", "split": "90,10,0"},
            "steps": self.steps, "micro_batch": 2, "global_batch": 8, "precision": "fp32",
            "optimizer": {"lr": 1e-3, "warmup_steps": 2}, "eval": {"every": 0, "batches": 2},
            "save": {"every": SAVE_EVERY * REAL, "keep": 3},
        }  # fmt: skip
        return {"data": str(data), "devices": "[0,1)", "env": {"OMP_NUM_THREADS": "1"}, "train": train}

    # -- from the start to the end

    def play(self) -> Story:
        """Inject the fault, return the story, look for leftovers; the checks would refuse the small disk."""
        began = time.monotonic()
        launch = self.desk.start("launch", "launch", "job.yaml", *["--no-checks"][: bool(self.ballast)])
        try:
            self._strike(launch)
            self._see_through(launch)
            left = self._left()
        finally:
            self._put_right(launch)
        return self._story(tuple(left), time.monotonic() - began)

    def _strike(self, launch: subprocess.Popen[bytes]) -> None:
        if self.fault.kind in FROM_WITHIN:
            return
        if not self._moment(launch):
            self.missed = f"the launch ended with {launch.returncode} before the fault could strike"
            return
        time.sleep(self.fault.delay)
        self.struck = time.time()
        if self.fault.kind in BLOWS:
            BLOWS[self.fault.kind](self, launch)

    # -- the moment

    def _moment(self, launch: subprocess.Popen[bytes]) -> bool:
        """Wait until the run is where the fault must strike; return False if it ended earlier."""
        fault = self.fault
        if fault.phase in (ANY, BEFORE):
            return True
        looks: dict[str, Callable[[], bool]] = {
            PUSH: lambda: "reach " in self.desk.output(),
            STARTING: lambda: bool(self._record(RANK.format(rank=fault.rank)).get("pid")),
            FIRST_STEP: lambda: self._step() >= 1,
            RUNNING: lambda: self._step() >= fault.step * (REAL if fault.real else 1),
            CHECKPOINT: self._saving,
            STOP: lambda: self._step() >= 3,
        }
        if fault.kind in TARGETS and not self._aim(launch):
            return False
        if not self._wait(launch, looks[fault.phase], f"the moment {fault.phase!r}"):
            return False
        if fault.phase == STOP and fault.kind != "Ctrl-C":
            self.stopper = self.desk.start("stop", "stop", self._found().run_id)
            self._wait(self.stopper, lambda: self._record("stop.json"), "the stop's record on the node")
        return True

    def _aim(self, launch: subprocess.Popen[bytes]) -> bool:
        """Find the process to strike in advance, because finding it takes seconds on a busy machine."""
        name = TARGETS[self.fault.kind][0].format(rank=self.fault.rank)
        pid = self._wait(launch, lambda: self._record(name).get("pid"), f"the pid in {name}")
        self.target = self.lane.pids(self.fault.node).get(pid, 0) if pid else 0
        return bool(pid)

    def _wait(
        self, command: subprocess.Popen[bytes], is_reached: Callable[[], Answer], event: str
    ) -> Answer | None:
        """Return the first true value of `is_reached()`, or None if the command ended first."""
        deadline = time.monotonic() + COMES
        while command.poll() is None:
            if answer := is_reached():
                return answer
            if time.monotonic() > deadline:
                lines = "".join(f"\n    {line}" for line in last_lines(self.lane, self.desk, self.run))
                slow = compiling(self.lane, COMES) or f"{event} did not come within {COMES:.0f} s"
                raise NotPlayed(f"{slow}; the last lines are:{lines}")
            time.sleep(0.01)
        return None

    def _found(self) -> RunDir:
        run = self.run = self.run or self.desk.found()
        assert run is not None, "no run was recorded"
        return run

    def _record(self, name: str, attempt: int = 1) -> dict[str, Any]:
        self.run = self.run or self.desk.found()
        return self.lane.record(self.fault.node, self.run.run_id, attempt, name) if self.run else {}

    def _step(self) -> int:
        """Return the last step according to the metrics on the first node."""
        self.run = self.run or self.desk.found()
        if self.run is None:
            return 0
        with contextlib.suppress(OSError):
            text = (self.lane.run_dir(NODES[0], self.run.run_id) / "metrics.jsonl").read_text()
            found = re.findall(r'"event": "step", "step": (\d+)', text)
            return int(found[-1]) if found else 0
        return 0

    def _saving(self) -> bool:
        if self.fault.real or self.fault.kind == "disk full":
            self.run = self.run or self.desk.found()
            folder = self.run and self.lane.run_dir(NODES[0], self.run.run_id) / "checkpoints"
        else:
            folder = self.shared
        return bool(folder and folder.is_dir() and any(folder.glob(".tmp-*")))

    # -- the blows

    def _signal(self, launch: subprocess.Popen[bytes]) -> None:
        """Send the signal of this kind to its process."""
        number = TARGETS[self.fault.kind][1]
        # During a stop the process may have ended already.
        if not is_dead(self.target):
            self.struck = time.time()
            os.kill(self.target, number)
        elif self.fault.phase != STOP:
            raise NotPlayed("the process ended before this busy machine could strike it")

    def _damage_manifest(self, launch: subprocess.Popen[bytes]) -> None:
        """Flip a bit in the newest of at least two manifests on the fault's node, then kill the rank."""
        folder = self.lane.run_dir(self.fault.node, self._found().run_id) / "checkpoints"

        def manifests() -> list[Path]:
            return sorted(folder.glob("step-*/manifest.json"))

        found = self._wait(launch, lambda: manifests()[1:], "a second checkpoint")
        if found:
            content = bytearray(found[-1].read_bytes())
            chance = random.Random(self.fault.number)
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            found[-1].write_bytes(content)
            self.damaged = int(found[-1].parent.name.rpartition("-")[2])
        self._signal(launch)

    def _kill_launcher(self, launch: subprocess.Popen[bytes]) -> None:
        """Kill the launcher's processes, as if its machine died; `attach` starts a new controller."""
        controller = self._found().controller()
        launch.kill()
        if controller is not None:
            os.kill(controller, signal.SIGKILL)

    def _kill_controller(self, launch: subprocess.Popen[bytes]) -> None:
        run = self._found()
        pid = self._wait(launch, run.controller, "the run's controller")
        if pid:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: run.controller() is None, 5.0)
            if self.fault.phase != STOP and not run.phase().is_final:
                self.codes["status"] = self.desk.run("status", "status", run.run_id, "--json")

    def _kill_command(self, launch: subprocess.Popen[bytes]) -> None:
        launch.kill()

    def _interrupt(self, launch: subprocess.Popen[bytes]) -> None:
        launch.send_signal(signal.SIGINT)
        if self.fault.detail == "twice" or self.fault.phase == STOP:
            time.sleep(0.3)
            launch.send_signal(signal.SIGINT)

    def _kill_node(self, launch: subprocess.Popen[bytes]) -> None:
        self.lane.box.kill(self.fault.node)

    def _freeze_node(self, launch: subprocess.Popen[bytes]) -> None:
        self.lane.freeze(self.fault.node)
        self._away(launch, LONG)
        self.lane.thaw(self.fault.node)
        self.healed = time.time()

    def _cut(self, launch: subprocess.Popen[bytes]) -> None:
        self.lane.box.cut(self.fault.node)
        self._away(launch, SHORT if "briefly" in self.fault.kind else LONG)
        self.lane.box.heal(self.fault.node)
        self.healed = time.time()

    def _drop(self, launch: subprocess.Popen[bytes]) -> None:
        self.lane.drop_connections(self.fault.node)

    def _cut_off(self, launch: subprocess.Popen[bytes]) -> None:
        self.lane.hold_relay(signal.SIGSTOP)
        self._away(launch, LONG)
        self.lane.hold_relay(signal.SIGCONT)
        self.healed = time.time()

    def _away(self, launch: subprocess.Popen[bytes], seconds: float) -> None:
        """Wait this long, or until the run has ended without the unreachable part."""
        wait_for(lambda: launch.poll() is not None, seconds)

    def _fill_disk(self, launch: subprocess.Popen[bytes]) -> None:
        assert self.ballast is not None
        if self.fault.detail == "inodes":
            self._fill_inodes(launch, self.ballast)
            return
        with contextlib.suppress(OSError), self.ballast.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"\0" * size)
        wait_for(lambda: launch.poll() is not None, FREED)
        self.ballast.unlink()
        self.healed = time.time()

    def _fill_inodes(self, launch: subprocess.Popen[bytes], folder: Path) -> None:
        folder.mkdir()
        with contextlib.suppress(OSError):
            for number in itertools.count():
                (folder / str(number)).touch()
        wait_for(lambda: launch.poll() is not None, FREED)
        shutil.rmtree(folder)
        self.healed = time.time()

    # -- what the user does

    def _see_through(self, launch: subprocess.Popen[bytes]) -> None:
        """Follow the run to its end; if it has no controller, start one as the messages and the README advise."""
        self.codes["launch"] = self._ended(launch)
        self._end_logins()
        if self.fault.phase == STOP and self.fault.kind != "Ctrl-C" and hasattr(self, "stopper"):
            self.codes["stop"] = self._ended(self.stopper)
        run = self.run = self.desk.found()
        for time_of_it in range(3):
            if run is None or run.phase().is_final:
                break
            again = ["attach", run.run_id] + (["--take-over"] if run.controller() is None else [])
            self.codes[f"attach {time_of_it + 1}"] = self.desk.run(
                f"attach{time_of_it}", *again, seconds=ENDS
            )
        if run is not None:
            wait_for(lambda: run.controller() is None, 20.0)

    def _end_logins(self) -> None:
        """Let logins that a node's scripts delay continue: they belong to the node, and nobody can reach them."""
        if self.script is not None:
            self.script.unlink(missing_ok=True)
            for pid in self.lane.pids(self.fault.node).values():
                if words_of(pid) == "sleep 600":
                    os.kill(pid, signal.SIGKILL)

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(ENDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return 124

    def _put_right(self, launch: subprocess.Popen[bytes]) -> None:
        """Always clean up: nothing of this run may affect the next one."""
        if launch.poll() is None:
            launch.kill()
            launch.wait()
        run = self.desk.found()
        controller = run.controller() or run.clearer() if run else None
        if controller is not None:
            os.kill(controller, signal.SIGKILL)
        if self.fault.kind == "launcher cut off":
            self.lane.hold_relay(signal.SIGCONT)
        if not self.lane.is_up(self.fault.node):
            return
        self._end_logins()
        self.lane.box.heal(self.fault.node)
        self.lane.thaw(self.fault.node)
        for _, _, pid in marked().get(run.run_id, []) if run else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- leftovers and observations

    def _left(self) -> list[str]:
        """Return the processes, open ports and files that remain after the time to clean up."""
        nodes = [node.name for node in self.lane.box.nodes if self.lane.is_up(node.name)]

        def living() -> list[str]:
            found = [line for node in nodes for line in (*self.lane.extra(node), *self.lane.listening(node))]
            return found + self.desk.processes()

        wait_for(lambda: not living(), SETTLES)
        whole = self.run is not None and self.run.phase() == "finished"
        # The lane removes these files.
        found = [
            *living(),
            *self.desk.temporary(),
            *(aside_in(self.shared) if whole else ()),
        ]
        run = self.run.run_id if self.run else "none"
        return found + [line for node in nodes for line in self.lane.temporary(node, run)]

    def _story(self, left: tuple[str, ...], seconds: float) -> Story:
        run = self.run
        if run is None:
            return Story(
                self.fault, output=self.desk.output(), codes=self.codes, left=left, seconds=seconds,
                missed=self.missed,
            )  # fmt: skip
        events, attempt = [event.as_json() for event in run.event_lines()], int(run.read_record().attempt)
        struck = self.struck or struck_from_within(self.fault, run)
        known = known_after(events, struck)
        return Story(
            self.fault,
            phase=run.phase().value,
            attempt=attempt,
            steps=self.steps,
            reasons=tuple(event["why"] for event in events if event["event"] == "restart"),
            output=self.desk.output(),
            codes=self.codes,
            metrics=[metric.as_json() for metric in run.metric_lines()],
            struck=struck,
            healed=self.healed,
            noticed=noticed_after(self.lane, self.fault, run, struck),
            known=known,
            stopped=stopped_after(self.lane, self.fault, run, struck + known) if known is not None else None,
            scans=self.scanner.seen.get(run.run_id, ()),
            lost_lines=(
                *differing(self.lane, self.fault, run, attempt),
                *shown(self.desk, self.fault, run, whole=self.codes["launch"] in (0, 5)),
            ),
            left=left,
            seconds=seconds,
            damaged=self.damaged,
            missed=self.missed,
        )


BLOWS: dict[str, Callable[[Play, subprocess.Popen[bytes]], None]] = {
    "rank killed": Play._signal,
    "rank frozen": Play._signal,
    "supervisor killed": Play._signal,
    "controller killed": Play._kill_controller,
    "command killed": Play._kill_command,
    "Ctrl-C": Play._interrupt,
    "node killed": Play._kill_node,
    "node frozen": Play._freeze_node,
    "link cut briefly": Play._cut,
    "link cut for long": Play._cut,
    "connection dropped": Play._drop,
    "launcher cut off": Play._cut_off,
    "disk full": Play._fill_disk,
    "children left behind": Play._signal,
    "clock skewed": Play._signal,
    "daemon left behind": Play._signal,
    "supervisor stopped": Play._signal,
    "manifest damaged": Play._damage_manifest,
    "launcher killed": Play._kill_launcher,
}
