"""Long results in a pager: only on a terminal, and as the user says."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest


def on_a_terminal(folder: Path, *words: str, **variables: str) -> str:
    """Return what a command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PAGER", "NO_PAGER", "CLUSTERCTL_CLUSTER")
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterctl", *words],
        cwd=folder,
        env={**env, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).resolve().parents[3]), **variables},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.wait(30) == 0, shown
    return shown.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text("nodes:\n  node[1-3]: {host: '10.0.0.{n}'}\n")
    (tmp_path / "mark").write_text("#!/bin/sh\necho PAGED\nexec cat\n")
    (tmp_path / "mark").chmod(0o755)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ((), {}, True),
        (("--no-pager",), {}, False),
        ((), {"NO_PAGER": "1"}, False),
        ((), {"PAGER": ""}, False),
        ((), {"PAGER": "/no/such/pager"}, False),
        ((), {"TERM": "dumb"}, False),
    ],
)
def test_the_pager_is_the_users_choice(
    folder: Path, words: tuple[str, ...], variables: dict[str, str], expected: bool
) -> None:
    shown = on_a_terminal(folder, "nodes", "list", *words, **{"PAGER": str(folder / "mark"), **variables})
    assert ("PAGED" in shown) is expected
    assert "10.0.0.3" in shown
    # Colours survive the pipe.
    assert "\x1b[" in shown or variables.get("TERM") == "dumb"


@pytest.mark.slow
def test_without_a_terminal_there_is_none_and_a_pager_that_is_left_is_no_error(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "clusterctl", "nodes", "list"],
        cwd=folder,
        env={
            **os.environ,
            "PAGER": str(folder / "mark"),
            "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "PAGED" not in done.stdout
    assert on_a_terminal(folder, "schema", PAGER="true") == ""
