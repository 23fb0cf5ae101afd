"""Give the programs that tests start the usual signal handling, and leave out the tests of `make extended`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# `command &` in a script ignores SIGINT and SIGQUIT, `nohup` ignores SIGHUP, and every child inherits that. A handler
# here is reset to the default when a child executes its program. pytest itself still ignores SIGQUIT and SIGHUP.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(
            _number, signal.default_int_handler if _number == signal.SIGINT else lambda number, frame: None
        )

EXTENDED = Path(__file__).with_name("extended.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--extended`: run the tests that extended.txt lists, and no others."""
    parser.addoption(
        "--extended", action="store_true", help="run the tests listed in tests/extended.txt, no others"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the listed tests, or all others; a test that is named on the command line always runs."""
    named = {argument.rpartition("/")[2] for argument in config.args if "::" in argument}
    listed = {line for line in EXTENDED.read_text().splitlines() if line and not line.startswith("#")}
    only = bool(config.getoption("--extended"))
    chosen, left_out = [], []
    for item in items:
        identifier = f"tests/{item.nodeid.removeprefix('tests/')}"
        asked = any(item.nodeid.endswith(name) for name in named)
        (chosen if asked or (identifier in listed) == only else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen
