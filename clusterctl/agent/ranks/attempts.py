"""Start, stop and report attempts of runs on this node, as the launcher requests it.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any, Dict, Optional, Tuple

from clusterctl.agent.processes import (
    GRACE,
    boot_id,
    carries,
    end_all,
    environments,
    is_alive,
    marked,
    signal_recorded,
    state_letter,
)
from clusterctl.agent.ranks.conflicts import conflicts, one_start_at_a_time
from clusterctl.agent.ranks.decide import Seen, Stopping
from clusterctl.agent.ranks.decide import stop as decide_stop
from clusterctl.agent.records import (
    FINAL,
    AttemptFiles,
    Records,
    blank_secrets,
    marker_of,
    read_beat,
    read_json,
    write_json,
)
from clusterctl.agent.request import Refused, Request

# Limit in seconds between a supervisor's last record and its exit; about 20 ms on an idle machine.
LEAVING = 2.0
# Seconds that a supervisor has to report that it has started, or why it has not.
STARTING = 60.0
# Limit of bytes of a supervisor's first line, and of its log in an error.
LONGEST_LINE = 1 << 16


def start(request: Request) -> Dict[str, Any]:
    """Start an attempt's ranks under a supervisor; return its identity once the ranks have been started.

    `files` are texts by path, which the ranks find there.
    """
    run_dir, spec = request.path("run_dir"), request.need("spec", dict)
    check_spec(spec)
    files = AttemptFiles(run_dir, spec["attempt"])
    supervisor = read_json(files.supervisor)
    if os.path.exists(files.stop):
        raise Refused("stopped", f"attempt {spec['attempt']} of this run was stopped before it started")
    if supervisor is not None:
        raise Refused("exists", f"attempt {spec['attempt']} of this run was already started in {run_dir}")
    change = None
    if spec.get("setup"):
        from clusterctl.agent.setups import changes

        change = changes(request, spec=spec["setup"])
    with one_start_at_a_time(run_dir):
        taken = conflicts(run_dir, spec)
        if taken:
            raise Refused("in_use", "; ".join(taken))
        for folder in filter(None, (files.root, files.ranks, files.logs, spec.get("work"))):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        for path, text in (request.params.get("files") or {}).items():
            _write_text(path, text)
        write_json(files.spec, spec)
        return _spawn_supervisor(files, run_dir, spec["attempt"], change)


def _write_text(path: str, text: str) -> None:
    """Write a file that other users may read, aside and renamed: ranks of an earlier attempt may still read it."""
    aside = f"{path}.{os.getpid()}.aside"
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(text.encode())
    os.replace(aside, path)


def check_spec(spec: Dict[str, Any]) -> None:
    """Raise Refused if a specification cannot be started; all faults in one message."""
    wanted = {"run_id": str, "attempt": int, "node": str, "ranks": list}
    faults = [
        f"{name} must be {kind.__name__}"
        for name, kind in wanted.items()
        if not isinstance(spec.get(name), kind)
    ]
    ranks = spec.get("ranks")
    for rank in ranks if isinstance(ranks, list) else []:
        sound = isinstance(rank, dict) and isinstance(rank.get("rank"), int)
        if not sound or not isinstance(rank.get("argv"), list) or not rank["argv"]:
            faults.append(f"a rank needs rank, argv, env and cwd, not {rank!r:.80}")
        elif not isinstance(rank.get("env") or {}, dict):
            faults.append(f"env of rank {rank['rank']} must be dict")
    if faults:
        raise Refused("usage", "start: " + "; ".join(faults))


def _spawn_supervisor(
    files: AttemptFiles, run_dir: str, attempt: int, change: Optional[Dict[str, Any]]
) -> Dict[str, Any]:
    """Start the supervisor and return its identity once it has started the ranks.

    It is a fork of the agent: a new interpreter with the same modules would cost the node 30 ms of CPU.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Never returns: only the agent's process continues with the caller.
        _become_supervisor(files, run_dir, attempt, writing, change)
    os.close(writing)
    line = _first_line(reading)
    # This is the first of two forks, which exits right away.
    os.waitpid(pid, 0)
    try:
        answer = json.loads(line)
    except ValueError:
        raise Refused(
            "supervisor", f"the supervisor did not start: {_end_of(files.supervisor_log)}"
        ) from None
    if "in_use" in answer:
        raise Refused("in_use", str(answer["in_use"]))
    return dict(answer)


