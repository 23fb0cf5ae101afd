"""A keeper of a test's own: a folder, a home, and commands that use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Seconds for what takes one on a quiet machine.
LONG = 60.0


@dataclass
class Keeping:
    """Commands that share one keeper."""

    folder: Path
    env: dict[str, str]

    @classmethod
    def at(cls, folder: Path, cluster: Path, persist: str = "10m") -> Keeping:
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTERCTL_")}
        ours = {
            "XDG_RUNTIME_DIR": str(runtime),
            "CLUSTERCTL_CLUSTER": str(cluster),
            "CLUSTERCTL_PERSIST": persist,
            "PYTHONPATH": str(ROOT),
            "NO_COLOR": "1",
        }
        return cls(folder, {**kept, **ours})

    @property
    def place(self) -> Path:
        return self.folder / "run" / "clusterctl"

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "clusterctl", *words],
            cwd=self.folder,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **env)
        out, err = process.communicate(timeout=LONG)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def status(self) -> list[dict[str, Any]]:
        said = self("keeper", "status", "--json")
        found: list[dict[str, Any]] = json.loads(said.stdout)
        return found

    def stop(self) -> None:
        self("keeper", "stop")


def until(holds: Callable[[], Any], what: str) -> Any:
    """Wait for a condition, however slow the machine is."""
    deadline = time.monotonic() + LONG
    while not (value := holds()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return value


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
