"""Mutated inputs over everything that reads a user's files or arguments, or a file that a run or a node wrote.

    python -m pytest tests/fuzz -n 2 --cases 1000000 --seed 1      (--cases FIRST-LAST continues)

The rules for every input: it is read, or refused with an error of ours that has a message; no other exception is
raised; it takes less than a second of processor time; the memory stays under a limit; a node set never expands to more
names than its limit; and a value that was read can be written and read back unchanged. An input that breaks a rule is
made smaller and printed as a case, for a file below tests/cases/fuzz/READER.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from clusterctl.cli.screen import safe
from clusterctl.errors import ClusterctlError, InputFaults
from clusterctl.inventory import nodeset
from tests.conftest import Cases
from tests.fuzz import files, frames, readers, side_files
from tests.fuzz.inputs import Reader

CASES = Path(__file__).resolve().parents[1] / "cases" / "fuzz"
READERS = {**readers.READERS, **frames.READERS, **files.READERS, **side_files.READERS}
# The limits for an input, in seconds of processor time: for a find, and for an interruption.
SLOW, HANG = 1.0, 20.0
# The limit of address space in bytes, on top of what the process has at its start.
MEMORY = 1 << 30
# The limit of names of a node set here; expanding the real limit would take seconds.
NAMES = 2_000


class Hang(BaseException):
    """Raised when an input takes too long; a BaseException, so that `except Exception` does not catch it."""


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit memory, processor time and node sets, and keep temporary files in memory."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        raise Hang

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    monkeypatch.setattr(nodeset, "LIMIT", NAMES)
    handler = signal.signal(signal.SIGVTALRM, interrupt)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, most))
    with tempfile.TemporaryDirectory(dir=shared, prefix="clusterctl-fuzz-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
    resource.setrlimit(resource.RLIMIT_AS, (before, most))
    signal.signal(signal.SIGVTALRM, handler)


def check_wording(error: Exception) -> None:
    """Raise if a refusal does not say what is wrong, or cannot be printed."""
    message = getattr(error, "message", str(error))
    assert message.strip(), "a refusal without a message"
    safe(f"{message}\n{getattr(error, 'hint', '')}").plain.encode()
    for fault in error.faults if isinstance(error, InputFaults) else ():
        assert fault.where and fault.what, f"a fault without a place or a message: {fault}"


def result_of(reader: Reader, data: bytes) -> str:
    """Return "read" or "refused"; raise if a rule is broken."""
    with tempfile.TemporaryDirectory() if reader.file else contextlib.nullcontext("") as folder:
        given: Any = data
        if reader.file:
            given = Path(folder)
            (given / reader.file).write_bytes(data)
        try:
            value = reader.read(given)
        except reader.refusals as error:
            check_wording(error)
            return "refused"
        return "refused" if reader.check(value) in (False, None) else "read"


def answer(reader: Reader, data: bytes) -> tuple[str, str]:
    """Return "read", "refused" or "find", and the broken rule of a find."""
    began = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG)
    try:
        result = result_of(reader, data)
    except Hang:
        return "find", f"not finished after {HANG} s"
    # Every exception is a find.
    except Exception as error:
        stack = traceback.extract_tb(error.__traceback__)
        last = next((frame for frame in reversed(stack) if "clusterctl" in frame.filename), stack[-1])
        return "find", f"{type(error).__name__} at {Path(last.filename).name}:{last.name}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    took = time.process_time() - began
    return (result, "") if took < SLOW else ("find", f"took {took:.1f} s")


def smaller(reader: Reader, data: bytes, problem: str) -> bytes:
    """Return a shorter input with the same problem; it tries at most 300 times to remove pieces."""
    kind = problem.split(":")[0].split(" after")[0]
    tries, piece = 300, max(1, len(data) // 2)
    while piece and tries:
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


def case_of(data: bytes, about: str) -> str:
    """Return the text of a case file for a find."""
    try:
        held = {"text": data.decode()}
    except UnicodeDecodeError:
        held = {"hex": data.hex()}
    return json.dumps({"about": about, "expect": "refused", **held}, indent=2)


@pytest.mark.parametrize("name", READERS)
def test_mutated_inputs_are_read_or_refused_in_words(name: str, cases: Cases) -> None:
    reader, finds, number = READERS[name], dict[str, str](), -1
    try:
        for number, random in cases(reader.own):
            data = reader.make(random)
            _, problem = answer(reader, data)
            if problem and problem[:60] not in finds:
                finds[problem[:60]] = case_of(smaller(reader, data, problem), f"input {number}: {problem}")
    finally:
        # For a test that is interrupted.
        print(f"the last input was {number}")
    assert not finds, "\n".join(finds.values())


@pytest.mark.parametrize(
    "path", sorted(CASES.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_what_once_found_something_is_answered_well(path: Path) -> None:
    case = json.loads(path.read_text())
    data = bytes.fromhex(case["hex"]) if "hex" in case else case["text"].encode()
    assert answer(READERS[path.parent.name], data) == (case["expect"], ""), case["about"]


def test_an_input_is_told_by_its_seed_and_number() -> None:
    for reader in READERS.values():
        made = [reader.make(Random(number)) for number in range(200)]
        assert made == [reader.make(Random(number)) for number in range(200)] and len(set(made)) > 100


def held_by(read: Any) -> Reader:
    return Reader(lambda random: b"", read)


def refuse_silently(data: bytes) -> None:
    raise ClusterctlError(" ")


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda data: {}["x"], "KeyError"),
        (lambda data: (_ for _ in ()).throw(RecursionError("deep")), "RecursionError"),
        (refuse_silently, "a refusal without a message"),
    ],
)
def test_what_is_no_refusal_in_words_is_a_find(read: Any, what: str) -> None:
    said, why = answer(held_by(read), b"abc")
    assert said == "find" and what in why


def test_a_find_is_made_small() -> None:
    def read(data: bytes) -> bool:
        assert b"x" not in data, "an x"
        return True

    _, what = answer(held_by(read), b"some text with x in it")
    assert smaller(held_by(read), b"some text with x in it", what) == b"x"


def test_a_hang_and_a_slow_answer_are_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(data: bytes) -> bool:
        while data:
            pass
        return True

    monkeypatch.setitem(globals(), "HANG", 0.2)
    assert "not finished after" in answer(held_by(spin), b"x")[1]
    monkeypatch.setitem(globals(), "SLOW", 0.0)
    assert "took" in answer(held_by(spin), b"")[1]
