"""Print the figures of a campaign at its end."""

from __future__ import annotations

import pytest

from tests.faults.judge import rows_of, table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    results = config.getoption("--results")
    if results and (rows := rows_of(results)):
        terminalreporter.section(f"{len(rows)} faults in {results}")
        terminalreporter.write_line("\n".join(table(rows)))
