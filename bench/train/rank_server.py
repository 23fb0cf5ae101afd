"""Run the ranks of a training as processes on loopback, forked from a process that has loaded torch."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from bench.field import ROOT

SERVER = ROOT / "tests" / "support" / "rank_server.py"
# The time limit in seconds of a training, which normally takes a few.
PATIENCE = 300.0


class Failed(Exception):
    """A training failed; the message has the last lines of the first rank that reported an error."""


class Trained(NamedTuple):
    """The results of a training: the loss and gradient norm of every step, and the files of its last checkpoint."""

    losses: list[float]
    norms: list[float]
    files: dict[str, str]


class Server:
    """Starts trainings, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        return subprocess.Popen(
            [sys.executable, str(SERVER)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "server.err").open("w"),
            text=True,
            start_new_session=True,
        )

    def train(self, ranks: int, config: dict[str, object], again: bool = False) -> Trained:
        """Run a whole training; `again`: from the newest checkpoint of the previous one."""
        run_dir, file = self.run_dir, self.folder / "train.json"
        if again:
            (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
        file.write_text(json.dumps(config))
        codes = self._codes(self._ask(ranks, config, run_dir, file))
        if any(codes):
            raise Failed(self._last_words(codes))
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["event"] == "step"]
        folders = sorted((run_dir / "checkpoints").glob("step-*"))
        listed = json.loads((folders[-1] / "manifest.json").read_text())["files"]
        files = {name: entry["sha256"] for name, entry in listed.items()}
        return Trained([line["loss"] for line in steps], [line["grad_norm"] for line in steps], files)

    def go_on(self, ranks: int, config: dict[str, object]) -> Trained:
        """Repeat the second half of the previous training, from the checkpoint at its middle."""
        folders = sorted((self.folder / "run" / "checkpoints").glob("step-*"))
        shutil.rmtree(folders[-1])
        return self.train(ranks, config, again=True)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def continue_from(self, checkpoint: Path, ranks: int, config: dict[str, object]) -> Trained:
        """Run the rest of a training from a copy of a checkpoint's folder."""
        shutil.rmtree(self.run_dir, ignore_errors=True)
        step = json.loads((checkpoint / "manifest.json").read_text())["step"]
        shutil.copytree(checkpoint, self.run_dir / "checkpoints" / f"step-{step:08d}")
        return self.train(ranks, config, again=True)

    def _ask(self, ranks: int, config: dict[str, object], run_dir: Path, file: Path) -> dict[str, object]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "CLUSTERCTL_DEVICE_KIND": "cpu",
            "CLUSTERCTL_RUN_DIR": str(run_dir),
        }
        return {
            "argv": ["train", str(file)],
            "environments": [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)],
            "outputs": [str(self.folder / f"rank-{rank}") for rank in range(ranks)],
            "deepspeed": config.get("engine") == "deepspeed",
            "sharded": config.get("zero", 0) >= 2,
        }

    def _codes(self, ask: dict[str, object]) -> list[int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(ask) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            self.end()
            self.process = self._started()
            raise Failed(f"no end after {PATIENCE:.0f} s")
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit((self.folder / "server.err").read_text())
        codes: list[int] = json.loads(answer)
        return codes

    def _last_words(self, codes: list[int]) -> str:
        logs = [(self.folder / f"rank-{rank}.err").read_text().strip() for rank in range(len(codes))]
        first = next((lines for lines in logs if lines), "no output")
        return f"ranks ended with {codes}: {first.splitlines()[-1]}"

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
