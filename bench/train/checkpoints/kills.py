"""Kill ranks, supervisors and nodes at random moments of saves, then load the checkpoints.

Each attempt forks a supervisor per node and ranks below it, which save one step after the other, or the same step again
and again, into real files with fsync. A rank whose save returns acknowledges it. After the kill the rest is ended, as
by the launcher, and the same number of ranks loads from the remaining folders. There must be no state that does not
load, no result older than the acknowledged one, and no wrong number.

    python -m bench.train.checkpoints kills --count 1000 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

from tests.support.checkpoints import MANIFEST, load_with, parts_by_rows, seen_by, state_at, whole_state
from trainer.checkpoint.board import Board
from trainer.checkpoint.keep import remove_unfinished
from trainer.checkpoint.names import tensor_table
from trainer.checkpoint.part import MOMENTS
from trainer.checkpoint.save import SaveOrder, save_parts
from trainer.checkpoint.store import found
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

    number: int
    kind: str
    ranks: int
    nodes: int
    again: bool
    """Whether the same step is saved again and again."""
    after: float
    """Seconds from the first acknowledged save to the kill."""


def draw(number: int, random: Random) -> Attempt:
    ranks = random.randint(1, 6)
    nodes = random.randint(1, min(3, ranks))
    return Attempt(
        number, random.choice(KINDS), ranks, nodes, random.random() < 0.3, random.uniform(0.0, LATEST)
    )


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
        order = SaveOrder(manifest, f"save-{version}", None, KeepConfig(2))
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    supervisors = []
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


def judge(attempt: Attempt, base: Path) -> str:
    """Return the fault of an attempt's checkpoints, or ""."""
    folders, least = folders_of(attempt, base), acknowledged(base)
    for folder in set(folders):
        remove_unfinished(folder)
    try:
        loaded = load_with(folders, rows=ROWS)
    except TrainerError as error:
        return f"does not load: {error.message}"
    step, _, notes = loaded[0]
    damaged = [note for note in notes if "on no node" not in note]
    if damaged:
        return f"damaged: {damaged[0]}"
    state = whole_state(loaded)
    newest = max((path for folder in folders for path in found(folder)), default=None)
    for version in range(least, least + 3):
        expected = state_at(version, ROWS)
        if all(torch.equal(state[key], expected[key]) for key in expected):
            return "" if attempt.again or step == version else f"step {step} has the numbers of {version}"
    return f"loaded {step}, acknowledged {least}: older or other numbers ({newest})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no attempt after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line per attempt to this file")
    options = parser.parse_args()
    # A process that used several OpenMP threads must not fork.
    torch.set_num_threads(1)
    counts, wrong, end = Counter[str](), 0, time.monotonic() + options.seconds
    for number in range(options.count):
        random = Random(f"{options.seed}-{number}")
        if time.monotonic() > end:
            break
        attempt, base = draw(number, random), Path(tempfile.mkdtemp(prefix="kills-"))
        try:
            if not play(attempt, base, random):
                counts["not ready"] += 1
                continue
            fault = judge(attempt, base)
        finally:
            shutil.rmtree(base, ignore_errors=True)
        several = "several nodes" if attempt.nodes > 1 else "one node"
        counts[f"{attempt.kind}, {several}"] += 1
        if fault:
            wrong += 1
            sys.stderr.write(f"{attempt}: {fault}\n")
        if options.json:
            with options.json.open("a") as out:
                out.write(json.dumps({**asdict(attempt), "seed": options.seed, "wrong": fault}) + "\n")
    print(json.dumps({"kills": dict(sorted(counts.items())), "all": sum(counts.values()), "wrong": wrong}))
    return 1 if wrong else 0
