"""Run the ranks of a training as processes on this machine, with the launcher's environment, for measurements."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.field import ROOT, free_port
from clusterctl.wire.contract import MALLOC_TUNING
from trainer.corpus.indexed import Writer


class Failed(Exception):
    """A rank failed; the message has its last lines."""


def environments(ranks: int, kind: str = "cpu", threads: int = 0) -> list[dict[str, str]]:
    """Return what a launch adds to the environment of each rank; threads: 0 divides the cores among the ranks."""
    shared = {
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "CLUSTERCTL_DEVICE_KIND": kind,
        "OMP_NUM_THREADS": str(threads or max(1, (os.cpu_count() or 1) // ranks)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def run(argv: Sequence[str], ranks: int, folder: Path) -> list[str]:
    """Return the output of every rank. If a rank fails, stop the others and raise Failed with the reason."""
    places = [folder / f"rank-{rank}" for rank in range(ranks)]
    started = []
    for path, environment in zip(places, environments(ranks), strict=True):
        with path.open("w") as out, path.with_suffix(".err").open("w") as err:
            started.append(
                subprocess.Popen(
                    argv,
                    env={**os.environ, **MALLOC_TUNING, **environment},
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            )
    try:
        waiting = dict(enumerate(started))
        while waiting:
            for rank, process in list(waiting.items()):
                try:
                    code = process.wait(0.2 / len(waiting))
                except subprocess.TimeoutExpired:
                    continue
                if code:
                    last = places[rank].with_suffix(".err").read_text().splitlines()[-12:]
                    raise Failed(f"rank {rank} of {ranks} ended with {code}:\n" + "\n".join(last))
                del waiting[rank]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [path.read_text() for path in places]


def train(train_part: dict[str, object], ranks: int) -> list[dict[str, object]]:
    """Train on random tokens and return the steps in metrics.jsonl."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_config(folder, train_part)
        run([sys.executable, "-m", "trainer", "train", str(file)], ranks, folder)
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == "step"]


def write_config(folder: Path, train_part: dict[str, object]) -> Path:
    """Write a train.json with a corpus of random tokens next to it; return its path."""
    from trainer.plan.resolve import plan_config

    found = plan_config({**train_part, "data": {"prefix": "x"}}, 1).config
    samples = (train_part.get("global_batch") or 64 * found.micro_batch) * (found.steps + 1)
    prefix = folder / "tokens"
    draw_corpus(prefix, 1000, min(samples, 4096) * (found.model.sequence + 1))
    file = folder / "train.json"
    file.write_text(json.dumps({**train_part, "data": {"prefix": str(prefix), "split": "1,0,0"}}))
    return file


def draw_corpus(prefix: Path, vocab: int, tokens: int) -> None:
    """Write a corpus of uniformly random ids in documents of 4,096 tokens, so that all steps are equally difficult."""
    import numpy as np

    ids = np.random.RandomState(1).randint(0, vocab, tokens).astype(np.uint16)
    with Writer(prefix, np.uint16) as writer:
        for start in range(0, tokens, 4096):
            writer.add_document([ids[start : start + 4096]])
