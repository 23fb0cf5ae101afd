"""Root runs what an ordinary user's tests skipped, and the tests that are marked for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import os, pytest
@pytest.mark.parametrize("program", [os.environ.get("PROGRAM")])
def test_skipped(program):
    if program is None: pytest.skip("no program")
def test_plain(): pass
@pytest.mark.root
def test_marked(): pass
"""


def run(folder: Path, *options: str, **more: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--strict-markers", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=more).stdout


def test_it_repeats_what_was_skipped_in_several_processes_and_what_is_marked(tmp_path: Path) -> None:
    for name in ("user", "root"):
        tests = tmp_path / name / "tests"
        tests.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("conftest.py"), tests)
        (tests / "extended.txt").touch()
        (tests / "test_rights.py").write_text(TESTS)
        (tmp_path / name / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nmarkers = root: of root\n")
    first = run(tmp_path / "user", "-n", "2")
    assert "2 passed, 1 skipped" in first, first
    # A repetition of single tests forgets nothing.
    run(tmp_path / "user", "tests/test_rights.py::test_plain")
    second = run(tmp_path / "root", f"--as-root={tmp_path}/user", PROGRAM="x")
    assert "2 passed, 1 deselected" in second, second
    assert "test_rights.py::test_skipped[x]" in second and "test_rights.py::test_marked" in second
