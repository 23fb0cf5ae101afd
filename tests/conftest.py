"""Give programs that tests start the usual signal handling, choose and order the tests, draw random cases."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

# `command &` in a script ignores SIGINT and SIGQUIT, `nohup` ignores SIGHUP, and every child inherits that. A handler
# here is reset to the default when a child executes its program. pytest itself still ignores SIGQUIT and SIGHUP.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(
            _number, signal.default_int_handler if _number == signal.SIGINT else lambda number, frame: None
        )

SKIPPED = "skipped"
EXTENDED = Path(__file__).with_name("extended.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--extended`, and the number and the seed of random cases."""
    parser.addoption(
        "--extended", action="store_true", help="run the tests listed in tests/extended.txt, no others"
    )
    parser.addoption(
        "--as-root",
        type=Path,
        metavar="FOLDER",
        help="run the tests that were skipped by pytest in FOLDER, and those marked root, no others",
    )
    parser.addoption("--cases", type=span, help="random cases of each test that draws some: N, or FIRST-LAST")
    parser.addoption("--seed", type=int, default=1, help="of random cases")
    parser.addoption(
        "--results", type=Path, metavar="FILE", help="add a line per fault of tests/faults to FILE"
    )


class Skipped:
    """Keeps the names of the tests that were skipped, in pytest's cache."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.known: set[str] = set(config.cache.get(SKIPPED, []))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the result of one test."""
        if report.skipped:
            self.known.add(report.nodeid)
        elif report.when == "call":
            self.known.discard(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the names."""
        self.config.cache.set(SKIPPED, sorted(self.known))


def pytest_configure(config: pytest.Config) -> None:
    """Keep the names of skipped tests; pytest-xdist's processes report to the first one."""
    if hasattr(config, "cache") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skipped(config))


def span(text: str) -> range:
    """Return the numbers of `N` cases, or of the cases `FIRST-LAST`."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


Cases = Callable[[int], Iterator[tuple[int, Random]]]


@pytest.fixture(scope="session")
def cases(pytestconfig: pytest.Config) -> Cases:
    """Return a function that yields the numbers of so many cases, or of those of --cases, and a generator for each.

    A case is always the same for a seed and a number, so that a number tells which case failed.
    """
    chosen, seed = pytestconfig.getoption("--cases"), pytestconfig.getoption("--seed")

    def drawn(own: int) -> Iterator[tuple[int, Random]]:
        return ((number, Random((seed << 48) + number)) for number in chosen or range(own))

    return drawn


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the listed tests, or all others, and what root need not repeat.

    A test that is named on the command line always runs. Tests that draw a chosen number of cases have no limit.
    """
    if config.getoption("--cases"):
        for item in items:
            if {"cases", "fault"} & set(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.timeout(0))
    named = {argument.rpartition("/")[2] for argument in config.args if "::" in argument}
    listed = {line for line in EXTENDED.read_text().splitlines() if line and not line.startswith("#")}
    only = bool(config.getoption("--extended"))
    again = skipped_in(config.getoption("--as-root"))
    chosen, left_out = [], []
    for item in items:
        identifier = f"tests/{item.nodeid.removeprefix('tests/')}"
        asked = any(item.nodeid.endswith(name) for name in named)
        wanted = again is None or item.nodeid.partition("[")[0] in again or item.get_closest_marker("root")
        (chosen if asked or ((identifier in listed) == only and wanted) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    # Of pytest-xdist's processes.
    items[:] = spread(chosen) if hasattr(config, "workerinput") else chosen


def skipped_in(folder: Path | None) -> set[str] | None:
    """Return the names of the tests that pytest skipped in a folder; None without a folder.

    Without their parameters: some are programs that a user has, such as old versions of Python.
    """
    if folder is None:
        return None
    names: list[str] = json.loads((folder / ".pytest_cache/v" / SKIPPED).read_text())
    return {name.partition("[")[0] for name in names}


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with the files of live ones, which mostly wait, evenly among those that use the processors."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    live = [tests for tests in files.values() if any(test.get_closest_marker("live") for test in tests)]
    rest = [tests for tests in files.values() if tests not in live]
    placed = [
        ((number + 0.5) / len(kind), tests) for kind in (live, rest) for number, tests in enumerate(kind)
    ]
    return [test for _, tests in sorted(placed, key=lambda each: each[0]) for test in tests]
