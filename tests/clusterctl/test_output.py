from __future__ import annotations

from clusterctl.errors import Unreachable
from clusterctl.inventory import Node
from clusterctl.output import LONG_LINE, Prefixer, ending, exit_code, folded, printable
from clusterctl.sanitize import escape_controls
from clusterctl.transport import Completed, Outcome

ONE, TWO, THREE = (Node(name=f"node{number}", host="local", address="x") for number in (1, 2, 3))


def prefixed(*chunks: tuple[str, str, bytes]) -> list[tuple[str, str]]:
    said: list[tuple[str, str]] = []
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
        ("stdout", "n1:     a\n"),
        ("stdout", "node22: x\n"),
        ("stderr", "n1:     e\n"),
        ("stdout", "n1:     bc\n"),
        ("stdout", "n1:     last\n"),
    ]


def test_a_character_cut_between_two_chunks_stays_one_character() -> None:
    both = "é".encode()
    assert prefixed(("n1", "stdout", both[:1]), ("n1", "stdout", both[1:] + b"\n")) == [
        ("stdout", "n1:     é\n")
    ]


def test_a_line_without_an_end_is_cut_and_fills_no_memory() -> None:
    said = prefixed(*[("n1", "stdout", b"x" * 50_000)] * 5)
    assert sum(text.count("x") for _, text in said) == 250_000 and all(
        len(text) < LONG_LINE + 50_100 for _, text in said
    )


def test_what_a_terminal_would_obey_is_shown_and_not_obeyed() -> None:
    assert printable(b"\x1b[2Jok\r\n\xff\x07\n") == "\\x1b[2Jok\n\\xff\\x07"
    assert escape_controls("a\u202eb\u200b\x9b\ttab é 漢 😀") == "a\\u202eb\\u200b\\x9b\ttab é 漢 😀"
    assert escape_controls("\ud800") == "\\ud800"


def test_the_same_output_is_said_once() -> None:
    same, other = Completed(0, stdout=b"x"), Completed(1, stdout=b"x")
    outcomes = [Outcome(ONE, same), Outcome(TWO, other), Outcome(THREE, Completed(0, stdout=b"x"))]
    assert folded(outcomes) == [(["node1", "node3"], same), (["node2"], other)]


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
