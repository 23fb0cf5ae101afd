"""Kill ranks, supervisors and nodes at random moments of saves, then load the checkpoints.

    python -m pytest tests/trainer/checkpoint/test_kills.py --cases 250

There must be no state that does not load, no result older than the acknowledged one, and no wrong number.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.conftest import Cases
from tests.support.checkpoints import load_with, state_at, whole_state
from tests.support.killed_saves import KINDS, ROWS, Attempt, acknowledged, draw, folders_of
from trainer.checkpoint.keep import remove_unfinished


@pytest.fixture(scope="module")
def player() -> Iterator[subprocess.Popen[str]]:
    argv, pipe = [sys.executable, "-m", "tests.support.killed_saves"], subprocess.PIPE
    root = Path(__file__).parents[3]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=root) as process:
        yield process


def judge(attempt: Attempt, base: Path) -> None:
    """Load as many ranks from the remaining folders, and compare."""
    folders, least = folders_of(attempt, base), acknowledged(base)
    for folder in set(folders):
        remove_unfinished(folder)
    loaded = load_with(folders, rows=ROWS)
    step, _, notes = loaded[0]
    assert not [note for note in notes if "on no node" not in note]
    state = whole_state(loaded)
    for version in range(least, least + 3):
        expected = state_at(version, ROWS)
        if all(torch.equal(state[key], expected[key]) for key in expected):
            assert attempt.again or step == version
            return
    raise AssertionError(f"loaded {step}, acknowledged {least}: older or other numbers")


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_a_random_moment_of_saves_costs_no_acknowledged_step(
    kind: str, tmp_path: Path, player: subprocess.Popen[str], cases: Cases
) -> None:
    assert player.stdin is not None and player.stdout is not None
    for number, random in cases(1):
        attempt, base = draw(kind, random), tmp_path / str(number)
        base.mkdir()
        given = {"attempt": asdict(attempt), "base": str(base), "seed": number}
        player.stdin.write(json.dumps(given) + "\n")
        player.stdin.flush()
        assert json.loads(player.stdout.readline()), f"case {number}: no save was acknowledged: {attempt}"
        print(f"case {number}: {attempt}")
        judge(attempt, base)
