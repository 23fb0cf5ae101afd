"""The first ten losses of the tiny GPT and the tiny GLM on a text in the same folder.

python -m tests.support.golden --record glm-tiny    records a model's losses on this machine, after an intended change
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.corpus.indexed import Writer

CASES = Path(__file__).resolve().parents[1] / "cases" / "losses"
GOLDENS = CASES / "golden.json"
STEPS, END = 10, 256
MODELS = {"gpt-tiny": {}, "glm-tiny": {"eod": END}}


def write_corpus(folder: Path) -> Path:
    """Each paragraph a document: its bytes, and an end."""
    prefix = folder / "text_document"
    with Writer(prefix, np.uint16) as writer:
        for paragraph in (CASES / "corpus.txt").read_bytes().split(b"\n\n"):
            writer.add_document([[*paragraph, END]])
    return prefix


def losses(model: str, folder: Path, native: str) -> list[dict[str, float]]:
    """Loss and gradient norm of each step, with one thread."""
    from trainer.env import Env
    from trainer.plan.resolve import read_config
    from trainer.train.assemble import run_training

    data = {"prefix": str(write_corpus(folder)), "split": "1", **MODELS[model]}
    asked = {
        "model": model,
        "data": data,
        "steps": STEPS,
        "micro_batch": 4,
        "global_batch": 8,
        "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2},
        "eval": {"batches": 0},
        "native": native,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        run_training(read_config(asked, 1), Env(device_kind="cpu", threads=1), folder, lambda: False)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in ("loss", "grad_norm")} for line in lines if line["event"] == "step"]


def record(models: Sequence[str]) -> None:
    """Write the losses that this machine computes; the other models keep theirs."""
    kept: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            kept[model] = losses(model, Path(folder), "reference")
    rows = ",\n".join(f"  {json.dumps(key)}: {_in_lines(value)}" for key, value in kept.items())
    GOLDENS.write_text("{\n" + rows + "\n}\n", encoding="utf-8")


def _in_lines(value: Any) -> str:
    return "[\n" + ",\n".join("    " + json.dumps(one) for one in value) + "\n  ]"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", nargs="+", choices=MODELS, required=True)
    record(parser.parse_args().record)
