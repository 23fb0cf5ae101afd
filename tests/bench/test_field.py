"""What all measurements share: options, turns, commands, tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.field import Option, aligned, in_turn, read_options, run, spread


def options(monkeypatch: pytest.MonkeyPatch, words: str) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", ["program", *words.split()])
    read = read_options(
        "Measure.", rounds=7, nodes=(64, 256), seconds=Option(1.5, "of each"), json=False, peer_python=Path,
        kind=Option("fp32", "", ("fp32", "bf16")), only=(), warm=0,
    )  # fmt: skip
    return vars(read)


def test_an_option_has_the_kind_of_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"rounds": 7, "nodes": (64, 256), "seconds": 1.5, "json": False, "peer_python": None}
    same |= {"kind": "fp32", "only": (), "warm": 0}
    assert options(monkeypatch, "") == same
    words = "--rounds 2 --nodes 3 4 --seconds 0.5 --json --peer-python /x --kind bf16 --only a b --warm 1"
    given = {"rounds": 2, "nodes": [3, 4], "seconds": 0.5, "json": True, "peer_python": Path("/x")}
    given |= {"kind": "bf16", "only": ["a", "b"], "warm": 1}
    assert options(monkeypatch, words) == given


@pytest.mark.parametrize("words", ["--rounds 0", "--nodes 4 -1", "--seconds nan", "--kind fp8", "--rounds x"])
def test_an_option_that_measures_nothing_is_refused(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        options(monkeypatch, words)
    assert left.value.code == 2 and f"argument {words.split()[0]}" in capsys.readouterr().err


def test_ways_take_turns_and_the_first_rounds_do_not_count() -> None:
    calls: list[str] = []
    ways = {name: lambda name=name: calls.append(name) or len(calls) for name in ("ours", "theirs")}
    assert in_turn(ways, rounds=2, warm=1) == {"ours": [3, 5], "theirs": [4, 6]}
    assert calls == ["ours", "theirs"] * 3


def test_a_command_that_fails_ends_the_measurement_with_its_last_words() -> None:
    assert run([sys.executable, "-c", "print('done')"]).output == "done\n"
    with pytest.raises(SystemExit, match=r"ended with 3: no room"):
        run([sys.executable, "-c", "import sys; print('no room', file=sys.stderr); sys.exit(3)"])


def test_a_table_has_names_at_the_left_and_figures_at_the_right() -> None:
    assert aligned([("", "s", "MB"), ("ours", "1.25", 7), ("a peer", "10.50", 400)]).splitlines() == [
        "            s   MB",
        "ours     1.25    7",
        "a peer  10.50  400",
    ]
    assert spread([1.0, 4.0, 2.0]) == "2.00 (1.00 to 4.00)"
