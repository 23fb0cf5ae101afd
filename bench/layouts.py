"""Every layout that a config accepts, on 1, 2, 4 and 8 ranks, beside one process: a tiny GPT and a tiny GLM, 20 steps
in fp32 without dropout, over real process groups on loopback. Says the largest relative difference of a loss.

python bench/layouts.py                          both models, torch's engine
python bench/layouts.py --engine deepspeed --most 4
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import try_config
from trainer.indexed import Writer

ROOT = Path(__file__).resolve().parents[1]
SERVER = ROOT / "tests" / "trainer" / "rank_server.py"
STEPS, BATCH, VOCAB = 20, 8, 60
SHAPE = {"layers": 2, "hidden": 64, "heads": 8, "sequence": 32}
MODELS = {
    "gpt": {**SHAPE, "vocab": VOCAB},
    "gpt, newer": {**SHAPE, "vocab": VOCAB, "rotary": True, "swiglu": True, "ffn": 128},
    "glm": {**SHAPE, "kind": "glm", "vocab": VOCAB + 9},
}
ALLOWED = 1e-5
KEEPING = [{"mode": "none"}, {"mode": "selective"}, {"mode": "full"}, {"mode": "full", "split": True}]


def corpus(folder: Path) -> Path:
    """60 documents of made-up ids in which four of five follow from the one before."""
    random = np.random.RandomState(7)
    with Writer(folder / "text_document", np.uint16) as writer:
        for _ in range(60):
            ids = [int(random.randint(VOCAB))]
            for _ in range(random.randint(40, 200)):
                ids.append(int(random.randint(VOCAB)) if random.rand() < 0.2 else (ids[-1] + 1) % VOCAB)
            writer.add_document([ids])
    return folder / "text_document"


def config_of(model: str, prefix: Path, **changes: Any) -> dict[str, Any]:
    data = {"prefix": str(prefix), "split": "1", **({"eod": 3} if model == "glm" else {})}
    base = {
        "model": MODELS[model],
        "data": data,
        "steps": STEPS,
        "micro_batch": 1,
        "global_batch": BATCH,
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "eval": {"batches": 0},
    }
    return {**base, **changes}


def layouts() -> Iterator[dict[str, Any]]:
    """All that could be asked; the config's own rules say what is legal on so many ranks."""
    for tensor in (1, 2, 4, 8):
        for sequence in (False, True):
            for zero in (0, 1, 2, 3):
                for recompute in KEEPING if zero == 0 else KEEPING[:1]:
                    yield {
                        "parallel": {"tensor": tensor, "sequence": sequence},
                        "zero": zero,
                        "recompute": recompute,
                    }


class Server:
    """Ranks, forked from one process that has torch loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def losses(self, ranks: int, config: dict[str, Any]) -> list[float]:
        """Of every step; a failed training ends the measurement with what rank 0 said."""
        run_dir, file = self.folder / "run", self.folder / "train.json"
        shutil.rmtree(run_dir, ignore_errors=True)
        file.write_text(json.dumps(config))
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
        ask = {
            "argv": ["train", str(file)],
            "environments": [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)],
            "outputs": [str(self.folder / f"rank-{rank}") for rank in range(ranks)],
            "deepspeed": config.get("engine") == "deepspeed",
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(ask) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}:\n{(self.folder / 'rank-0.err').read_text()}")
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["event"] == "step"]

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def in_words(ranks: int, layout: dict[str, Any]) -> str:
    tensor, recompute = layout["parallel"]["tensor"], layout["recompute"]
    parts = [f"data {ranks // tensor}", f"tensor {tensor}"]
    parts += ["sequence"] if layout["parallel"]["sequence"] else []
    parts += [f"zero {layout['zero']}"] if layout["zero"] else []
    if recompute["mode"] != "none":
        parts.append("recompute " + recompute["mode"] + (" split" if recompute.get("split") else ""))
    return ", ".join(parts)


def measure(server: Server, prefix: Path, engine: str, most: int) -> bool:
    good = True
    for model in MODELS:
        alone = server.losses(1, config_of(model, prefix))
        worst, count = 0.0, 0
        kept: dict[str, list[float]] = {}
        for ranks in (1, 2, 4, 8):
            for layout in layouts():
                config = config_of(model, prefix, engine=engine, **layout)
                if ranks > most or try_config(config, ranks)[1]:
                    continue
                losses = server.losses(ranks, config)
                off = max(abs(one - other) / other for one, other in zip(losses, alone, strict=True))
                key = in_words(ranks, {**layout, "recompute": {"mode": "none"}})
                same = losses == kept.setdefault(key, losses)  # recomputation changes no bit
                good &= off <= ALLOWED and same
                worst, count = max(worst, off), count + 1
                mark = (
                    "" if off <= ALLOWED and same else "  <- too far" if same else "  <- another than without"
                )
                print(f"{model:<11} {in_words(ranks, layout):<64} {off:.1e}{mark}", flush=True)
        print(f"{model:<11} {count} layouts, {STEPS} steps: at most {worst:.1e} from one process")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="torch", choices=("torch", "deepspeed"))
    parser.add_argument("--most", type=int, default=8, help="ranks at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            return 0 if measure(server, corpus(Path(folder)), options.engine, options.most) else 1
        finally:
            server.end()


if __name__ == "__main__":
    sys.exit(main())
