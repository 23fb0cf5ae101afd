"""The parent process of a run's ranks on one node: it starts, records and stops them, and outlives the launcher.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections import deque
from typing import Any, Deque, Dict, Iterator, List, Optional

from clusterctl.agent import compact_json
from clusterctl.agent.holes import trim
from clusterctl.agent.processes import GRACE, end_all, identity
from clusterctl.agent.ranks import containers, decide
from clusterctl.agent.ranks.descendants import adopted, become_subreaper, names_of, reap_adopted
from clusterctl.agent.ranks.device_locks import DeviceLocks
from clusterctl.agent.ranks.hangs import Steps, Stopped
from clusterctl.agent.ranks.kernel import Kills
from clusterctl.agent.ranks.worlds import Worlds
from clusterctl.agent.reaper import Watcher
from clusterctl.agent.records import (
    AttemptFiles,
    Records,
    blank_secrets,
    fullness,
    marker_of,
    read_json,
    remove_halves,
    write_beat,
    write_json,
)
from clusterctl.agent.spawn import NOT_FOUND, NOT_RUNNABLE, candidates, command, environment, start

# Seconds at most from when a process looks ended until its exit status is there: its last thread ends later.
REAPING = 2.0
# Seconds between two checks of heartbeats, if nothing else wakes a supervisor; it writes its own as often.
LOOK = 1.0
# In a rank's environment: by this the watcher finds the ranks to end when their supervisor is killed.
SUPERVISED = "CLUSTERCTL_SUPERVISED"
PLOGS = "ASCEND_PROCESS_LOG_PATH"
# What is recorded of a rank that failed.
FAILURE = ("rank", "exit_code", "signal", "ended", "monotonic")


class Rank:
    """One process of the run."""

    def __init__(self, spec: Dict[str, Any]) -> None:
        self.spec = spec
        self.process: "Optional[subprocess.Popen[bytes]]" = None
        self.record: Dict[str, Any] = {
            "rank": spec["rank"],
            "local_rank": spec.get("local_rank"),
            "state": "starting",
        }


class Supervisor:
    """Starts the ranks, and carries out what `decide` says: all of them end when one fails or a stop is requested."""

    def __init__(self, run_dir: str, attempt: int, change: Optional[Dict[str, Any]] = None) -> None:
        self.files = AttemptFiles(run_dir, attempt)
        # The changes of the setup to the environment; they may contain secrets, and are not in the specification.
        self.change = change
        spec = read_json(self.files.spec)
        assert spec is not None
        self.spec = spec
        self.marker = marker_of(spec)
        self.ranks = {entry["rank"]: Rank(entry) for entry in spec["ranks"]}
        self.state = decide.Supervised(
            dict.fromkeys(self.ranks, "waiting"), grace=float(spec.get("grace", GRACE))
        )
        self.events: Deque[decide.Event] = deque()
        self.carrying_out, self.starting = False, True
        self.postponed: Optional[decide.Action] = None
        # Whether a SIGTERM arrived, which a request to stop sends.
        self.terminated = False
        self.started = time.time()
        self.watcher = Watcher()
        self.records = Records()
        self.supervised = {SUPERVISED: os.urandom(8).hex()}
        self.steps = Steps(self.files.heartbeats, self.ranks, spec.get("hang_after"), time.monotonic())
        self.kills = Kills(time.monotonic())
        self.worlds = Worlds(**(spec.get("world") or {"sizes": [], "launchers": {}}), now=time.monotonic())
        self.npu_info = NpuInfo(spec, os.path.join(self.files.root, "npu_info_before.txt"))
        self.beat = os.open(self.files.beat, os.O_WRONLY | os.O_CREAT, 0o600)
        self.left: List[str] = []
        self.adopted = 0
        self.send_beat()
        self.stopped = Stopped(spec.get("hang_after"))

    def send_beat(self) -> None:
        """Record that this process is not stuck."""
        write_beat(self.beat, time.monotonic())

    def _watch_name(self) -> str:
        return f"{SUPERVISED}={self.supervised[SUPERVISED]}"

    def spawn_all(self) -> None:
        """Start the ranks, and then remove the secrets from the specification on the disk."""
        self._write_state("running")
        self._step(decide.Event("began"))
        self.starting = False
        blank_secrets(self.files, self.spec)

    def _step(self, event: decide.Event) -> None:
        """Take an event and carry out what follows; events that an action brings come after it."""
        self.events.append(event)
        if self.carrying_out:
            return
        self.carrying_out = True
        while self.events:
            for due in (*self._requested(), self.events.popleft()):
                self.state, actions = decide.step(self.state, due, time.monotonic())
                for action in actions:
                    if self.starting and action.kind == "end":
                        # The agent waits for the start; the end follows it.
                        self.postponed = action
                    else:
                        self._carry_out(action)
        self.carrying_out = False

    def _carry_out(self, action: decide.Action) -> None:
        if action.kind == "spawn":
            self._spawn(self.ranks[action.rank])
        elif action.kind == "save":
            self._write_state("running")
        elif action.kind == "end":
            self._end(action.grace)
            self._step(decide.Event("ended"))
        elif action.kind == "finish":
            self._finish()
        else:
            # Imported here, because few attempts need it.
            from clusterctl.agent.ranks import roll_call, stacks

            processes = roll_call.processes_of(self.files, self.spec)
            if action.kind == "abort":
                stacks.abort(self.files, processes)
            else:
                stacks.collect(self.files, processes, save=True)

    def _requested(self) -> "Iterator[decide.Event]":
        """Yield what a request to stop brings, if there is one."""
        if self.state.stage != "running" or not (self.terminated or os.path.exists(self.files.stop)):
            return
        request = read_json(self.files.stop) or {}
        if request.get("hang"):
            yield decide.Event("found", failure=_now(request["hang"]))
        grace = float(request.get("grace", self.state.grace))
        yield decide.Event("stop", grace=grace, abort=bool(request.get("abort")))

    def _spawn(self, rank: Rank) -> None:
        number = rank.spec["rank"]
        extra = {
            **(rank.spec.get("env") or {}),
            **self.marker,
            **self.supervised,
            "CLUSTERCTL_RUN_DIR": self.files.run_dir,
        }
        prepared = (self.change or {}).get("set") or {}
        if rank.spec.get("programs") and "PATH" not in extra:
            path = prepared.get("PATH") or os.environ.get("PATH") or os.defpath
            extra["PATH"] = f"{rank.spec['programs']}:{path}"
        if prepared.get("PYTHONPATH") and extra.get("PYTHONPATH") == rank.spec.get("cwd"):
            # The launcher's value is the pushed code alone; CANN's modules are found by that of its setup.
            extra["PYTHONPATH"] = f"{extra['PYTHONPATH']}:{prepared['PYTHONPATH']}"
        if str(extra.get(PLOGS, "")).startswith(self.files.root):
            # CANN may not create the folder itself.
            os.makedirs(str(extra[PLOGS]), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        out = os.open(self.files.log(number, "out"), flags, 0o600)
        err = os.open(self.files.log(number, "err"), flags, 0o600)
        cwd = os.path.expanduser(rank.spec.get("cwd") or self.files.run_dir)
        argv = command([str(word) for word in rank.spec["argv"]])
        try:
            os.chdir(cwd)
            rank.process = start(argv, environment(extra, self.change), out, err)
        except (OSError, ValueError) as problem:
            os.write(
                err,
                f"clusterctl: cannot start {rank.spec['argv'][0]!r} in {cwd}: {problem}\n".encode(
                    errors="replace"
                ),
            )
            self._ended(rank, NOT_FOUND if isinstance(problem, FileNotFoundError) else NOT_RUNNABLE, None)
            return
        finally:
            os.chdir("/")
            os.close(out)
            os.close(err)
        self.watcher.watch(rank.process.pid, self._watch_name())
        rank.record.update(identity(rank.process.pid), started=time.time(), state="running")
        self.records.write(self.files.rank(number), rank.record)
        self._step(decide.Event("started", number))

    def supervise(self) -> None:
        """Wait until every rank has ended, then record how the attempt ended on this node."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if self.postponed:
            self._carry_out(self.postponed)
        while self.state.stage != "over":
            self._reap()
            self._step(decide.Event("looked"))
            if self.state.stage != "over":
                select.select([reading], [], [], self.worlds.wait(LOOK, time.monotonic()))
                _drain(reading)
                self._check_ranks()

    def _finish(self) -> None:
        """Record how the attempt ended on this node."""
        if note := containers.remove(self.spec):
            self.left.append(f"containers: {note}")
        self.npu_info.end()
        for rank in self.ranks.values():
            if rank.process:
                self.watcher.release(rank.process.pid, self._watch_name())
        remove_halves(self.files.run_dir)
        self._write_state(self.state.outcome, ended=time.time())
        self.records.finish(self.send_beat)

    def _check_ranks(self) -> None:
        """Check the ranks' heartbeats: a rank that hangs, or that a signal has stopped, is the failure of this node."""
        now = time.monotonic()
        self.kills.check(now)
        for rank in self.ranks if self.spec.get("log_limit") else ():
            for stream in ("out", "err"):
                trim(self.files.log(rank, stream), int(self.spec["log_limit"]))
        self.adopted += reap_adopted(self._own())
        self.records.again()
        hung, pace = self.steps.find_hung(now), self.steps.pace(now)
        hung = self.stopped.find(now, self._living()) or hung
        if pace is not None:
            self.records.write(self.files.pace, pace, durable=False)
        for failure in (hung, self.worlds.find(self._living(), now)):
            if failure is not None:
                self._step(decide.Event("found", failure=_now(failure)))

    def _living(self) -> Dict[int, int]:
        """Return by rank the pid of each that has not ended."""
        processes = ((number, rank.process) for number, rank in self.ranks.items())
        return {
            number: process.pid for number, process in processes if process and process.returncode is None
        }

    def request_stop(self, *_: object) -> None:
        """Handle SIGTERM: start no more ranks and end those that run."""
        self.terminated = True

    def _end(self, grace: float) -> None:
        left = end_all(
            [process.pid for process in self._reap()],
            self.marker,
            grace,
            between=self._reap,
            more=self._adopted,
            shorter=self._grace_of_request,
        )
        self.left = names_of(left)
        deadline = time.monotonic() + REAPING
        while time.monotonic() < deadline and (running := self._reap()):
            # A process of which only the first thread has ended looks ended in /proc.
            for process in running:
                process.kill()
            time.sleep(0.002)

    def _grace_of_request(self) -> float:
        """Return the grace of the last request to stop: a further one may ask for less."""
        request = read_json(self.files.stop) if os.path.exists(self.files.stop) else None
        return float((request or {}).get("grace", "inf"))

    def _own(self) -> List[int]:
        """Return the pids of the children that this process started itself."""
        ranks = [rank.process.pid for rank in self.ranks.values() if rank.process]
        return [*ranks, *self.watcher.pids(), *self.npu_info.pids()]

    def _adopted(self) -> List[int]:
        """Return the processes that ranks left behind: the kernel made them children of this one."""
        self.adopted += reap_adopted(self._own())
        return adopted(self._own())

    def _reap(self) -> "List[subprocess.Popen[bytes]]":
        """Take the exit statuses that are available; return the processes that still run."""
        self.send_beat()
        running = []
        for rank in self.ranks.values():
            if rank.process is None or rank.record["state"] == "exited":
                continue
            code = rank.process.poll()
            if code is None:
                running.append(rank.process)
            else:
                self._ended(rank, code if code >= 0 else None, -code if code < 0 else None)
        return running

    def _ended(self, rank: Rank, code: Optional[int], number: Optional[int]) -> None:
        rank.record.update(
            state="exited", exit_code=code, signal=number, ended=time.time(), monotonic=time.monotonic()
        )
        if self.state.stage != "running":
            rank.record["ended_here"] = True
        # A rank that we end was not killed because memory ran out.
        elif code != 0:
            evidence = {**self.kills.of(time.monotonic()), **fullness(self.files.run_dir)}
            rank.record.update(
                {key: evidence[key] for key in evidence if key != "oom" or number == signal.SIGKILL}
            )
        self.records.write(self.files.rank(rank.spec["rank"]), rank.record)
        failure = {key: rank.record[key] for key in FAILURE} if code != 0 else {}
        self._step(decide.Event("exited", rank.spec["rank"], failure))

    def _write_state(self, name: str, **more: Any) -> None:
        failure = self.state.failure
        if failure is not None:
            failure = {**failure, "local_rank": self.ranks[failure["rank"]].spec.get("local_rank")}
        value = {"state": name, "first_failure": failure, "started": self.started, **more}
        if self.left:
            value["left"] = self.left
        if self.adopted:
            value["adopted"] = self.adopted
        self.records.write(self.files.node, value)


