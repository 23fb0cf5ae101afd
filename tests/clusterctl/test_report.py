"""Root causes in words, out of what nodes answered and logs that came home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl import run as runs
from clusterctl.errors import LinkLost
from clusterctl.inventory import Node
from clusterctl.report import find_cause, how_it_ended
from clusterctl.rundir import RunDir
from clusterctl.transport import Outcome

RECORD = {"ranks": {"a": [0, 1], "b": [2, 3]}, "devices": {"a": [4, 5], "b": [4, 5]}}


def answer(state: str, *ranks: dict[str, Any], failed: int | None = None) -> dict[str, Any]:
    first = next((one for one in ranks if one["rank"] == failed), None)
    return {"node": {"state": state, "first_failure": first}, "ranks": list(ranks)}


def ended(rank: int, when: float, code: int | None = None, signal: int | None = None) -> dict[str, Any]:
    return {"rank": rank, "state": "exited", "exit_code": code, "signal": signal, "ended": when}


def state_of(a: object, b: object) -> runs.RunState:
    outcomes = [
        Outcome(Node(name, name, name), error=one)
        if isinstance(one, LinkLost)
        else Outcome(Node(name, name, name), one)
        for name, one in (("a", a), ("b", b))
    ]
    return runs.read_answers(RECORD, outcomes, None)


def test_the_earliest_failure_of_all_nodes_is_the_cause_and_a_stop_is_none() -> None:
    state = state_of(
        answer("stopped", ended(0, 9.0, signal=15), ended(1, 8.0, code=1)),
        answer("failed", ended(2, 5.0, code=7), ended(3, 6.0, signal=15), failed=2),
    )
    assert state.phase == "failed"
    assert state.failure is not None
    assert (state.failure["rank"], state.failure["node"], state.failure["device"]) == (2, "b", 4)


def test_a_lost_node_is_the_cause_of_what_failed_elsewhere(tmp_path: Path) -> None:
    state = state_of(
        answer("failed", ended(0, 9.0, code=1), failed=0), LinkLost("b", "nothing was heard for 10 s")
    )
    assert state.phase == "unknown"
    assert state.unreachable == {"b": "nothing was heard for 10 s"}
    cause = find_cause(RunDir(tmp_path), state.failure, state.ranks, {"a": "failed", "b": "lost"})
    assert cause.title == "lost b: the node, its link or its supervisor is gone"


@pytest.mark.parametrize(
    ("states", "phase"),
    [
        (("finished", "finished"), "finished"),
        (("finished", "running"), "running"),
        (("failed", "stopped"), "failed"),
        (("failed", "lost"), "lost"),
        (("stopped", "finished"), "stopped"),
        (("finished", "unknown"), "unknown"),
    ],
)
def test_a_runs_phase_is_its_nodes_worst(states: tuple[str, str], phase: str) -> None:
    assert state_of(answer(states[0]), answer(states[1])).phase == phase


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ({"exit_code": 3}, "exited with code 3"),
        ({"signal": 9}, "killed (SIGKILL)"),
        ({"signal": 11}, "segmentation fault"),
        ({"signal": 3}, "ended by SIGQUIT"),
        ({"signal": 99}, "ended by signal 99"),
    ],
)
def test_an_exit_status_is_said_in_words(rank: dict[str, int], words: str) -> None:
    assert words in how_it_ended(rank)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "install it"),
        ("torch.OutOfMemoryError: CUDA out of memory", "micro_batch"),
        ("OSError: [Errno 98] Address already in use", "master_port"),
        ("EI0014: Value x for ranktable variable", "ranktable check"),
        ("OSError: [Errno 28] No space left on device", "free some space"),
    ],
)
def test_what_the_rank_said_last_leads_to_a_remedy(tmp_path: Path, said: str, hint: str) -> None:
    run = RunDir(tmp_path)
    path = run.log("a", 1, "err")
    path.parent.mkdir(parents=True)
    path.write_text(f"noise\n{said}\n")
    cause = find_cause(run, {"node": "a", "rank": 1, "device": 0, "exit_code": 1}, [], {"a": "failed"})
    assert cause.tail[-1] == said
    assert hint in cause.hint
