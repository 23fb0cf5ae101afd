"""A small corpus, small configs, and ranks as processes over loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.native.conftest import compiled  # noqa: F401
from tests.support.ports import free_port
from trainer.corpus.indexed import Writer

ROOT = Path(__file__).resolve().parents[2]
# Padded to 128, so that the padding is always in play.
VOCAB = 60
MODEL = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocab": VOCAB}


class Done(NamedTuple):
    """How a rank ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 documents of made-up ids in which four of five ids follow from the one before."""
    random = np.random.RandomState(7)
    place: Path = tmp_path_factory.mktemp("corpus") / "tiny_text_document"
    with Writer(place, np.uint16) as writer:
        for _ in range(40):
            ids = [int(random.randint(VOCAB))]
            for _ in range(random.randint(5, 120)):
                ids.append(int(random.randint(VOCAB)) if random.rand() < 0.2 else (ids[-1] + 1) % VOCAB)
            writer.add_document([ids])
    return place


@pytest.fixture
def raw_config(prefix: Path) -> Callable[..., dict[str, Any]]:
    """A `train:` part; keyword arguments replace its keys."""

    def make(**changes: Any) -> dict[str, Any]:
        base = {
            "model": dict(MODEL),
            "data": {"prefix": str(prefix), "split": "80,20,0"},
            "steps": 8,
            "micro_batch": 2,
            "global_batch": 8,
            "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2},
            "eval": {"every": 4, "batches": 2},
            "save": {"every": 4, "keep": 2},
        }
        return {**base, **changes}

    return make


@pytest.fixture
def metrics() -> Callable[..., list[dict[str, Any]]]:
    """The metrics of a run's folder, of one event or all."""

    def read(run_dir: Path, event: str = "") -> list[dict[str, Any]]:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if event in ("", line["event"])]

    return read


@pytest.fixture(scope="session")
def rank_server() -> Iterator[subprocess.Popen[str]]:
    """One process with torch loaded, from which ranks are forked."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": os.environ.get("HOME", "/tmp"),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "rank_server.py")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    yield server
    # With the ranks that a failed test left.
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@pytest.fixture
def run_ranks(tmp_path: Path, rank_server: subprocess.Popen[str]) -> Callable[..., list[Done]]:
    """Train a config, or run `argv`, with so many ranks as the launcher would start them; waits for all of them."""

    def run(
        ranks: int, config: dict[str, Any], run_dir: Path, argv: Sequence[str] = (), **more: str
    ) -> list[Done]:
        file = tmp_path / "train.json"
        file.write_text(json.dumps(config))
        shared = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "CLUSTERCTL_DEVICE_KIND": "cpu",
            "CLUSTERCTL_RUN_DIR": str(run_dir),
            **more,
        }
        numbered = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        outputs = [str(tmp_path / f"rank-{rank}") for rank in range(ranks)]
        ask = {
            "argv": list(argv) or ["train", str(file)],
            "environments": numbered,
            "outputs": outputs,
            "deepspeed": config.get("engine") == "deepspeed",
            "sharded": config.get("zero", 0) >= 2,
        }
        # Imported here: it loads torch.
        from trainer.compat import why_not_sharded

        if ask["sharded"] and not ask["deepspeed"] and (problem := why_not_sharded()):
            pytest.skip(f"zero: {config['zero']} {problem}")
        assert rank_server.stdin is not None and rank_server.stdout is not None
        rank_server.stdin.write(json.dumps(ask) + "\n")
        rank_server.stdin.flush()
        codes = json.loads(rank_server.stdout.readline())
        return [
            Done(code, Path(output + ".out").read_text(), Path(output + ".err").read_text())
            for code, output in zip(codes, outputs, strict=True)
        ]

    return run


@pytest.fixture
def train_here(raw_config: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Train one rank in this process; `stop_after` asks to stop when so many steps of this call are done."""

    def run(run_dir: Path, stop_after: int | None = None, **changes: Any) -> Any:
        from trainer.env import Env
        from trainer.plan.resolve import read_config
        from trainer.train.assemble import run_training

        asked = iter(range(1, 10**9))
        config = read_config(raw_config(**changes), 1)
        environment = Env(device_kind="cpu", threads=1)
        ended, _ = run_training(config, environment, run_dir, lambda: next(asked) == stop_after)
        return ended

    return run
