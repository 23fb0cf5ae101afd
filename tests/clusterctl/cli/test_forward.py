"""Commands of the trainer that this program starts: what they import, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.errors import InputFaults
from clusterctl.jobs.ask_trainer import ask_trainer

ROOT = Path(__file__).parents[3]
# A process that takes its time to end.
SLOW = """
import os, signal, sys, time
def end(*_):
    time.sleep(0.5)
    os.write(1, b"ended in its own time\\n")
    sys.exit(7)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, end)
os.write(1, b"ready\\n")
time.sleep(60)
"""
WAITING = """
import sys
from clusterctl.cli.models.trainer import waited
sys.exit(waited([sys.executable, "-c", sys.argv[1]]))
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older ones always import from the current folder")
def test_files_of_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "random", "trainer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('mine')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "properties" in ask_trainer(dict, ["schema"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_that_is_ended_lets_the_trainer_end_in_its_own_time(number: signal.Signals) -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, SLOW],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "ended in its own time\n"
        assert process.wait(30) == 7


def test_all_errors_of_the_trainer_are_passed_on_for_the_command_of_the_user() -> None:
    words = ["data-shares", "--input", "x", "--workers", "two", "--nope"]
    with pytest.raises(InputFaults) as caught:
        ask_trainer(dict, [*words, "--max-bad", "y"], called="clusterctl data build")
    assert [str(fault) for fault in caught.value.faults[:2]] == [
        "--workers: 'two' is not a whole number",
        "--max-bad: 'y' is not a whole number",
    ]
    assert caught.value.hint == "clusterctl data build --help"
    with pytest.raises(InputFaults, match="the trainer's data-shares: --workers: 'two'"):
        ask_trainer(dict, words)


def test_ctrl_c_while_the_trainer_starts_is_one_line(tmp_path: Path) -> None:
    code = "import os, sys\nif 'trainer' in sys.orig_argv: os.kill(os.getpid(), 2)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "clusterctl", "data", "info", "x"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
