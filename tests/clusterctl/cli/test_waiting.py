"""What a command shows while it waits, and the findings of doctor while it runs."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterctl.checks.doctor import OP_DETAIL
from clusterctl.cli import screen
from clusterctl.cli.launch.run import phases
from clusterctl.cli.nodes.doctor import Report
from clusterctl.cli.views.waiting import Waiting
from clusterctl.finding import Finding
from clusterctl.inventory.cluster import Node
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections, on_all
from clusterctl.transport.local import LocalTransport
from tests.support.nodes import local_node

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import time
from clusterctl.cli.views.waiting import Waiting

with Waiting("the nodes") as waiting:
    time.sleep(1.2)
    waiting("reach", "2 nodes reached")
    time.sleep(1.2)
"""


def test_a_terminal_sees_what_is_waited_for_and_the_line_is_erased() -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    ) as program:
        os.close(theirs)
        text = b""
        try:
            while piece := os.read(ours, 4096):
                text += piece
        except OSError:
            # The program has closed the terminal.
            pass
        assert program.wait() == 0
    os.close(ours)
    shown = text.decode()
    assert "waiting    for the nodes  1s" in shown and "reach      2 nodes reached  [1." in shown
    assert "waiting    for the preparation of the ranks" in shown and "code" not in shown
    assert shown.endswith("\r\x1b[2K"), "nothing is left of the last wait"


def test_without_a_terminal_a_long_wait_is_a_line_and_a_short_one_is_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    screen.error_console.cache_clear()
    monkeypatch.setattr("clusterctl.cli.views.waiting.QUIET", 0.4)
    with Waiting("the nodes"):
        time.sleep(1.0)
    assert capfd.readouterr().err.startswith("waiting    for the nodes  [")
    with Waiting("the nodes"):
        time.sleep(0.05)
    assert capfd.readouterr().err == ""


def test_the_nodes_that_have_not_answered_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    screen.error_console.cache_clear()
    monkeypatch.setattr("clusterctl.cli.views.waiting.QUIET", 0.4)
    nodes = [local_node(tmp_path, name) for name in ("node1", "node2", "node3")]
    line, shown, deadline = (
        "waiting    for the preparation of the ranks: node2  [",
        [""],
        time.monotonic() + 60,
    )
    with Connections(LocalTransport(home=tmp_path)) as connections, phases(connections) as log:
        log("reach", "3 nodes reached")

        def work(node: Node, link: Connection) -> None:
            link.run(["true"])
            while node.name == "node2" and line not in "".join(shown) and time.monotonic() < deadline:
                time.sleep(0.05)
                shown.append(capfd.readouterr().err)

        on_all(connections, nodes, work)
        assert connections.unanswered() == []
    assert line in "".join(shown)


FINDINGS = [
    Finding("ok", "n1", "clock"),
    Finding("ok", "n2", "clock"),
    Finding("note", "n1", "a note"),
    Finding("ok", "here", "op gelu: cpu", check=OP_DETAIL),
    Finding("warning", "n1", "a warning", "do this"),
    Finding("warning", "n2", "a warning", "do this"),
    Finding("bad", "n2", "a fault", "mend it"),
]


def report(capfd: pytest.CaptureFixture[str], *, verbose: bool = False) -> list[str]:
    screen.out_console.cache_clear()
    shown = Report(fix_hints=False, verbose=verbose, silent=False)
    shown(FINDINGS, "")
    shown.passes()
    return [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]


def test_problems_come_first_and_once_for_all_nodes_and_passes_are_folded(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert report(capfd) == [
        "bad n2 a fault",
        "try: mend it",
        "warn n[1-2] a warning",
        "try: do this",
        "ok n1: 1 check passed, 1 note (-v shows them)",
        "ok n2: 1 check passed",
    ]


def test_verbose_shows_every_check_and_every_op(capfd: pytest.CaptureFixture[str]) -> None:
    lines = report(capfd, verbose=True)
    assert "ok n[1-2] clock" in lines and "ok here op gelu: cpu" in lines and "note n1 a note" in lines
