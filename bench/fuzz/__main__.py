"""Fuzz everything that reads a user's files or arguments, or a file that a run or a node wrote.

    python -m bench.fuzz --inputs 10000000 --processes 2 --out /tmp/finds
    python -m bench.fuzz --only files --inputs 170000

The rules for every input: it is read, or refused with a ClusterctlError that has a message; no other exception is
raised; it takes less than a second of processor time; the memory stays under a limit; a node set never expands to more
names than its limit; and a value that was read can be written and read back unchanged. An input that breaks a rule is a
find. Input N of a seed is always the same, so N identifies a find, and a run can continue where another stopped
(`--start`). A find is made smaller and written as a case file for tests/cases/fuzz.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import queue as queues
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.fuzz import files as fuzz_files
from bench.fuzz import frames as fuzz_frames
from bench.fuzz import side_files
from bench.fuzz.inputs import (
    CLUSTERS,
    HOSTFILES,
    PLANS,
    SETS,
    mutate_json,
    mutate_text,
    tables,
)  # fmt: skip
from bench.fuzz.readers import any_file, cluster_yaml, host_file, node_set, rank_table, table_plan
from clusterctl.inventory import nodeset

# The limit for an input, in seconds of processor time.
SLOW = 1.0
# An input is interrupted after this many seconds of wall time.
HANG = 20
# Seconds without a report of any process. An input takes HANG at most; making a find smaller takes longer.
STILL = 600
# The limit of address space in bytes, on top of what the process has at its start.
MEMORY = 1 << 30
# The limit of names of a node set here; expanding the real limit would take seconds.
NAMES = 2_000


class Hang(BaseException):
    """Raised when an input takes too long; a BaseException, so that `except Exception` does not catch it."""


# -- the readers


@dataclass(frozen=True)
class Reader:
    """A reader under test, with a function that makes inputs and one that checks the rules for an input."""

    name: str
    share: int
    """How many inputs it gets in one round."""
    make: Callable[[Random], bytes]
    hold: Callable[[bytes], str]


# The readers of files, by name.
FILES = {**fuzz_files.READERS, **side_files.READERS}


def readers() -> dict[str, Reader]:
    valid = [json.dumps(table) for table in tables()]
    everything = [*valid, *HOSTFILES, *CLUSTERS]
    return {
        reader.name: reader
        for reader in (
            Reader("nodeset", 55, lambda random: mutate_text(random, list(SETS)), node_set),
            Reader("hostfile", 30, lambda random: mutate_text(random, list(HOSTFILES)), host_file),
            Reader("ranktable", 6, lambda random: mutate_json(random, valid), rank_table),
            Reader("inventory", 1, lambda random: mutate_text(random, list(CLUSTERS)), cluster_yaml),
            Reader("plan", 2, lambda random: mutate_text(random, list(PLANS)), table_plan),
            Reader("anyfile", 1, lambda random: mutate_text(random, everything), any_file),
            Reader(
                "answer",
                2,
                lambda random: fuzz_frames.mutate(random, fuzz_frames.ANSWERS),
                fuzz_frames.answers,
            ),
            Reader(
                "request",
                2,
                lambda random: fuzz_frames.mutate(random, fuzz_frames.REQUESTS),
                fuzz_frames.requests,
            ),
            Reader("tree", 1, fuzz_frames.mutate_tree, fuzz_frames.trees),
            *(Reader(name, 1, make, hold) for name, (make, hold) in FILES.items()),
        )
    }


def chosen_readers(only: str) -> dict[str, Reader]:
    """Return the readers that `--only` names, or all of them."""
    every = readers()
    names = list(FILES) if only == "files" else only.split(",") if only else list(every)
    return {name: every[name] for name in names}


def order_of(all_readers: dict[str, Reader]) -> list[Reader]:
    """Return the order of one round, in which each reader has its share of the inputs."""
    turns = [reader for reader in all_readers.values() for _ in range(reader.share)]
    Random(0).shuffle(turns)
    return turns


# -- running


def answer(reader: Reader, data: bytes) -> tuple[str, str]:
    """Return "read", "refused" or "find", and the broken rule of a find."""
    began = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, HANG)
    try:
        result = reader.hold(data)
    except Hang:
        return "find", f"not finished after {HANG} s"
    except Exception as error:
        # Every exception is a find.
        signal.setitimer(signal.ITIMER_REAL, 0)
        frames = traceback.extract_tb(error.__traceback__)
        last = next((frame for frame in reversed(frames) if "clusterctl" in frame.filename), frames[-1])
        return "find", f"{type(error).__name__} at {Path(last.filename).name}:{last.name}: {str(error)[:300]}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.process_time() - began
    return (result, "") if took < SLOW else ("find", f"took {took:.1f} s")


@contextlib.contextmanager
def interrupted_when_it_hangs() -> Iterator[None]:
    """Let the alarm that `answer` sets raise Hang in the code that is running."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limited() -> None:
    """Limit the memory of this process and the size of node sets."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    nodeset.LIMIT = NAMES


def smaller(reader: Reader, data: bytes, problem: str) -> bytes:
    """Return a shorter input with the same problem; it tries at most 300 times to remove pieces."""
    kind = problem.split(":")[0].split(" after")[0]
    tries, piece = 300, max(1, len(data) // 2)
    while piece and tries and not problem.startswith("still"):
        at = 0
        while at < len(data) and tries:
            tries -= 1
            less = data[:at] + data[at + piece :]
            if answer(reader, less)[1].startswith(kind[:40]):
                data = less
            else:
                at += piece
        piece //= 2
    return data


def work(
    seed: int, start: int, stop: int, step: int, only: str, out: Path | None, report: Callable[[Any], None]
) -> None:
    """Run every step-th input of `[start,stop)`; report counts every two seconds, and each find at once."""
    turns = order_of(chosen_readers(only))
    counts: Counter[tuple[str, str]] = Counter()
    seconds: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    reported, slowest = time.monotonic(), 0.0
    for number in range(start, stop, step):
        reader = turns[number % len(turns)]
        data = reader.make(Random((seed << 48) + number))
        began = time.perf_counter()
        result, problem = answer(reader, data)
        took = time.perf_counter() - began
        slowest = max(slowest, took)
        seconds[reader.name] += took
        counts[reader.name, result] += 1
        kind = f"{reader.name}: {problem[:60]}"
        kinds[kind] += bool(problem)
        if problem and kinds[kind] <= 3:
            report(
                (
                    "find",
                    reader.name,
                    number,
                    problem,
                    saved(reader, smaller(reader, data, problem), problem, number, out),
                )
            )
        if time.monotonic() - reported > 2 or number + step >= stop:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            report(("counts", dict(counts), dict(seconds), slowest, peak, number + step))
            counts.clear(), seconds.clear()
            reported = time.monotonic()


def saved(reader: Reader, data: bytes, problem: str, number: int, out: Path | None) -> str:
    """Write a case file for a find and return its path; without `out` return the bytes as text."""
    if out is None:
        return repr(data)
    try:
        held = {"text": data.decode()}
    except UnicodeDecodeError:
        held = {"hex": data.hex()}
    path = out / reader.name / f"{hashlib.sha256(data).hexdigest()[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": f"input {number}: {problem}", **held}, indent=2) + "\n")
    return str(path)


def _child(seed: int, start: int, stop: int, step: int, only: str, out: Path | None, queue: Any) -> None:
    limited()
    with interrupted_when_it_hangs():
        work(seed, start, stop, step, only, out, queue.put)
    queue.put(None)


@dataclass
class Total:
    """The results of all processes."""

    counts: Counter[tuple[str, str]]
    seconds: Counter[str]
    slowest: float = 0.0
    peak: int = 0
    finds: int = 0
    broken: str = ""
    """Why the processes stopped reporting; "" if they did not."""

    def take(self, message: Any) -> None:
        if message[0] == "find":
            self.finds += 1
            print(f"FIND {message[1]} input {message[2]}: {message[3]}\n     {message[4]}", flush=True)
            return
        _, counts, seconds, slowest, peak, _ = message
        self.counts.update(counts)
        self.seconds.update(seconds)
        self.slowest, self.peak = max(self.slowest, slowest), max(self.peak, peak)

    def table(self, wall: float) -> str:
        done = sum(self.counts.values())
        lines = [f"{done:,} inputs in {wall:.0f} s: {done / max(wall, 0.001):,.0f} per second"]
        for name in sorted(self.seconds):
            counts = {result: self.counts[name, result] for result in ("read", "refused", "find")}
            each = self.seconds[name] / max(1, sum(counts.values())) * 1e6
            counts_text = f"{counts['read']:,} read, {counts['refused']:,} refused, {counts['find']:,} finds"
            lines.append(f"  {name:<10} {sum(counts.values()):>10,}: {counts_text}; {each:.0f} us each")
        return "\n".join([*lines, f"  slowest {self.slowest:.2f} s; a process had at most {self.peak} MB"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=0, help="start at this input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--out", type=Path, help="a folder for finds")
    parser.add_argument(
        "--only",
        default="",
        help="only these readers, separated by commas; `files` means all readers of files",
    )
    options = parser.parse_args()
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="clusterctl-fuzz-") as held:
        # Use memory if possible; the folder is deleted together with the files of terminated processes.
        tempfile.tempdir = held
        total = run(options)
    return 2 if total.broken else int(bool(total.finds))


class NoReport(Exception):
    """The processes do not report any more; the message says why, as far as it is known."""


def check_processes(children: Sequence[Any], silent: float) -> None:
    """Raise NoReport where a process has ended before its work was done, or nobody reported for `silent` seconds."""
    for child in children:
        if child.exitcode:
            code = child.exitcode
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            raise NoReport(f"process {child.pid} {how}; what it wrote itself is above")
    if silent > STILL:
        pids = ", ".join(str(child.pid) for child in children if child.is_alive()) or "none is left"
        raise NoReport(f"no process reported anything for {silent:.0f} s; running: {pids}")


def run(options: argparse.Namespace) -> Total:
    """Run all processes until the inputs or the time are used up; return the total."""
    began = time.monotonic()
    total = Total(Counter(), Counter())
    queue: Any = multiprocessing.Queue()
    stop = options.start + options.inputs
    children = [
        multiprocessing.Process(
            target=_child,
            args=(
                options.seed,
                options.start + number,
                stop,
                options.processes,
                options.only,
                options.out,
                queue,
            ),
            daemon=True,
        )
        for number in range(options.processes)
    ]
    for child in children:
        child.start()
    left, printed, reached = len(children), began, [options.start] * len(children)
    reported = began
    try:
        while left and time.monotonic() - began < options.seconds:
            try:
                message = queue.get(timeout=1)
            except queues.Empty:
                check_processes(children, time.monotonic() - reported)
                continue
            reported = time.monotonic()
            if message is None:
                left -= 1
                continue
            total.take(message)
            if message[0] == "counts":
                reached[(message[5] - options.start) % len(children)] = message[5]
            if time.monotonic() - printed > 60:
                printed = time.monotonic()
                print(total.table(printed - began), flush=True)
    except NoReport as reason:
        total.broken = str(reason)
    for child in children:
        child.terminate()
    print(total.table(time.monotonic() - began))
    print(f"  seed {options.seed}; continue with --start {min(reached)}")
    if total.broken:
        print(
            f"error: {total.broken}\n  the inputs after {min(reached):,} were not all done", file=sys.stderr
        )
    return total


if __name__ == "__main__":
    sys.exit(main())
