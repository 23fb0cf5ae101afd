"""Ctrl-C while the program loads: exit code 130, one line, at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Stands for any module that the program loads: here Ctrl-C comes.
INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
ENTRY = re.search(r'^clusterctl = "([\w.]+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
assert ENTRY is not None
STARTS = (
    ["-m", "clusterctl", "--help"],
    # What pip's script does.
    ["-c", f"import sys; sys.argv = ['', 'runs']; from {ENTRY[1]} import {ENTRY[2]} as main; main()"],
)


@pytest.mark.parametrize("words", STARTS, ids=["module", "script"])
@pytest.mark.parametrize("module", ["typer", "clusterctl_late"])
def test_ctrl_c_while_modules_load_ends_with_one_line(tmp_path: Path, words: list[str], module: str) -> None:
    (tmp_path / f"{module}.py").write_text(INTERRUPTED)
    if module == "clusterctl_late":
        # The last moment before the command begins.
        code = "import clusterctl.interrupts as i\ni.while_working = lambda: __import__('clusterctl_late')\n"
        (tmp_path / "sitecustomize.py").write_text(code)
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("words", STARTS, ids=["module", "script"])
def test_ctrl_c_in_the_first_imports_ends_with_one_line(tmp_path: Path, words: list[str]) -> None:
    code = "import os, sys\nclass Interrupting:\n  def find_spec(self, name, path=None, target=None):\n"
    code += (
        "    if name == 'clusterctl.cli': os.kill(os.getpid(), 2)\nsys.meta_path.insert(0, Interrupting())\n"
    )
    (tmp_path / "sitecustomize.py").write_text(code)
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, *words], env=variables, capture_output=True, text=True, timeout=25)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(INTERRUPTED.replace("30", "0") + "raise SystemExit(7)\n")
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "clusterctl", "--help"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
    )
    assert done.returncode == 7


@pytest.mark.parametrize(
    "within", ["os.kill(os.getpid(), 2)", "exec('os.kill(os.getpid(), 2)\\nwhile 1: pass')"]
)
def test_ctrl_c_while_a_command_works_ends_with_one_line_too(tmp_path: Path, within: str) -> None:
    code = f"import os\nimport clusterctl.cli.options as o\no.runs_folder = lambda: {within}\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "clusterctl", "runs"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_after_the_work_changes_no_exit_code() -> None:
    # The last moments of Python: modules are being deleted.
    code = "class Late:\n    def __del__(self, kill=__import__('os').kill, pid=__import__('os').getpid()):\n"
    code += "        kill(pid, 2)\n"
    code += "import sys; sys.late = Late(); sys.argv = ['', 'version']\n"
    code += "from clusterctl.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert done.returncode == 0 and done.stdout.startswith("clusterctl ") and done.stderr == ""
