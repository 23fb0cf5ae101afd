"""A cluster of real SSH nodes for the tests of a module, and the program as users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clusterctl.sandbox import cluster


@dataclass(frozen=True)
class Shell:
    """A folder to type commands in."""

    folder: Path
    env: dict[str, str]

    def __call__(self, *words: str, timeout: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "clusterctl", *words],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )


def clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTERCTL_")}
    return {**kept, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


@pytest.fixture(scope="module")
def cluster_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two nodes of two devices each."""
    directory = tmp_path_factory.mktemp("cluster") / "sandbox"
    made = cluster.up(directory, nodes=2, devices=2)
    yield made.cluster_file
    cluster.down(directory)


@pytest.fixture
def shell(tmp_path: Path, cluster_file: Path) -> Shell:
    return Shell(tmp_path, {**clean_environment(), "CLUSTERCTL_CLUSTER": str(cluster_file)})
