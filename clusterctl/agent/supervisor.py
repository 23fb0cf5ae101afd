"""What owns a run's ranks on one node: starts them, records them, stops them, and outlives the launcher.

What npu-smi says of a node's devices while an attempt begins, for `logs pull` to lay beside what it says later.

Nobody waits for it: of sixteen devices it takes up to 6 s, and of a driver that hangs for ever. Runs on nodes too:
standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from clusterctl.agent import stacks
from clusterctl.agent.child import NOT_FOUND, NOT_RUNNABLE, command, environment
from clusterctl.agent.conflicts import conflicts, one_start_at_a_time
from clusterctl.agent.hangs import Steps, Stopped
from clusterctl.agent.kernel import Kills
from clusterctl.agent.processes import (
    carries,
    end_all,
    environments_of_processes,
    identity,
    is_alive,
    marked,
)
from clusterctl.agent.reaper import Watcher
from clusterctl.agent.records import Records, fullness, remove_halves, write_json
from clusterctl.agent.records import read_json as read_json
from clusterctl.agent.request import Refused, Request

# Seconds that ranks have for a last checkpoint.
GRACE = 30.0
# At most so many after a failure: ranks that wait for a dead one can't save.
FAILED_GRACE = 5.0
# Seconds at most between a supervisor's last word and its end, some 20 ms on an idle machine.
LEAVING = 2.0
# Seconds for what a finished rank left behind.
SWEEP = 2.0
REAPING = (
    # Seconds at most: a process looks ended before its last thread is, and only then tells how it ended.
    2.0
)
# Seconds between two looks at heartbeats, where nothing else wakes a supervisor.
LOOK = 1.0
# In a rank's environment: what ends it when its supervisor is killed knows it by this.
KEPT = "CLUSTERCTL_SUPERVISED"
PLOGS = "ASCEND_PROCESS_LOG_PATH"
FINAL = ("finished", "failed", "stopped")
LAUNCH = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from clusterctl.agent.supervisor import main; main(sys.argv[2:])"
)


class AttemptFiles:
    """Where one attempt of a run keeps its state on a node."""

    def __init__(self, run_dir: str, attempt: int) -> None:
        self.run_dir = run_dir
        self.root = os.path.join(run_dir, "attempts", str(attempt))
        # Holds environments: only its owner may read it.
        self.spec = os.path.join(self.root, "spec.json")
        self.node = os.path.join(self.root, "node.json")
        self.supervisor = os.path.join(self.root, "supervisor.json")
        self.supervisor_log = os.path.join(self.root, "supervisor.log")
        self.stop = os.path.join(self.root, "stop.json")
        self.pace = os.path.join(self.root, "pace.json")
        self.ranks = os.path.join(self.root, "ranks")
        self.logs = os.path.join(self.root, "logs")
        self.heartbeats = os.path.join(run_dir, "heartbeat")

    def rank(self, rank: int) -> str:
        return os.path.join(self.ranks, f"{rank}.json")

    def log(self, rank: int, stream: str) -> str:
        return os.path.join(self.logs, f"rank-{rank}.{stream}")


def marker_of(spec: Dict[str, Any]) -> Dict[str, str]:
    """What every process of one attempt on one node carries; the node too, since two nodes may share a
    kernel."""
    return {
        "CLUSTERCTL_RUN_ID": str(spec["run_id"]),
        "CLUSTERCTL_ATTEMPT": str(spec["attempt"]),
        "CLUSTERCTL_NODE": str(spec["node"]),
    }


# ---- asked by the launcher


def start(request: Request) -> Dict[str, Any]:
    """Start an attempt's ranks under a supervisor of their own; comes back when they have been started."""
    run_dir, spec = request.path("run_dir"), request.need("spec", dict)
    _check(spec)
    files = AttemptFiles(run_dir, spec["attempt"])
    there = read_json(files.supervisor)
    if os.path.exists(files.stop):
        raise Refused("stopped", f"attempt {spec['attempt']} of this run was stopped before it started")
    if there is not None:
        raise Refused("exists", f"attempt {spec['attempt']} of this run was already started in {run_dir}")
    with one_start_at_a_time(run_dir):
        taken = conflicts(run_dir, spec)
        if taken:
            raise Refused("in_use", "; ".join(taken))
        for folder in (files.root, files.ranks, files.logs):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        write_json(files.spec, spec)
        return _spawn_supervisor(files, run_dir, spec["attempt"])