def _now(failure: Dict[str, Any]) -> Dict[str, Any]:
    """Return a failure that is not the end of a process, with the present time."""
    return {**failure, "exit_code": None, "signal": None, "ended": time.time(), "monotonic": time.monotonic()}


def _drain(fd: int) -> None:
    while select.select([fd], [], [], 0)[0]:
        os.read(fd, 4096)


def main(run_dir: str, attempt: int, ready: int, change: Optional[Dict[str, Any]] = None) -> None:
    """Start the ranks, report that to the agent through `ready`, and supervise them until they have ended."""
    become_subreaper()
    allow_open_files()
    supervisor = Supervisor(run_dir, attempt, change)
    # Do this before the pid is known, because a stop may follow immediately.
    signal.signal(signal.SIGTERM, supervisor.request_stop)
    locks = DeviceLocks(supervisor.spec)
    taken = locks.take()
    if taken:
        blank_secrets(supervisor.files, supervisor.spec)
        os.write(ready, compact_json.dumps({"in_use": "; ".join(taken)}).encode() + b"\n")
        return
    me = identity(os.getpid())
    write_json(supervisor.files.supervisor, {**me, "started": supervisor.started})
    supervisor.spawn_all()
    os.write(ready, compact_json.dumps({**me, "note": locks.note}).encode() + b"\n")
    os.close(ready)
    supervisor.supervise()


