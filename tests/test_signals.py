"""Tests start programs with the default signal handling, even if the caller of the tests ignores signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

IGNORED = """
import re
mask = int(re.search(r"SigIgn:\\s*([0-9a-f]+)", open("/proc/self/status").read())[1], 16)
print(*[number for number in range(1, 32) if mask >> (number - 1) & 1])
"""
INTERACTIVE = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_program_that_a_test_starts_ignores_no_signal_of_a_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, text=True, check=True)
    assert not {int(word) for word in done.stdout.split()} & set(INTERACTIVE)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_same_holds_when_the_caller_ignores_these_signals() -> None:
    inner = f"{Path(__file__)}::{test_a_program_that_a_test_starts_ignores_no_signal_of_a_terminal.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", inner]
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT QUIT HUP; exec "$@"', "sh", *command],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_programs_that_the_campaign_of_faults_starts_take_an_interrupt_too() -> None:
    code = (
        "import subprocess, sys\nfrom bench.field import take_signals\ntake_signals()\n"
        f"subprocess.run([sys.executable, '-c', {IGNORED!r}])"
    )
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT QUIT HUP; exec "$@"', "sh", sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {int(word) for word in done.stdout.split()} & set(INTERACTIVE)