def _check(spec: Dict[str, Any]) -> None:
    wanted = {"run_id": str, "attempt": int, "node": str, "ranks": list}
    faults = [
        f"{name} must be {kind.__name__}"
        for name, kind in wanted.items()
        if not isinstance(spec.get(name), kind)
    ]
    for rank in spec.get("ranks") or []:
        if not isinstance(rank, dict) or not isinstance(rank.get("rank"), int) or not rank.get("argv"):
            faults.append(f"a rank needs rank, argv, env and cwd, not {rank!r:.80}")
    if faults:
        raise Refused("usage", "start: " + "; ".join(faults))


def _spawn_supervisor(files: AttemptFiles, run_dir: str, attempt: int) -> Dict[str, Any]:
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    reading, writing = os.pipe()
    log = os.open(files.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    argv = [
        sys.executable,
        "-I",
        "-S",
        "-X",
        "utf8",
        "-c",
        LAUNCH,
        package,
        run_dir,
        str(attempt),
        str(writing),
    ]
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(writing,),
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(writing)
        os.close(log)
    with open(reading, "rb") as ready:
        line = ready.readline()
    # The first of the two forks.
    process.wait()
    if not line:
        with open(files.supervisor_log, encoding="utf-8", errors="replace") as file:
            raise Refused("supervisor", f"the supervisor did not start: {file.read()[-2000:]}")
    answer = json.loads(line)
    assert isinstance(answer, dict)
    return answer


def state(request: Request) -> Dict[str, Any]:
    """What an attempt's files say, and whether its supervisor lives."""
    return read_state(request.path("run_dir"), request.need("attempt", int))


def alive(request: Request) -> Dict[str, Any]:
    """Return for each of some attempts whether a process of it, or its supervisor, lives; /proc is read once."""
    attempts = request.need("attempts", list)
    environments = environments_of_processes()
    found = []
    for entry in attempts:
        marker = {"CLUSTERCTL_RUN_ID": str(entry["run_id"]), "CLUSTERCTL_NODE": str(entry["node"])}
        supervisor = read_json(AttemptFiles(str(entry["run_dir"]), int(entry["attempt"])).supervisor)
        lives = supervisor is not None and is_alive(supervisor)
        found.append(lives or any(carries(marker, variables) for variables in environments.values()))
    return {"alive": found}


def read_node(run_dir: str, attempt: int) -> Tuple[Optional[Dict[str, Any]], Optional[Dict[str, Any]]]:
    """The supervisor and the node's state; `lost` when the supervisor died before it could write the end."""
    files = AttemptFiles(run_dir, attempt)
    supervisor, node = read_json(files.supervisor), read_json(files.node)
    alive = supervisor is not None and is_alive(supervisor)
    if not alive:
        # It may have written its last word just before it ended.
        node = read_json(files.node)
    if node is None and supervisor is not None:
        node = {"state": "running"}
    if node is not None and node["state"] not in FINAL and not alive:
        node = {**node, "state": "lost"}
    return {**supervisor, "alive": alive} if supervisor else None, node


def read_state(run_dir: str, attempt: int) -> Dict[str, Any]:
    """The attempt as it is now, with each of its ranks."""
    files = AttemptFiles(run_dir, attempt)
    supervisor, node = read_node(run_dir, attempt)
    deadline = time.monotonic() + LEAVING
    while (
        supervisor and supervisor["alive"] and node and node["state"] in FINAL and time.monotonic() < deadline
    ):
        # Its last word is written, and it is on its way out: an ended attempt has no process.
        time.sleep(0.005)
        supervisor, node = read_node(run_dir, attempt)
    names = sorted(os.listdir(files.ranks), key=_rank_order) if os.path.isdir(files.ranks) else []
    ranks = [read_json(os.path.join(files.ranks, name)) for name in names if name.endswith(".json")]
    return {
        "supervisor": supervisor,
        "node": node,
        "ranks": [rank for rank in ranks if rank],
        "heartbeats": _heartbeats(files.heartbeats),
        "pace": read_json(files.pace) or {},
    }


def _rank_order(name: str) -> int:
    stem = name.split(".")[0]
    return int(stem) if stem.isdigit() else -1


def _heartbeats(folder: str) -> Dict[str, Any]:
    """By rank: what its trainer wrote last, and how many seconds ago."""
    found = {}
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        rank = name[len("rank-") :]
        if name.startswith("rank-") and rank.isdigit():
            try:
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                    found[rank] = {
                        "text": file.readline(200).strip(),
                        "age": time.time() - os.fstat(file.fileno()).st_mtime,
                    }
            except OSError:
                continue
    return found


def stop(request: Request) -> Dict[str, Any]:
    """Stop an attempt's ranks, wait for the end, and say how many processes are left of it: 0, or the kernel
    holds them. With `hang`, {rank, hang: seconds}, its end is a failure: nothing was heard of any rank for so long."""
    run_dir, attempt = request.path("run_dir"), request.need("attempt", int)
    grace = float(request.params.get("grace", GRACE))
    files = AttemptFiles(run_dir, attempt)
    spec, supervisor = read_json(files.spec), read_json(files.supervisor)
    if (read_json(files.node) or {}).get("state") not in FINAL:
        os.makedirs(files.root, mode=0o700, exist_ok=True)
        # Before all else: a start that is still on its way, or a supervisor that is just starting, finds it and ends.
        asked = {name: request.params[name] for name in ("stacks", "hang") if request.params.get(name)}
        # No room: the signal serves.
        Records().write(files.stop, {"grace": grace, **asked, "asked": time.time()})
    if spec is None:
        return {"left": 0, "state": None}
    if supervisor is not None and is_alive(supervisor):
        os.kill(supervisor["pid"], signal.SIGTERM)
        deadline = time.monotonic() + grace + 15.0
        while is_alive(supervisor) and time.monotonic() < deadline and not request.cancelled.is_set():
            time.sleep(0.02)
    node = read_json(files.node)
    if supervisor is None or (not is_alive(supervisor) and (node is None or node["state"] not in FINAL)):
        _stop_without_supervisor(files, spec, grace)
    return {"left": len(marked(marker_of(spec))), "state": (read_json(files.node) or {}).get("state")}


def _stop_without_supervisor(files: AttemptFiles, spec: Dict[str, Any], grace: float) -> None:
    """The supervisor is dead: its ranks are known by their marker and by nothing else."""
    end_all([], marker_of(spec), grace)
    for one in spec["ranks"]:
        record = read_json(files.rank(one["rank"]))
        if record and record["state"] == "running" and not is_alive(record):
            write_json(
                files.rank(one["rank"]), {**record, "state": "exited", "exit_code": None, "signal": None}
            )
    failure = (read_json(files.node) or {}).get("first_failure")
    write_json(
        files.node,
        {"state": "stopped", "first_failure": failure, "ended": time.time(), "supervisor_lost": True},
    )


# ---- the supervisor's own process


class Rank:
    """One process of the run."""

    def __init__(self, spec: Dict[str, Any]) -> None:
        self.spec = spec
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.record: Dict[str, Any] = {
            "rank": spec["rank"],
            "local_rank": spec.get("local_rank"),
            "state": "starting",
        }


class Supervisor:
    """Starts the ranks, waits, and stops all when one fails or when it is asked to."""

    def __init__(self, run_dir: str, attempt: int) -> None:
        self.files = AttemptFiles(run_dir, attempt)
        spec = read_json(self.files.spec)
        assert spec is not None
        self.spec = spec
        self.marker = marker_of(spec)
        self.ranks = [Rank(one) for one in spec["ranks"]]
        self.first_failure: Optional[Dict[str, Any]] = None
        self.stop_asked = False
        self.ending = False
        self.started = time.time()
        self.watcher = Watcher()
        self.records = Records()
        self.kept = {KEPT: os.urandom(8).hex()}
        numbers = [rank.spec["rank"] for rank in self.ranks]
        self.steps = Steps(self.files.heartbeats, numbers, spec.get("hang_after"), time.monotonic())
        self.kills = Kills(time.monotonic())
        self.before = Before(spec, os.path.join(self.files.root, "npu_info_before.txt"))
        self.stopped = Stopped(spec.get("hang_after"))

    def spawn_all(self) -> None:
        self._write_state("running")
        for rank in self.ranks:
            if self.first_failure is None and not self.stop_asked:
                self._spawn(rank)

    def _spawn(self, rank: Rank) -> None:
        number = rank.spec["rank"]
        extra = {
            **(rank.spec.get("env") or {}),
            **self.marker,
            **self.kept,
            "CLUSTERCTL_RUN_DIR": self.files.run_dir,
        }
        if rank.spec.get("programs") and "PATH" not in extra:
            extra["PATH"] = f"{rank.spec['programs']}:{os.environ.get('PATH') or os.defpath}"
        if str(extra.get(PLOGS, "")).startswith(self.files.root):
            # CANN may not make it itself.
            os.makedirs(str(extra[PLOGS]), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        out = os.open(self.files.log(number, "out"), flags, 0o600)
        err = os.open(self.files.log(number, "err"), flags, 0o600)
        cwd = os.path.expanduser(rank.spec.get("cwd") or self.files.run_dir)
        argv = command([str(one) for one in rank.spec["argv"]])
        try:
            rank.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(extra),
                cwd=cwd,
                start_new_session=True,
            )
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
            os.close(out)
            os.close(err)
        self.watcher.watch(rank.process.pid, f"{KEPT}={self.kept[KEPT]}")
        rank.record.update(identity(rank.process.pid), started=time.time(), state="running")
        self.records.write(self.files.rank(number), rank.record)

    def supervise(self) -> None:
        """Wait until every rank ended, then write how the attempt ended on this node."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        grace = float(self.spec.get("grace", GRACE))
        while self._reap():
            if self.stop_asked or os.path.exists(self.files.stop):
                self.stop_asked = True
                asked = read_json(self.files.stop) or {}
                grace = float(asked.get("grace", grace))
                if asked.get("hang"):
                    self._note_hang(asked["hang"])
                if asked.get("stacks"):
                    self._save_stacks()
            if self.stop_asked or self.first_failure:
                self._end(grace if self.stop_asked else min(grace, FAILED_GRACE))
                break
            select.select([reading], [], [], LOOK)
            _drain(reading)
            self._look()
        self._end(SWEEP)
        self.before.end()
        for rank in self.ranks:
            if rank.process:
                self.watcher.release(rank.process.pid, f"{KEPT}={self.kept[KEPT]}")
        remove_halves(self.files.run_dir)
        failure = self.first_failure
        failed = failure is not None and ("hang" in failure or not self.stop_asked)
        self._write_state(
            "failed" if failed else "stopped" if self.stop_asked else "finished", ended=time.time()
        )
        self.records.finish()

    def _look(self) -> None:
        """At the heartbeats: a rank without a step for too long is this node's failure, and where it stands is
        written down first. So is one that a signal has stopped."""
        now = time.monotonic()
        self.kills.look(now)
        self.records.again()
        hung, pace = self.steps.look(now), self.steps.pace(now)
        hung = self.stopped.look(now, self._living()) or hung
        if pace is not None:
            self.records.write(self.files.pace, pace, durable=False)
        if hung is not None and not self.first_failure:
            self._note_hang(hung)
            self._save_stacks()

    def _living(self) -> Dict[int, int]:
        """By rank the pid of each that has not ended."""
        there = ((rank.spec["rank"], rank.process) for rank in self.ranks)
        return {number: process.pid for number, process in there if process and process.returncode is None}

    def _note_hang(self, hung: Dict[str, Any]) -> None:
        """A failure that is no end; of a rank that ended meanwhile it is the next one's."""
        if self.first_failure:
            return
        there = [rank.spec for rank in self.ranks if rank.record["state"] != "exited"] or [self.ranks[0].spec]
        spec = next((one for one in there if one["rank"] == hung["rank"]), there[0])
        now = {"ended": time.time(), "monotonic": time.monotonic()}
        ended = {"local_rank": spec.get("local_rank"), "exit_code": None, "signal": None}
        self.first_failure = {**hung, "rank": spec["rank"], **ended, **now}
        self._write_state("running")

    def _save_stacks(self) -> None:
        """Where the threads of each living rank stand goes to the end of its log."""
        living = [one for one in self.ranks if one.process and one.process.returncode is None]
        where = [
            (one.spec, one.process.pid, self.files.log(one.spec["rank"], "err"))
            for one in living
            if one.process
        ]
        stacks.save(where, self.steps.beating())

    def ask_stop(self, *_: object) -> None:
        """SIGTERM: end what was started, and start no more."""
        self.stop_asked = True

    def _end(self, grace: float) -> None:
        self.ending = True
        groups = [rank.process.pid for rank in self.ranks if rank.process and rank.process.returncode is None]
        end_all(groups, self.marker, grace, between=self._reap)
        deadline = time.monotonic() + REAPING
        while time.monotonic() < deadline:
            left = [rank.process for rank in self._reap() if rank.process]
            if not left:
                break
            # One whose first thread alone has ended is looked over by all that reads /proc.
            for process in left:
                process.kill()
            time.sleep(0.002)

    def _reap(self) -> List[Rank]:
        """Take the exit statuses that are there; the ranks that still run."""
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
        # What we end ourselves was not killed for want of memory.
        if code != 0 and not self.ending:
            said = {**self.kills.of(time.monotonic()), **fullness(self.files.run_dir)}
            rank.record.update({key: said[key] for key in said if key != "oom" or number == signal.SIGKILL})
        self.records.write(self.files.rank(rank.spec["rank"]), rank.record)
        if code != 0 and self.first_failure is None and not self.stop_asked:
            self.first_failure = {
                key: rank.record[key]
                for key in ("rank", "local_rank", "exit_code", "signal", "ended", "monotonic")
            }
            self._write_state("running")

    def _write_state(self, name: str, **more: Any) -> None:
        value = {"state": name, "first_failure": self.first_failure, "started": self.started, **more}
        self.records.write(self.files.node, value)


def _drain(fd: int) -> None:
    while select.select([fd], [], [], 0)[0]:
        os.read(fd, 4096)


def main(arguments: List[str]) -> None:
    """`RUN_DIR ATTEMPT READY_FD`: detach, start the ranks, tell the agent, and stay until they ended."""
    run_dir, attempt, ready = arguments[0], int(arguments[1]), int(arguments[2])
    if os.fork():
        os._exit(0)
    os.setsid()
    os.set_inheritable(ready, False)
    supervisor = Supervisor(run_dir, attempt)
    # Before its pid is known: a stop may come at once.
    signal.signal(signal.SIGTERM, supervisor.ask_stop)
    me = identity(os.getpid())
    write_json(supervisor.files.supervisor, {**me, "started": supervisor.started})
    supervisor.spawn_all()
    os.write(ready, json.dumps(me).encode() + b"\n")
    os.close(ready)
    supervisor.supervise()


# On the path, and where the vendor puts it.
TOOLS = ("npu-smi", "/usr/local/bin/npu-smi")


class Before:
    """The program under way; nothing where the node has no NPUs or no such program."""

    def __init__(self, spec: Dict[str, Any], path: str) -> None:
        self._process: Optional["subprocess.Popen[bytes]"] = None
        tool = next((found for one in TOOLS for found in [shutil.which(one)] if found), None)
        if spec.get("kind") != "npu" or tool is None:
            return
        try:
            with open(path, "wb") as file:
                self._process = subprocess.Popen(
                    [tool, "info"], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
        except OSError:
            # A full disk is told by what needs it.
            return

    def end(self) -> None:
        """It has had its time."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