# So many open files suffice for any rank; a larger limit slows programs that close all possible ones.
OPEN_FILES = 65536


def allow_open_files() -> None:
    """Raise the soft limit of open files for the ranks: a login often has 1024, and a hard limit that is higher."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# Where npu-smi is: on the path, or where the vendor installs it.
TOOLS = (b"npu-smi", b"/usr/local/bin/npu-smi")


class NpuInfo:
    """Runs npu-smi at the start of an attempt, so that `logs pull` can compare its output with a later one.

    No process waits for it: with sixteen devices it takes up to 6 s, and a driver that hangs never answers. Nothing is
    run on a node without NPUs.
    """

    def __init__(self, spec: Dict[str, Any], path: str) -> None:
        self._process: "Optional[subprocess.Popen[bytes]]" = None
        if spec.get("kind") != "npu":
            return
        tools = (found for name in TOOLS for found in candidates(name, os.environb))
        tool = next((found for found in tools if os.access(found, os.X_OK)), None)
        if tool is None:
            return
        try:
            with open(path, "wb") as file:
                self._process = start([tool, b"info"], os.environb, file.fileno(), file.fileno())
        except OSError:
            # A full disk is reported by the code that needs the space.
            return

    def pids(self) -> List[int]:
        """Return the pid of the program while it runs."""
        running = self._process is not None and self._process.poll() is None
        return [self._process.pid] if self._process is not None and running else []

    def end(self) -> None:
        """End the program if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
