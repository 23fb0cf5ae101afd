"""The parent process of a run's ranks on one node: it starts, records and stops them, and outlives the launcher.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from typing import Any, Dict, List, Optional

from clusterctl.agent import compact_json
from clusterctl.agent.holes import trim
from clusterctl.agent.processes import GRACE, end_all, identity
from clusterctl.agent.ranks import containers
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

# Limit in seconds of the grace after a failure: ranks that wait for a dead one cannot save a checkpoint.
FAILED_GRACE = 5.0
# Seconds that ranks which hang are kept for the roll call of a controller, which takes up to 5 s.
HELD = 10.0
# Seconds for processes that a finished rank left behind.
SWEEP = 2.0
# Seconds at most from when a process looks ended until its exit status is there: its last thread ends later.
REAPING = 2.0
# Seconds between two checks of heartbeats, if nothing else wakes a supervisor; it writes its own as often.
LOOK = 1.0
# In a rank's environment: by this the watcher finds the ranks to end when their supervisor is killed.
SUPERVISED = "CLUSTERCTL_SUPERVISED"
PLOGS = "ASCEND_PROCESS_LOG_PATH"


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
    """Starts the ranks, waits, and stops all of them when one fails or when a stop is requested."""

    def __init__(self, run_dir: str, attempt: int, change: Optional[Dict[str, Any]] = None) -> None:
        self.files = AttemptFiles(run_dir, attempt)
        # The changes of the setup to the environment; they may contain secrets, and are not in the specification.
        self.change = change
        spec = read_json(self.files.spec)
        assert spec is not None
        self.spec = spec
        self.marker = marker_of(spec)
        self.ranks = [Rank(entry) for entry in spec["ranks"]]
        self.first_failure: Optional[Dict[str, Any]] = None
        self.stop_requested = False
        self.ending = False
        self.started = time.time()
        self.watcher = Watcher()
        self.records = Records()
        self.supervised = {SUPERVISED: os.urandom(8).hex()}
        numbers = [rank.spec["rank"] for rank in self.ranks]
        self.steps = Steps(self.files.heartbeats, numbers, spec.get("hang_after"), time.monotonic())
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
        for rank in self.ranks:
            if self.first_failure is None and not self.stop_requested:
                self._spawn(rank)
        blank_secrets(self.files, self.spec)

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

    def supervise(self) -> None:
        """Wait until every rank has ended, then record how the attempt ended on this node."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        grace = float(self.spec.get("grace", GRACE))
        while self._reap():
            if self.stop_requested or os.path.exists(self.files.stop):
                self.stop_requested = True
                request = read_json(self.files.stop) or {}
                grace = float(request.get("grace", grace))
                if request.get("hang"):
                    self._note_failure(request["hang"])
                if request.get("abort"):
                    self._abort()
            if self.stop_requested or self._has_failed():
                self._end(grace if self.stop_requested else min(grace, FAILED_GRACE))
                break
            select.select([reading], [], [], self.worlds.wait(LOOK, time.monotonic()))
            _drain(reading)
            self._check_ranks()
        self._end(SWEEP)
        if note := containers.remove(self.spec):
            self.left.append(f"containers: {note}")
        self.npu_info.end()
        for rank in self.ranks:
            if rank.process:
                self.watcher.release(rank.process.pid, self._watch_name())
        remove_halves(self.files.run_dir)
        failure = self.first_failure
        own = failure is not None and ("hang" in failure or "world" in failure)
        failed = own or (failure is not None and not self.stop_requested)
        self._write_state(
            "failed" if failed else "stopped" if self.stop_requested else "finished", ended=time.time()
        )
        self.records.finish(self.send_beat)

    def _check_ranks(self) -> None:
        """Check the ranks' heartbeats: a rank that hangs, or that a signal has stopped, is the failure of this node."""
        now = time.monotonic()
        self.kills.check(now)
        for rank in self.ranks if self.spec.get("log_limit") else ():
            for stream in ("out", "err"):
                trim(self.files.log(rank.spec["rank"], stream), int(self.spec["log_limit"]))
        self.adopted += reap_adopted(self._own())
        self.records.again()
        hung, pace = self.steps.find_hung(now), self.steps.pace(now)
        hung = self.stopped.find(now, self._living()) or hung
        if pace is not None:
            self.records.write(self.files.pace, pace, durable=False)
        if hung is not None and not self.first_failure:
            self._note_failure(hung)
        other = self.worlds.find(self._living(), now)
        if other is not None:
            self._note_failure(other)

    def _living(self) -> Dict[int, int]:
        """Return by rank the pid of each that has not ended."""
        processes = ((rank.spec["rank"], rank.process) for rank in self.ranks)
        return {
            number: process.pid for number, process in processes if process and process.returncode is None
        }

    def _note_failure(self, hung: Dict[str, Any]) -> None:
        """Record what was found as the failure; if that rank has ended meanwhile, it counts for the next one."""
        if self.first_failure:
            return
        specs = [rank.spec for rank in self.ranks if rank.record["state"] != "exited"] or [self.ranks[0].spec]
        spec = next((entry for entry in specs if entry["rank"] == hung["rank"]), specs[0])
        now = {"ended": time.time(), "monotonic": time.monotonic()}
        ended = {"local_rank": spec.get("local_rank"), "exit_code": None, "signal": None}
        self.first_failure = {**hung, "rank": spec["rank"], **ended, **now}
        self._write_state("running")

    def _has_failed(self) -> bool:
        """Return True if the ranks must end because of a failure.

        After a hang they stay for the controller's roll call of all nodes; it then stops them. Without one their stacks
        are saved here.
        """
        if self.first_failure is None:
            return False
        if "hang" not in self.first_failure:
            return True
        if time.monotonic() - self.first_failure["monotonic"] < HELD:
            return False
        # Imported here, because few attempts need it.
        from clusterctl.agent.ranks import roll_call, stacks

        stacks.collect(self.files, roll_call.processes_of(self.files, self.spec), save=True)
        return True

    def _abort(self) -> None:
        """End the ranks that write their stacks when they are aborted."""
        from clusterctl.agent.ranks import roll_call, stacks

        self.ending = True
        stacks.abort(self.files, roll_call.processes_of(self.files, self.spec))

    def request_stop(self, *_: object) -> None:
        """Handle SIGTERM: start no more ranks and end those that run."""
        self.stop_requested = True

    def _end(self, grace: float) -> None:
        self.ending = True
        groups = [rank.process.pid for rank in self.ranks if rank.process and rank.process.returncode is None]
        left = end_all(
            groups, self.marker, grace, between=self._reap, more=self._adopted, shorter=self._grace_of_request
        )
        self.left = names_of(left)
        deadline = time.monotonic() + REAPING
        while time.monotonic() < deadline:
            running = [rank.process for rank in self._reap() if rank.process]
            if not running:
                break
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
        ranks = [rank.process.pid for rank in self.ranks if rank.process]
        return [*ranks, *self.watcher.pids(), *self.npu_info.pids()]

    def _adopted(self) -> List[int]:
        """Return the processes that ranks left behind: the kernel made them children of this one."""
        self.adopted += reap_adopted(self._own())
        return adopted(self._own())

    def _reap(self) -> List[Rank]:
        """Take the exit statuses that are available; return the ranks that still run."""
        self.send_beat()
        running = []
        for rank in self.ranks:
            if rank.process is None or rank.record["state"] == "exited":
                continue
            code = rank.process.poll()
            if code is None:
                running.append(rank)
            else:
                self._ended(rank, code if code >= 0 else None, -code if code < 0 else None)
        return running

    def _ended(self, rank: Rank, code: Optional[int], number: Optional[int]) -> None:
        rank.record.update(
            state="exited", exit_code=code, signal=number, ended=time.time(), monotonic=time.monotonic()
        )
        if self.ending:
            rank.record["ended_here"] = True
        # A rank that we end was not killed because memory ran out.
        elif code != 0:
            evidence = {**self.kills.of(time.monotonic()), **fullness(self.files.run_dir)}
            rank.record.update(
                {key: evidence[key] for key in evidence if key != "oom" or number == signal.SIGKILL}
            )
        self.records.write(self.files.rank(rank.spec["rank"]), rank.record)
        if code != 0 and self.first_failure is None and not self.stop_requested:
            self.first_failure = {
                key: rank.record[key]
                for key in ("rank", "local_rank", "exit_code", "signal", "ended", "monotonic")
            }
            self._write_state("running")

    def _write_state(self, name: str, **more: Any) -> None:
        value = {"state": name, "first_failure": self.first_failure, "started": self.started, **more}
        if self.left:
            value["left"] = self.left
        if self.adopted:
            value["adopted"] = self.adopted
        self.records.write(self.files.node, value)


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
