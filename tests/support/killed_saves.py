"""Ranks in processes that save until they are killed: one JSON line of stdin per attempt, one line of answer.

Each attempt forks a supervisor per node and ranks below it, which save one step after the other, or the same step again
and again, into real files with fsync. A rank whose save returns acknowledges it. After the kill the rest is ended, as
by the launcher. It is a process of its own, because one that has used several OpenMP threads must not fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

from tests.support.checkpoints import MANIFEST, parts_by_rows, seen_by, state_at
from tests.support.ports import free_port
from trainer.checkpoint.board import Board
from trainer.checkpoint.names import tensor_table
from trainer.checkpoint.part import MOMENTS
from trainer.checkpoint.save import SaveOrder, save_parts
from trainer.config.parts import KeepConfig
from trainer.device import Device
from trainer.errors import TrainerError
from trainer.parallel.group import Group

KINDS = ("rank", "supervisor", "node", "all")
# The sizes of the state's rows: 0.3 MB in total, so that the parts of a save take similar times.
ROWS = 1200
# The step that is saved again and again.
SAME = 5
# The kill comes at most this many seconds after the first acknowledged save.
LATEST = 0.25


@dataclass(frozen=True)
class Attempt:
    """The kind, place and time of a kill."""

    kind: str
    ranks: int
    nodes: int
    again: bool
    """Whether the same step is saved again and again."""
    after: float
    """Seconds from the first acknowledged save to the kill."""


def draw(kind: str, random: Random) -> Attempt:
    ranks = random.randint(1, 6)
    nodes = random.randint(1, min(3, ranks))
    return Attempt(kind, ranks, nodes, random.random() < 0.3, random.uniform(0.0, LATEST))


def folders_of(attempt: Attempt, base: Path) -> list[Path]:
    """Return the folder of each rank."""
    return [base / f"node-{rank * attempt.nodes // attempt.ranks}" for rank in range(attempt.ranks)]


def save_for_ever(rank: int, attempt: Attempt, base: Path, port: int) -> None:
    """Save until this process is ended; each line of `acknowledged-RANK` is a save that returned."""
    store = dist.TCPStore("127.0.0.1", port, attempt.ranks, rank == 0, timedelta(seconds=60))
    board = Board(Group(rank, attempt.ranks, Device("cpu"), store=store), "saves")
    folders = folders_of(attempt, base)
    names = {key: tuple(tensor.shape) for key, tensor in state_at(0, ROWS).items()}
    table = tensor_table({key: shape for key, shape in names.items() if not key.startswith(MOMENTS)}, True)
    log = os.open(base / f"acknowledged-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for version in range(1, 10**6):
        step = SAME if attempt.again else version
        manifest = replace(MANIFEST, step=step, tensors=table, loss=version)
        order = SaveOrder(manifest, f"save-{version}", KeepConfig(2))
        parts = parts_by_rows(state_at(version, ROWS), rank, attempt.ranks)
        save_parts(order, parts, seen_by(folders, rank), board)
        os.write(log, f"{version}\n".encode())


def supervise(node: Path, attempt: Attempt, base: Path, port: int) -> None:
    """Act as the process group of a node: start its ranks, and end all of them when one ends."""
    os.setsid()
    own = [rank for rank, folder in enumerate(folders_of(attempt, base)) if folder == node]
    pids = {}
    for rank in own:
        pid = os.fork()
        if not pid:
            try:
                save_for_ever(rank, attempt, base, port)
            except (TrainerError, RuntimeError):
                os._exit(1)
            os._exit(0)
        pids[rank] = pid
    aside = base / f".{node.name}"
    aside.write_text(json.dumps({"supervisor": os.getpid(), "ranks": pids}))
    aside.rename(base / f"{node.name}.json")
    os.wait()
    os.killpg(0, signal.SIGKILL)


def play(attempt: Attempt, base: Path, random: Random) -> bool:
    """Run an attempt and kill it; return whether the kill came after an acknowledged save."""
    nodes = sorted(set(folders_of(attempt, base)))
    for node in nodes:
        node.mkdir()
    port, supervisors = free_port(), []
    for node in nodes:
        pid = os.fork()
        if not pid:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 2)
            try:
                supervise(node, attempt, base, port)
            finally:
                os._exit(1)
        supervisors.append(pid)
    try:
        ready = _wait_for(base, nodes)
        if ready:
            time.sleep(attempt.after)
            _kill(attempt, [json.loads((base / f"{node.name}.json").read_text()) for node in nodes], random)
            # As with the launcher, the other nodes end a little later.
            time.sleep(random.uniform(0.0, 0.05))
    finally:
        for pid in supervisors:
            _end_group(pid)
            os.waitpid(pid, 0)
    # Ranks whose supervisor died first are not children of this process.
    while any(_is_alive(pid) for pid in supervisors):
        time.sleep(0.002)
    return ready


def _wait_for(base: Path, nodes: Sequence[Path]) -> bool:
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        if acknowledged(base) and all((base / f"{node.name}.json").exists() for node in nodes):
            return True
        time.sleep(0.002)
    return False


def _kill(attempt: Attempt, nodes: Sequence[dict[str, object]], random: Random) -> None:
    chosen = random.choice(nodes)
    supervisor, ranks = int(str(chosen["supervisor"])), chosen["ranks"]
    assert isinstance(ranks, dict)
    if attempt.kind == "rank":
        os.kill(random.choice(list(ranks.values())), signal.SIGKILL)
    elif attempt.kind == "supervisor":
        os.kill(supervisor, signal.SIGKILL)
    else:
        for node in nodes if attempt.kind == "all" else [chosen]:
            _end_group(int(str(node["supervisor"])))


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _is_alive(group: int) -> bool:
    """Return whether a process of this group is alive; zombies do not count."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


def acknowledged(base: Path) -> int:
    """Return the newest step whose save returned on a rank; 0 if there is none."""
    lines = [line for log in base.glob("acknowledged-*") for line in log.read_text().splitlines()]
    return max(map(int, lines), default=0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        given = json.loads(line)
        ready = play(Attempt(**given["attempt"]), Path(given["base"]), Random(given["seed"]))
        print(json.dumps(ready), flush=True)
