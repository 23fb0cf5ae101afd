"""Runs on real SSH nodes, each struck by one fault, must end well. Needs root.

    python -m pytest tests/faults -n 4 -k strikes --cases 200 --seed 1     a campaign: under half an hour on two cores
    python -m pytest tests/faults -k "strikes and disk" --cases 100-199    only some kinds, and another part of it
    python -m pytest tests/faults -k interrupted --cases 100               Ctrl-C at random moments of `launch`

`--results FILE` adds a line per fault to FILE, leaves out the faults that have one, and prints the figures of all.
Most faults hit a stand-in (fake_trainer.py) that follows the trainer's contract without torch; some hit the embedded
trainer. draw.py lists the expected end of each kind, judge.py the rules for any run. Each process of pytest has a
cluster of its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from clusterctl.sandbox import demo, namespaces
from native.compiled import build, library
from tests.faults.draw import CHECKPOINT, RUNNING, Fault, draw, draw_interrupts
from tests.faults.field import Lane, Scanner
from tests.faults.judge import Row, judge, rows_of
from tests.faults.play import Play

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

# One of each that no other test here strikes with.
FEW = [
    Fault(0, "launcher cut off", RUNNING, 2, 8, 0.0, False),
    Fault(1, "link cut briefly", RUNNING, 1, 8, 0.0, False),
    Fault(2, "disk full", CHECKPOINT, 0, 8, 0.0, False),
    Fault(3, "children left behind", RUNNING, 3, 8, 0.0, False),
    Fault(4, "clock skewed", RUNNING, 2, 8, 0.0, False),
    Fault(5, "connection dropped", RUNNING, 0, 8, 0.0, False),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each fault that the command line chooses."""
    if "fault" not in metafunc.fixturenames:
        return
    numbers, seed, results = map(metafunc.config.getoption, ("--cases", "--seed", "--results"))
    kinds = draw_interrupts if "interrupted" in metafunc.function.__name__ else draw
    chosen = FEW if kinds is draw else draw_interrupts(seed, 1)
    if numbers:
        done = {row.number for row in rows_of(results)} if results else set()
        chosen = [fault for fault in kinds(seed, numbers.stop)[numbers.start :] if fault.number not in done]
    metafunc.parametrize(
        "fault", chosen, ids=[f"{fault.number}-{fault.kind}, {fault.phase}" for fault in chosen]
    )


@pytest.fixture(scope="session")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lane]:
    if missing := namespaces.why_not():
        pytest.skip(missing)
    lane = Lane(tmp_path_factory.mktemp("lane"))
    yield lane
    lane.close()


@pytest.fixture(scope="session")
def scanner() -> Iterator[Scanner]:
    scanner = Scanner()
    yield scanner
    scanner.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a corpus of a few hundred kilobytes for the embedded trainer, and compile its library.

    A rank that compiles takes longer than any timeout.
    """
    folder = tmp_path_factory.mktemp("corpus")
    corpus, target = folder / "corpus.jsonl", folder / "data"
    demo.write_corpus(corpus)
    demo.train_tokenizer(corpus, target / "tokenizer.json", 512)
    demo.build_data(corpus, target / "tokenizer.json", target / "text_document")
    if library.why_not():
        build.build()
    return target


def play(fault: Fault, lane: Lane, scanner: Scanner, folder: Path, request: pytest.FixtureRequest) -> None:
    try:
        data = request.getfixturevalue("data") if fault.real else None
        story = Play(lane, scanner, fault, folder / "desk", data).play()
        if fault.kind == "disk full" and lane.is_up(fault.node):
            lane.big_disk(fault.node)
    finally:
        shutil.rmtree(lane.shared / f"f{fault.number}", ignore_errors=True)
        if not all(lane.is_up(node.name) for node in lane.box.nodes):
            lane.renew()
    if results := request.config.getoption("--results"):
        with results.open("a") as file:
            file.write(json.dumps(asdict(Row.of(story))) + "\n")
    verdict = judge(story)
    assert verdict.well, (verdict.broken, story.output)
    assert verdict.cause is not False, (story.reasons, story.output)
    assert not story.left


def test_a_run_that_a_fault_strikes_ends_well_with_the_right_cause_and_leaves_nothing(
    fault: Fault, lane: Lane, scanner: Scanner, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    play(fault, lane, scanner, tmp_path, request)


def test_a_launch_that_is_interrupted_at_any_moment_leaves_nothing(
    fault: Fault, lane: Lane, scanner: Scanner, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    play(fault, lane, scanner, tmp_path, request)
