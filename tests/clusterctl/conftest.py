from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.cli import main, screen

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """A command line in a folder of the test's own: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    # The inventory that an earlier command line of this process named.
    monkeypatch.setattr(screen, "_inventory", [])

    def call(*argv: str) -> tuple[int, str, str]:
        screen.out_console.cache_clear()
        screen.error_console.cache_clear()
        capfd.readouterr()
        code = main.run(list(argv))
        return code, *capfd.readouterr()

    return call
