from __future__ import annotations

import json
from pathlib import Path

from clusterctl.errors import Unreachable
from clusterctl.exec.answers import (
    Answers,
    as_json,
    differences,
    folded,
)
from clusterctl.exec.output import (
    LONG_LINE,
    Folder,
    JsonLines,
    Prefixer,
    ending,
    exit_code,
    printable,
)
from clusterctl.inventory.cluster import Node
from clusterctl.text import escape_controls
from clusterctl.transport.connection import Completed
from clusterctl.transport.fanout import Outcome

ONE, TWO = (Node(name=f"node{number}", host="local", address="x") for number in (1, 2))


def prefixed(*chunks: tuple[str, str, bytes]) -> list[tuple[str, bytes]]:
    said: list[tuple[str, bytes]] = []
    printer = Prefixer(6, lambda stream, text: said.append((stream, text)))
    for chunk in chunks:
        printer.feed(*chunk)
    for node in ("n1", "node22"):
        printer.end(node)
    return said


def test_lines_come_whole_with_their_node_before_them_however_they_were_cut() -> None:
    said = prefixed(
        ("n1", "stdout", b"a\nb"),
        ("node22", "stdout", b"x\n"),
        ("n1", "stderr", b"e\n"),
        ("n1", "stdout", b"c\nlast"),
    )
    assert said == [
        ("stdout", b"n1:     a\n"),
        ("stdout", b"node22: x\n"),
        ("stderr", b"n1:     e\n"),
        ("stdout", b"n1:     bc\n"),
        ("stdout", b"n1:     last\n"),
    ]


def test_a_character_cut_between_two_chunks_stays_one_character() -> None:
    both = "é".encode()
    assert prefixed(("n1", "stdout", both[:1]), ("n1", "stdout", both[1:] + b"\n")) == [
        ("stdout", "n1:     é\n".encode())
    ]


def test_a_line_without_an_end_is_cut_and_fills_no_memory() -> None:
    said = prefixed(*[("n1", "stdout", b"x" * 50_000)] * 5)
    assert sum(text.count(b"x") for _, text in said) == 250_000 and all(
        len(text) < LONG_LINE + 50_100 for _, text in said
    )


def test_what_a_terminal_would_obey_is_shown_and_not_obeyed() -> None:
    assert printable(b"\x1b[2Jok\r\n\xff\x07\n") == "\\x1b[2Jok\n\\xff\\x07"
    assert escape_controls("a\u202eb\u200b\x9b\ttab é 漢 😀") == "a\\u202eb\\u200b\\x9b\ttab é 漢 😀"
    assert escape_controls("\ud800") == "\\ud800"


def answered(**said: tuple[bytes, Completed]) -> tuple[list[Outcome[Completed]], Answers]:
    answers = Answers(list(said))
    outcomes = []
    for name, (stdout, done) in said.items():
        for start in range(0, len(stdout), 1000):
            answers.feed(name, "stdout", stdout[start : start + 1000])
        outcomes.append(Outcome(Node(name=name, host="local", address="x"), done))
    return outcomes, answers


def test_the_same_output_with_the_same_end_is_said_once() -> None:
    good, bad = Completed(0), Completed(1)
    groups = folded(*answered(node1=(b"x", good), node2=(b"x", bad), node3=(b"x", good), node4=(b"y", good)))
    assert [one.header() for one in groups] == ["node[1,3] (2)", "node2 (1): exit 1", "node4 (1)"]
    assert groups[0].output["stdout"].bytes() == b"x"


def test_output_larger_than_memory_should_hold_comes_back_whole() -> None:
    text = b"".join(b"line %d\n" % number for number in range(100_000)) + b"end"
    (outcome,), answers = answered(node1=(text, Completed(0)))
    assert answers.of("node1")["stdout"].bytes() == text
    assert as_json(outcome, answers)["stdout"] == text.decode()
    assert all(piece.endswith(b"\n") for piece in list(answers.of("node1")["stdout"].pieces())[:-1])


def test_differences_are_told_from_what_most_said_or_from_one_node() -> None:
    many, few = (b"a\nb\nc\n", Completed(0)), (b"a\nB\nc\n", Completed(3))
    groups = folded(*answered(node1=few, node2=many, node3=many))
    expected = ["--- node[2-3] (2)", "+++ node1 (1): exit 3", "@@ -1,3 +1,3 @@", " a", "-b", "+B", " c"]
    assert "".join(differences(groups, None)).splitlines() == expected
    assert "".join(differences(groups, "node1")).splitlines()[:2] == [
        "--- node1 (1): exit 3",
        "+++ node[2-3] (2)",
    ]
    huge = b"x\n" * 30_000
    groups = folded(*answered(node1=(huge, Completed(0)), node2=(huge + b"y", Completed(0))))
    assert "too much to compare" in "".join(differences(groups, None))


def test_files_hold_every_byte_and_an_old_answer_never_passes_for_a_new_one(tmp_path: Path) -> None:
    for stale in ("node1.out", "node2.out", "node1.err", "other.out"):
        (tmp_path / stale).write_text("old")
    folder = Folder(tmp_path, ["node1", "node2"])
    folder.feed("node1", "stdout", b"\x1b[2J\xff")
    folder.feed("node1", "stdout", b"\r\n")
    folder.end("node1")
    folder.ended(Outcome(ONE, Completed(0)))
    folder.ended(Outcome(TWO, error=Unreachable("node2", "down")))
    assert (tmp_path / "node1.out").read_bytes() == b"\x1b[2J\xff\r\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["node1.out", "other.out"]


def test_json_lines_tell_each_line_and_each_end() -> None:
    said: list[bytes] = []
    lines = JsonLines(lambda stream, data: said.append(data))
    lines.feed("node1", "stdout", b"a\xff\nb")
    lines.feed("node1", "stderr", b"e\n")
    lines.end("node1")
    lines.ended(Outcome(ONE, Completed(None, 9)))
    lines.ended(Outcome(TWO, error=Unreachable("node2", "down")))
    rows = [json.loads(line) for line in b"".join(said).splitlines()]
    assert rows == [
        {"node": "node1", "stream": "stdout", "text": "a\\xff"},
        {"node": "node1", "stream": "stderr", "text": "e"},
        {"node": "node1", "stream": "stdout", "text": "b"},
        {"node": "node1", "exit_code": None, "signal": 9, "timed_out": False},
        {"node": "node2", "error": "node2: down", "kind": "Unreachable"},
    ]


def test_the_exit_code_is_the_largest_and_an_unreachable_node_counts_most() -> None:
    assert exit_code([Outcome(ONE, Completed(0)), Outcome(TWO, Completed(3))]) == 3
    assert exit_code([Outcome(ONE, Completed(None, 9)), Outcome(TWO, Completed(3))]) == 137
    assert exit_code([Outcome(ONE, Completed(0)), Outcome(TWO, error=Unreachable("node2", "down"))]) == 255
    assert [
        ending(one)
        for one in (Completed(0), Completed(2), Completed(None, 15), Completed(None, 15, timed_out=True))
    ] == [
        "",
        "exit 2",
        "killed by signal 15",
        "ended by its time-out",
    ]
