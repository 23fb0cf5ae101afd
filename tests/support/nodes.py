"""Nodes for tests: this machine through an agent of its own, with a home and a work folder of the test."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from clusterctl.inventory.cluster import Node
from clusterctl.transport.connection import Connection
from clusterctl.transport.local import LocalTransport


def local_node(folder: Path, name: str = "node1", python: str = sys.executable) -> Node:
    return Node(name=name, host="local", address="127.0.0.1", python=python, workdir=str(folder / "work"))


def connect(folder: Path, python: str = sys.executable) -> Connection:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return LocalTransport(home=home).connect(local_node(folder, python=python))


def wait_for(truth: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def oldest_python() -> str | None:
    """A Python 3.8 where this machine has one: the oldest that nodes may have."""
    found = [shutil.which("python3.8"), *map(str, Path.home().glob(".pyenv/versions/3.8*/bin/python3.8"))]
    return next((one for one in reversed(found) if one), None)
