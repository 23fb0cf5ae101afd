"""A few thousand mutated inputs over every reader, and each input that once found something; see bench/fuzz."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from bench.fuzz import __main__ as fuzz
from bench.fuzz import readers
from clusterctl.errors import ClusterctlError

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "cases" / "fuzz"
READERS = fuzz.readers()


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    with fuzz.interrupted_when_it_hangs():
        yield


@pytest.mark.parametrize(
    "path", sorted(CASES.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_what_once_found_something_is_answered_well(path: Path) -> None:
    case = json.loads(path.read_text())
    data = bytes.fromhex(case["hex"]) if "hex" in case else case["text"].encode()
    assert fuzz.answer(READERS[path.parent.name], data) == (case["expect"], ""), case["about"]


def test_mutated_inputs_are_read_or_refused_in_words() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "bench.fuzz", "--inputs", "12000", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.startswith("12,000 inputs") and ran.stdout.count(" 0 finds") == len(READERS), ran.stdout


def test_an_input_is_told_by_its_seed_and_number() -> None:
    for reader in READERS.values():
        made = [reader.make(Random(number)) for number in range(200)]
        assert made == [reader.make(Random(number)) for number in range(200)] and len(set(made)) > 100


@pytest.mark.parametrize(
    ("hold", "what"),
    [
        (lambda data: {}["x"], "KeyError"),
        (lambda data: (_ for _ in ()).throw(RecursionError("deep")), "RecursionError"),
        (lambda data: readers.check_wording(ClusterctlError(" ")), "a refusal without a message"),
    ],
)
def test_what_is_no_refusal_in_words_is_a_find(hold: object, what: str) -> None:
    reader = fuzz.Reader("nodeset", 1, lambda random: b"", hold)  # type: ignore[arg-type]
    said, why = fuzz.answer(reader, b"abc")
    assert said == "find" and what in why


def test_a_find_is_made_small() -> None:
    def hold(data: bytes) -> str:
        assert b"x" not in data, "an x"
        return "read"

    reader = fuzz.Reader("nodeset", 1, lambda random: b"", hold)
    _, what = fuzz.answer(reader, b"some text with x in it")
    assert fuzz.smaller(reader, b"some text with x in it", what) == b"x"


def test_a_hang_and_a_slow_answer_are_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(data: bytes) -> str:
        while data:
            pass
        return "read"

    monkeypatch.setattr(fuzz, "HANG", 0.2)
    assert "not finished after" in fuzz.answer(fuzz.Reader("nodeset", 1, lambda random: b"", spin), b"x")[1]
    monkeypatch.setattr(fuzz, "SLOW", 0.0)
    assert "took" in fuzz.answer(fuzz.Reader("nodeset", 1, lambda random: b"", spin), b"")[1]


def test_processes_that_stop_reporting_are_named() -> None:
    done = multiprocessing.Process(target=time.sleep, args=(0,))
    waiting = multiprocessing.Process(target=time.sleep, args=(600,))
    killed = multiprocessing.Process(target=time.sleep, args=(600,))
    for child in (done, waiting, killed):
        child.start()
    try:
        done.join()
        fuzz.check_processes([done, waiting], fuzz.STILL - 1)
        with pytest.raises(fuzz.NoReport, match=rf"no process reported .*running: {waiting.pid}$"):
            fuzz.check_processes([done, waiting], fuzz.STILL + 1)
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        killed.join()
        with pytest.raises(fuzz.NoReport, match=rf"process {killed.pid} was ended by SIGKILL"):
            fuzz.check_processes([done, waiting, killed], 0)
    finally:
        waiting.kill()
        waiting.join()
        killed.join()