def _become_supervisor(
    files: AttemptFiles, run_dir: str, attempt: int, ready: int, change: Optional[Dict[str, Any]]
) -> None:
    """Detach this fork of the agent from its session and its files, supervise the attempt, and exit."""
    code = 1
    # The outermost handler of this process: errors go to its log.
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        log = os.open(files.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for stream, file in ((0, nothing), (1, log), (2, log)):
            os.dup2(file, stream)
        _release_files(ready, nothing)
        os.chdir("/")
        from clusterctl.agent.ranks.supervisor import main

        main(run_dir, attempt, ready, change)
        code = 0
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code)


def _release_files(needed: int, nothing: int) -> None:
    """Close every file but the standard streams and `needed`: other processes wait for the end of the agent's.

    Their numbers stay in use, for `nothing`: an object of the agent that is collected later closes its own number,
    which must not be a file of the supervisor.
    """
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (needed, nothing):
            os.dup2(nothing, int(name), inheritable=False)


def _first_line(descriptor: int) -> bytes:
    """Return the first line that a supervisor writes, or the part of it that arrived within STARTING seconds."""
    line, deadline = b"", time.monotonic() + STARTING
    try:
        while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                break
            data = os.read(descriptor, LONGEST_LINE)
            if not data:
                break
            line += data
    finally:
        os.close(descriptor)
    return line


def _end_of(path: str) -> str:
    """Return the end of a log for an error message."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
        return file.read(2000).decode("utf-8", "replace")


def state(request: Request) -> Dict[str, Any]:
    """Return the recorded state of an attempt, and whether its supervisor lives and responds."""
    return read_state(request.path("run_dir"), request.need("attempt", int))


def alive(request: Request) -> Dict[str, Any]:
    """Return for each of some attempts whether a process of it, or its supervisor, lives; /proc is read once."""
    attempts = request.need("attempts", list)
    environs = [environ for _, environ in environments()]
    result = []
    for entry in attempts:
        marker = {"CLUSTERCTL_RUN_ID": str(entry["run_id"]), "CLUSTERCTL_NODE": str(entry["node"])}
        supervisor = read_json(AttemptFiles(str(entry["run_dir"]), int(entry["attempt"])).supervisor)
        lives = supervisor is not None and is_alive(supervisor)
        result.append(lives or any(carries(marker, environ) for environ in environs))
    return {"alive": result}


def read_node(run_dir: str, attempt: int) -> Tuple[Optional[Dict[str, Any]], Optional[Dict[str, Any]]]:
    """Return the supervisor and the state of an attempt here; `lost` if the supervisor died before the end."""
    files = AttemptFiles(run_dir, attempt)
    supervisor, node = read_json(files.supervisor), read_json(files.node)
    alive = supervisor is not None and is_alive(supervisor)
    if not alive:
        # It may have written its last record just before it exited.
        node = read_json(files.node)
    if supervisor is not None and (node is None or not isinstance(node.get("state"), str)):
        node = {"state": "running"}
    if node is not None and node.get("state") not in FINAL and not alive:
        node = {**node, "state": "lost"}
    if supervisor is None:
        return None, node
    more = responsiveness(files, supervisor) if alive else {}
    rebooted = supervisor.get("boot_id") != boot_id()
    return {**supervisor, "alive": alive, "rebooted": rebooted, **more}, node


def responsiveness(files: AttemptFiles, supervisor: Dict[str, Any]) -> Dict[str, Any]:
    """Return the seconds since a living supervisor's last heartbeat, and its process state, a letter of proc(5)."""
    beat = read_beat(files.beat)
    silent = None if beat is None else max(0.0, round(time.monotonic() - beat, 1))
    return {"silent": silent, "process": state_letter(int(supervisor["pid"]))}


def read_state(run_dir: str, attempt: int) -> Dict[str, Any]:
    """Return the attempt as it is now, with each of its ranks."""
    files = AttemptFiles(run_dir, attempt)
    supervisor, node = read_node(run_dir, attempt)
    deadline = time.monotonic() + LEAVING
    while (
        supervisor
        and supervisor["alive"]
        and node
        and node.get("state") in FINAL
        and time.monotonic() < deadline
    ):
        # It has written its last record and is about to exit: an ended attempt has no process.
        time.sleep(0.005)
        supervisor, node = read_node(run_dir, attempt)
    names = sorted(os.listdir(files.ranks), key=_rank_order) if os.path.isdir(files.ranks) else []
    ranks = [read_json(os.path.join(files.ranks, name)) for name in names if name.endswith(".json")]
    return {
        "supervisor": supervisor,
        "node": node,
        "ranks": [rank for rank in ranks if rank],
        "heartbeats": heartbeats(files.heartbeats),
        "pace": read_json(files.pace) or {},
    }


