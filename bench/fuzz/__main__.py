"""Fuzz everything that reads a user's files or arguments, or a file that a run or a node wrote.

python -m bench.fuzz --inputs 10000000 --processes 2 --out /tmp/finds
python -m bench.fuzz --only files --inputs 170000

Rules for every input: it is read, or refused with a ClusterctlError that has a message; no other exception
is raised; it takes less than a second of processor time; the memory stays under a limit; a node set never
gives more names than its limit; and a value that was read can be written and read back unchanged. Input
number N of a seed is always the same, so a run can continue where another stopped (`--start`), and the
number identifies an input that breaks a rule (a find). A find is made smaller and written as a case file
for tests/cases/fuzz.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.fuzz import files as fuzz_files
from bench.fuzz import frames as fuzz_frames
from bench.fuzz.inputs import (
    CLUSTERS,
    HOSTFILES,
    PLANS,
    SETS,
    mutate_json,
    mutate_text,
    tables,
)  # fmt: skip
from clusterctl.cli.screen import safe
from clusterctl.document import parse_document
from clusterctl.errors import ClusterctlError, InputFaults
from clusterctl.hostfile import (
    detect,
    formats,
    slurm,
)
from clusterctl.hostfile import (
    filter as hostfile_filter,
)
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.inventory import nodeset
from clusterctl.ranktable import api, check, plan

ROOT = Path(__file__).resolve().parents[2]

# In seconds of processor time.
SLOW = 1.0
# In seconds of wall time; then the input is interrupted.
HANG = 20
# In bytes of address space, in addition to what the process has at its start.
MEMORY = 1 << 30
# The largest number of names of a node set here; a set as large as the real limit takes seconds.
NAMES = 2_000


class Hang(BaseException):
    """Raised when an input takes too long; a BaseException, so that `except Exception` does not catch it."""


# -- the rules, one function per reader


def _in_words(error: ClusterctlError) -> None:
    assert error.message.strip(), "a refusal without words"
    safe(f"{error.message}\n{error.hint}").plain.encode()
    for fault in error.faults if isinstance(error, InputFaults) else ():
        assert fault.where and fault.what, f"a fault without a place or words: {fault}"


def rank_table(data: bytes) -> str:
    """Check and parse a rank table: both must agree, and a valid table must survive being written and read again."""
    findings = api.check(data)
    for entry in findings:
        assert entry.code and entry.what and entry.remedy, f"a finding without words: {entry}"
    try:
        table = api.parse(data)
    except ClusterctlError as error:
        _in_words(error)
        assert findings or not isinstance(error, InputFaults), f"parse refused what check passed: {error}"
        return "refused"
    codes = {finding.code for finding in findings}
    assert codes <= {"dialect"}, "parse took what check refused"
    text = table.render()
    assert not api.check(text), "what was written is not taken"
    assert api.parse(text) == table, "what was written reads back as another table"
    return "read"


def host_file(data: bytes) -> str:
    """Read a hostfile with every reader: entries must have valid names and survive being written and read again."""
    text = data.decode("utf-8", "surrogateescape")
    results = []
    for read in (formats.inspect_text, slurm.inspect_text):
        entries, faults = read(text, "hosts")
        assert entries or faults, "neither nodes nor faults"
        for fault in faults:
            assert fault.where and fault.what, f"a fault without a place or words: {fault}"
        results.append("refused" if faults else "read")
        for entry in [] if faults else entries:
            assert not nodeset.name_fault(entry.address), entry
            assert entry.slots is None or 0 < entry.slots <= formats.MAX_SLOTS, entry
        if not faults and len(entries) <= 1000:
            _host_round_trip(entries, text)
    return "read" if "read" in results else "refused"


def _host_round_trip(entries: list[formats.Entry], text: str) -> None:
    for form in formats.FORMATS:
        if form == "mpich" and any(":" in entry.address for entry in entries):
            # This format refuses such addresses; another test covers that.
            continue
        again = formats.parse(formats.render_entries(entries, form))
        assert [(entry.address, entry.slots) for entry in again] == [
            (entry.address, entry.slots) for entry in entries
        ]
    bare = [formats.Entry(entry.address.replace(":", ""), entry.slots) for entry in entries]
    if len({entry.address for entry in bare}) == len(bare) and not any(
        "%" in entry.address for entry in bare
    ):
        again, faults = slurm.inspect_text(slurm.render(bare), "hosts")
        assert not faults, faults
        assert [entry.address for entry in again] == [entry.address for entry in bare]
    with contextlib.suppress(ClusterctlError):
        slots = {entry.address: range(min(entry.slots or 1, 64)) for entry in entries}
        left = hostfile_filter.chosen(slots, text[:40] or None, None)
        assert left and set(left) <= set(slots)


GROUPS: dict[str, Any] = {
    "old": "node[1-4]",
    "new": ("node[5-7]", "n1"),
    "both": "@old,@new",
    "loop": "@loop",
    "rack1": "r1n[1-9]",
    "rack2": "r2n[1-9]",
}
KNOWN = [
    *(f"node{number}" for number in range(1, 12)),
    "n1",
    *(f"r{r}n{n}" for r in (1, 2) for n in range(1, 10)),
]


def node_set(data: bytes) -> str:
    """Expand, select and fold a node set; the folded text must expand to the same names."""
    text = data.decode("utf-8", "surrogateescape")
    if len(data) % 2:
        try:
            nodeset.select(text, KNOWN, GROUPS)
        except ClusterctlError as error:
            _in_words(error)
    try:
        names = nodeset.expand(text, GROUPS, KNOWN)
    except ClusterctlError as error:
        _in_words(error)
        return "refused"
    assert len(names) <= nodeset.LIMIT, f"{len(names)} names"
    assert len(set(names)) == len(names), "a name twice"
    if names and len(names) <= 300:
        faults = list(filter(None, map(nodeset.name_fault, names)))
        assert not faults, faults[0]
        folded = nodeset.fold(names)
        assert nodeset.expand(folded) == names, folded
    return "read"


def cluster_yaml(data: bytes) -> str:
    """Read the text as strict YAML, and as a file that may be an inventory of any kind."""
    try:
        parse_document(data.decode("utf-8", "surrogateescape"), "cluster.yaml")
    except ClusterctlError as error:
        _in_words(error)
    with _a_file(data, "cluster.yaml") as path:
        try:
            cluster = inventory_cluster.load(path)
        except ClusterctlError as error:
            _in_words(error)
            return "refused"
    assert cluster.nodes and len(set(cluster.names)) == len(cluster.names)
    assert all(not nodeset.name_fault(name) for name in cluster.names)
    return "read"


def table_plan(data: bytes) -> str:
    """Make a table from a plan: it must pass the check, and its own plan must give the same table again."""
    try:
        table = plan.plan_table(parse_document(data.decode("utf-8", "surrogateescape"), "plan"))
    except ClusterctlError as error:
        _in_words(error)
        return "refused"
    assert not api.check(table.render()), "what was made of a plan is not taken"
    if not plan.losses(table):
        assert plan.plan_table(parse_document(plan.render_plan(table), "plan")) == table
    return "read"


def any_file(data: bytes) -> str:
    """Read a file whose kind is detected from its content, as `-c FILE` and `check` do."""
    with _a_file(data, "nodes.json" if len(data) % 2 else "nodes") as path:
        check.check_file(path)
        try:
            detect.read(path)
            cluster = detect.load(path)
        except ClusterctlError as error:
            _in_words(error)
            return "refused"
    assert cluster.nodes
    return "read"


@contextlib.contextmanager
def _a_file(data: bytes, name: str) -> Iterator[Path]:
    path = Path(tempfile.gettempdir()) / f"clusterctl-fuzz-{os.getpid()}-{name}"
    path.write_bytes(data)
    try:
        yield path
    finally:
        path.unlink()


# -- the readers


@dataclass(frozen=True)
class Door:
    """A reader under test: a function that makes inputs for it, and one that checks the rules for an input."""

    name: str
    share: int
    """The number of inputs in one round."""
    make: Callable[[Random], bytes]
    hold: Callable[[bytes], str]


def doors() -> dict[str, Door]:
    valid = [json.dumps(table) for table in tables()]
    everything = [*valid, *HOSTFILES, *CLUSTERS]
    return {
        door.name: door
        for door in (
            Door("nodeset", 55, lambda random: mutate_text(random, list(SETS)), node_set),
            Door("hostfile", 30, lambda random: mutate_text(random, list(HOSTFILES)), host_file),
            Door("ranktable", 6, lambda random: mutate_json(random, valid), rank_table),
            Door("inventory", 1, lambda random: mutate_text(random, list(CLUSTERS)), cluster_yaml),
            Door("plan", 2, lambda random: mutate_text(random, list(PLANS)), table_plan),
            Door("anyfile", 1, lambda random: mutate_text(random, everything), any_file),
            Door(
                "answer",
                2,
                lambda random: fuzz_frames.mutate(random, fuzz_frames.ANSWERS),
                fuzz_frames.answers,
            ),
            Door(
                "request",
                2,
                lambda random: fuzz_frames.mutate(random, fuzz_frames.REQUESTS),
                fuzz_frames.requests,
            ),
            Door("tree", 1, fuzz_frames.mutate_tree, fuzz_frames.trees),
            *(Door(name, 1, make, hold) for name, (make, hold) in fuzz_files.READERS.items()),
        )
    }


def chosen_doors(only: str) -> dict[str, Door]:
    """Return the doors that `--only` names, or all of them."""
    every = doors()
    names = list(fuzz_files.READERS) if only == "files" else only.split(",") if only else list(every)
    return {name: every[name] for name in names}


def order_of(all_doors: dict[str, Door]) -> list[Door]:
    """Return the turns of one round, in which each door has its share, in a mixed order."""
    turns = [door for door in all_doors.values() for _ in range(door.share)]
    Random(0).shuffle(turns)
    return turns


# -- running


def answer(door: Door, data: bytes) -> tuple[str, str]:
    """Return "read", "refused" or "find", and for a find what was wrong."""
    began = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, HANG)
    try:
        result = door.hold(data)
    except Hang:
        return "find", f"still at work after {HANG} s"
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


def smaller(door: Door, data: bytes, problem: str) -> bytes:
    """Return a shorter input with the same problem, found by leaving out pieces in at most 300 tries."""
    kind = problem.split(":")[0].split(" after")[0]
    tries, piece = 300, max(1, len(data) // 2)
    while piece and tries and not problem.startswith("still"):
        at = 0
        while at < len(data) and tries:
            tries -= 1
            less = data[:at] + data[at + piece :]
            if answer(door, less)[1].startswith(kind[:40]):
                data = less
            else:
                at += piece
        piece //= 2
    return data


def work(
    seed: int, start: int, stop: int, step: int, only: str, out: Path | None, report: Callable[[Any], None]
) -> None:
    """Run every step-th input of `[start,stop)`; report counts every two seconds, and each find when it occurs."""
    turns = order_of(chosen_doors(only))
    counts: Counter[tuple[str, str]] = Counter()
    seconds: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    reported, slowest = time.monotonic(), 0.0
    for number in range(start, stop, step):
        door = turns[number % len(turns)]
        data = door.make(Random((seed << 48) + number))
        began = time.perf_counter()
        result, problem = answer(door, data)
        took = time.perf_counter() - began
        slowest = max(slowest, took)
        seconds[door.name] += took
        counts[door.name, result] += 1
        kind = f"{door.name}: {problem[:60]}"
        kinds[kind] += bool(problem)
        if problem and kinds[kind] <= 3:
            report(
                (
                    "find",
                    door.name,
                    number,
                    problem,
                    saved(door, smaller(door, data, problem), problem, number, out),
                )
            )
        if time.monotonic() - reported > 2 or number + step >= stop:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            report(("counts", dict(counts), dict(seconds), slowest, peak, number + step))
            counts.clear(), seconds.clear()
            reported = time.monotonic()


def saved(door: Door, data: bytes, problem: str, number: int, out: Path | None) -> str:
    """Write a case file for a find and return its path; without `out` return the bytes as text."""
    if out is None:
        return repr(data)
    try:
        held = {"text": data.decode()}
    except UnicodeDecodeError:
        held = {"hex": data.hex()}
    path = out / door.name / f"{hashlib.sha256(data).hexdigest()[:12]}.json"
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
        lines = [f"{done:,} inputs in {wall:.0f} s: {done / max(wall, 0.001):,.0f} a second"]
        for name in sorted(self.seconds):
            counts = {result: self.counts[name, result] for result in ("read", "refused", "find")}
            each = self.seconds[name] / max(1, sum(counts.values())) * 1e6
            words = f"{counts['read']:,} read, {counts['refused']:,} refused, {counts['find']:,} finds"
            lines.append(f"  {name:<10} {sum(counts.values()):>10,}: {words}; {each:.0f} us each")
        return "\n".join([*lines, f"  slowest {self.slowest:.2f} s; a process had at most {self.peak} MB"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=0, help="go on from this input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--out", type=Path, help="a folder for finds")
    parser.add_argument(
        "--only", default="", help="these readers alone, with commas; `files` is all that read files"
    )
    options = parser.parse_args()
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="clusterctl-fuzz-") as held:
        # In memory where possible, and deleted together with the files of processes that were terminated.
        tempfile.tempdir = held
        total = run(options)
    return 1 if total.finds else 0


def run(options: argparse.Namespace) -> Total:
    """Run all processes until the inputs or the seconds are used up; return the total."""
    began = time.monotonic()
    total = Total(Counter(), Counter())
    queue: Any = multiprocessing.Queue()
    stop = options.start + options.inputs
    children = [
        multiprocessing.Process(
            target=_child,
            args=(
                options.seed,
                options.start + place,
                stop,
                options.processes,
                options.only,
                options.out,
                queue,
            ),
            daemon=True,
        )
        for place in range(options.processes)
    ]
    for child in children:
        child.start()
    left, printed, reached = len(children), began, [options.start] * len(children)
    while left and time.monotonic() - began < options.seconds:
        message = queue.get(timeout=60)
        if message is None:
            left -= 1
            continue
        total.take(message)
        if message[0] == "counts":
            reached[(message[5] - options.start) % len(children)] = message[5]
        if time.monotonic() - printed > 60:
            printed = time.monotonic()
            print(total.table(printed - began), flush=True)
    for child in children:
        child.terminate()
    print(total.table(time.monotonic() - began))
    print(f"  seed {options.seed}; go on with --start {min(reached)}")
    return total


if __name__ == "__main__":
    sys.exit(main())
