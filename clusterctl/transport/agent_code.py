"""The agent's code as the launcher sends it: its files, their hash, and the first lines that run on a node."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from clusterctl.agent import bootstrap

# Lines that follow the text of bootstrap.py on a node: install the agent, then run it in this process.
LAST_LINES = b"""
workdir = start()
if workdir:
    from clusterctl.agent.server import main

    main(workdir)
"""


@lru_cache(maxsize=1)
def agent_files() -> dict[str, str]:
    """Return the agent's files by path as they are sent, with the module of `wire` that they use."""
    package = Path(bootstrap.__file__).parents[1]
    shared = [package / "wire" / name for name in ("__init__.py", "saved.py")]
    paths = [*sorted((package / "agent").rglob("*.py")), *shared]
    files = {path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return {"__init__.py": "", **files}


@lru_cache(maxsize=1)
def agent_hash() -> str:
    """Return the version of the agent: a hash of its files' names and contents."""
    return hashlib.sha256(json.dumps(agent_files(), sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def wanted_files() -> str:
    """Return NAME:CHECKSUM for each of the agent's files."""
    return " ".join(f"{name}:{checksum}" for name, checksum in bootstrap.sums(agent_files()).items())


@lru_cache(maxsize=1)
def first_lines() -> bytes:
    return Path(bootstrap.__file__).read_bytes() + LAST_LINES


def agent_argv(python: str) -> list[str]:
    """Return the command that starts an agent on a node; the agent's code follows on its standard input.

    -I -S: ignore the settings and packages of the node's Python. -X utf8: the same file names in every
    locale.
    """
    return [
        python,
        "-I",
        "-S",
        "-X",
        "utf8",
        "-c",
        f"import sys;exec(sys.stdin.buffer.read({first_length()}))",
    ]


def first_length() -> int:
    """Return the length of the program that a link sends first."""
    return len(first_lines())
