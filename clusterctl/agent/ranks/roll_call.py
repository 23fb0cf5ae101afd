"""Call the roll of an attempt's ranks on this node: where each one stands, how far it has come, and what it waits for.

Nothing is ended. A rank is observed from outside: its process in /proc, the stack of its main thread by py-spy, or by
itself if it is a trainer, the steps and collectives that a trainer records. Below a launcher such as torchrun, each of
its workers is a rank.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Optional, Tuple

from clusterctl.agent.processes import carries, environments, stat_of, text_of
from clusterctl.agent.ranks import flight, stacks
from clusterctl.agent.ranks.links import links_of
from clusterctl.agent.ranks.stacks import Process
from clusterctl.agent.records import AttemptFiles, marker_of, read_json
from clusterctl.agent.request import Refused, Request

# Seconds at least over which the use of processors is measured.
SAMPLE = 0.5
# Variables that differ between a launcher and its workers.
OF_WORKERS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
# Clock ticks per second in /proc.
TICKS = os.sysconf("SC_CLK_TCK")


def roll_call(request: Request) -> Dict[str, Any]:
    """Return an observation of each rank of an attempt, or only of one.

    With `save`, write the stacks to the ends of their logs too.
    """
    files = AttemptFiles(request.path("run_dir"), request.need("attempt", int))
    spec = read_json(files.spec)
    if spec is None:
        raise Refused("missing", f"attempt {files.attempt} was not started here")
    only = request.params.get("only")
    processes = [process for process in processes_of(files, spec) if only in (None, process.rank)]
    before, began = {process.pid: _ticks(process.pid) for process in processes}, time.monotonic()
    writing = [flight.ask(process.environ, process.rank) for process in processes]
    stacks.collect(files, processes, save=bool(request.params.get("save")))
    time.sleep(max(0.0, began + (flight.WRITTEN if any(writing) else SAMPLE) - time.monotonic()))
    passed = time.monotonic() - began
    result = []
    for process in processes:
        used = round((_ticks(process.pid) - before[process.pid]) / TICKS / passed, 2)
        seen = {**process.as_json(), **_of_kernel(process.pid), **links_of(process.pid), "cpu": used}
        result.append({**seen, **_progress(files, process)})
    return {"ranks": result}


def processes_of(files: AttemptFiles, spec: Dict[str, Any]) -> List[Process]:
    """Return the process of each rank; those of the workers if a launcher started them."""
    marker = marker_of(spec)
    environs = {pid: environ for pid, environ in environments() if carries(marker, environ)}
    parents = {pid: int((stat_of(pid)[1:2] or ["0"])[0]) for pid in environs}
    result: List[Process] = []
    for entry in spec["ranks"]:
        number, argv = entry["rank"], entry["argv"]
        path = (entry.get("env") or {}).get("PATH") or os.environ.get("PATH") or ""
        record = read_json(files.rank(number)) or {}
        top = record.get("pid")
        if record.get("state") != "running" or top not in environs:
            ended = Process(number, number, 0, str(argv[0]), path)
            ended.exit_code, ended.signal = record.get("exit_code"), record.get("signal")
            result.append(ended)
            continue
        depths = {pid: depth for pid in environs for depth in _below(pid, top, parents)}
        tree = sorted(depths, key=lambda pid: (depths[pid], pid))
        workers = _workers(tree, environs)
        found = workers
        if not workers:
            found = {number: next((pid for pid in tree if stacks.is_python(pid)), top)}
        for rank, pid in sorted(found.items()):
            process = Process(rank, number, pid, str(argv[0]), path)
            process.worker, process.environ = bool(workers), _variables(environs[pid])
            local = process.environ.get("LOCAL_RANK", "")
            process.local_rank = int(local) if local.isdigit() else None
            result.append(process)
    return result


def _below(pid: int, top: int, parents: Dict[int, int]) -> List[int]:
    """Return by how many generations a process descends from `top`; [] if it does not."""
    depth = 0
    while pid != top:
        if pid not in parents:
            return []
        pid, depth = parents[pid], depth + 1
    return [depth]


def _workers(tree: List[int], environs: Dict[int, bytes]) -> Dict[int, int]:
    """Return by rank the first process of each worker that a launcher, the first process of the tree, has started."""
    of_launcher = _place(environs[tree[0]])
    result: Dict[int, int] = {}
    for pid in tree[1:]:
        place = _place(environs[pid])
        if place != of_launcher and str(place[0]).isdigit():
            result.setdefault(int(str(place[0])), pid)
    return result


def _place(environ: bytes) -> "Tuple[Optional[str], ...]":
    variables = _variables(environ)
    return tuple(variables.get(name) for name in OF_WORKERS)


def _variables(environ: bytes) -> Dict[str, str]:
    pairs = (entry.partition(b"=") for entry in environ.split(b"\0"))
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, _, value in pairs}


def _ticks(pid: int) -> int:
    """Return how many clock ticks of a processor a process has used."""
    fields = stat_of(pid)
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _of_kernel(pid: int) -> Dict[str, str]:
    """Return a process's state, a letter of proc(5), and the function of the kernel in which it waits."""
    waits = text_of(f"/proc/{pid}/wchan").strip()
    return {"state": "".join(stat_of(pid)[:1]), "wchan": "" if waits == "0" else waits}


def _progress(files: AttemptFiles, process: Process) -> Dict[str, object]:
    """Return a rank's collectives by group, and a trainer's last step, its age and its own seconds, if recorded."""
    from clusterctl.agent.ranks.hangs import number_of, own_seconds

    path = os.path.join(files.heartbeats, f"rank-{process.rank}")
    started = (read_json(files.supervisor) or {}).get("started") or 0.0
    seen: Dict[str, object] = {**flight.recorded(process.environ, process.rank, started)}
    try:
        touched = os.stat(path).st_mtime
    except OSError:
        return seen
    if touched < started:
        # An earlier attempt left it.
        return seen
    text = text_of(path)
    seen["step"], seen["own"] = number_of(text), own_seconds(text)
    seen["age"] = round(max(0.0, time.time() - touched), 1)
    counted = read_json(os.path.join(files.heartbeats, f"calls-{process.rank}")) or {}
    if isinstance(counted.get("groups"), dict) and isinstance(counted.get("step"), int):
        # A rank that holds Python's lock records no collectives of its last step: it is behind.
        seen.update(step=counted["step"], calls=counted["groups"])
    return seen
