"""Ranks may open as many files as the hard limit allows, although a login has fewer."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from clusterctl.agent.ranks.supervisor import allow_open_files
allow_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "expected"), [(256, 700, "700 700"), (700, 700, "700 700")])
def test_the_soft_limit_is_raised_to_the_hard_one(soft: int, hard: int, expected: str) -> None:
    argv = [sys.executable, "-c", PROGRAM, str(soft), str(hard)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip() == expected