def _rank_order(name: str) -> int:
    stem = name.split(".")[0]
    return int(stem) if stem.isdigit() else -1


def heartbeats(folder: str) -> Dict[str, Any]:
    """Return by rank the last content of its heartbeat file, and the age in seconds."""
    result = {}
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        rank = name[len("rank-") :]
        if name.startswith("rank-") and rank.isdigit():
            try:
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                    result[rank] = {
                        "text": file.readline(200).strip(),
                        "age": time.time() - os.fstat(file.fileno()).st_mtime,
                    }
            except OSError:
                continue
    return result


def stop(request: Request) -> Dict[str, Any]:
    """Stop an attempt's ranks, wait for the end, and return how many of its processes are left.

    That is 0, unless processes hang in the kernel. With `hang`, {rank, hang: seconds}, the end counts as a failure: no
    rank had written anything for so long. With `abort`, ranks that write their stacks when they are aborted do so. A
    supervisor that does not respond is killed; its marker identifies its
    ranks.
    """
    run_dir, attempt = request.path("run_dir"), request.need("attempt", int)
    grace = float(request.params.get("grace", GRACE))
    files, state = AttemptFiles(run_dir, attempt), Stopping(grace)
    while not request.cancelled.is_set():
        supervisor = read_json(files.supervisor)
        state, actions = decide_stop(state, _seen(files, supervisor), time.monotonic())
        for action in actions:
            if action == "record":
                _record_stop(files, request, grace)
            elif action == "sweep":
                _stop_without_supervisor(files, read_json(files.spec) or {}, grace)
            elif supervisor and action == "terminate":
                # A process that was stopped takes SIGTERM only after it is continued.
                signal_recorded(supervisor, signal.SIGTERM, signal.SIGCONT)
            elif supervisor and action == "kill":
                signal_recorded(supervisor, signal.SIGKILL)
        if state.stage == "answered":
            break
        time.sleep({"waiting": 0.02, "killed": 0.2}.get(state.stage, 0.0))
    spec = read_json(files.spec)
    if spec is None:
        return {"left": 0, "state": None}
    blank_secrets(files, spec)
    node = read_json(files.node) or {}
    if state.stuck:
        node["unresponsive"] = {"silent": state.stuck.silent, "process": state.stuck.process}
        write_json(files.node, node)
    left = node.get("left")
    others = len(left) if isinstance(left, list) else 0
    return {"left": len(marked(marker_of(spec))) + others, "state": node.get("state")}


def _seen(files: AttemptFiles, supervisor: Optional[Dict[str, Any]]) -> Seen:
    """Return what a request to stop sees now."""
    lives = supervisor is not None and is_alive(supervisor)
    more = responsiveness(files, supervisor) if lives and supervisor else {"silent": None, "process": ""}
    return Seen(os.path.exists(files.spec), lives, (read_json(files.node) or {}).get("state"), **more)


def _record_stop(files: AttemptFiles, request: Request, grace: float) -> None:
    """Record a request to stop: a start in progress, or a supervisor that is just starting, sees it and ends.

    If the disk is full, the signal to the supervisor is enough.
    """
    os.makedirs(files.root, mode=0o700, exist_ok=True)
    options = {name: request.params[name] for name in ("abort", "hang") if request.params.get(name)}
    Records().write(files.stop, {"grace": grace, **options, "asked": time.time()})


def _stop_without_supervisor(files: AttemptFiles, spec: Dict[str, Any], grace: float) -> None:
    """End the ranks of a dead supervisor, which only their marker identifies."""
    end_all([], marker_of(spec), grace)
    from clusterctl.agent.ranks import containers

    containers.remove(spec)
    for entry in spec["ranks"]:
        record = read_json(files.rank(entry["rank"]))
        if record and record.get("state") == "running" and not is_alive(record):
            write_json(
                files.rank(entry["rank"]), {**record, "state": "exited", "exit_code": None, "signal": None}
            )
    failure = (read_json(files.node) or {}).get("first_failure")
    write_json(
        files.node,
        {"state": "stopped", "first_failure": failure, "ended": time.time(), "supervisor_lost": True},
    )
