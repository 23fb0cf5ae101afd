from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterctl.cli import main, screen
from clusterctl.transport.connection import Connection
from tests.support.nodes import connect

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: one of the test's own, without the user's settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Connection]:
    """A connection to an agent on this machine, with a work folder of the test's own."""
    connection = connect(tmp_path)
    yield connection
    connection.close()


@pytest.fixture
def command_line(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """A command line in a folder of the test's own: its exit code, stdout and stderr."""
    # The inventory that an earlier command line of this process named.
    monkeypatch.setattr(screen, "_inventory", [])

    def call(*argv: str) -> tuple[int, str, str]:
        screen.out_console.cache_clear()
        screen.error_console.cache_clear()
        capfd.readouterr()
        code = main.run(list(argv))
        return code, *capfd.readouterr()

    return call
