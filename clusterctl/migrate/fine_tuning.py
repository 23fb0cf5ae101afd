"""Write the job that fine-tunes the model of a folder of weights."""

from __future__ import annotations

import re
from pathlib import Path

from clusterctl.migrate.found import Found
from clusterctl.migrate.translation import Translation
from clusterctl.wire.results import Weights

# Tokens of a row, if the model's positions allow it: conversations are rarely longer.
ROW = 2048


def tuned(folder: Path, weights: Weights) -> Translation:
    """Return the job of a fine-tuning: the model as the folder describes it, with places for the rows."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.")[:36] or "model"
    result = Translation(Found("weights", "a folder of weights", str(folder), name=f"{name}-sft"))
    # What is next to the folder is pushed with it, but not the whole current folder.
    above = folder.parent != Path()
    place = f"{{data}}/{folder.name}" if above else "{data}"
    data = folder.parent if above else folder
    text = str(data) if data.is_absolute() or str(data).startswith(".") else f"./{data}"
    result.found.summary = f"Written from {folder}: train.model and the tokenizer are those of the folder."
    result.notes.append(
        f'put the rows, {{"messages": [...]}} or {{"prompt": ..., "completion": ...}}, into {data / "train.jsonl"}'
    )
    result.set("data", text, "pushed to the nodes")
    row = min(weights.context, ROW)
    for key, value in {**weights.model, "sequence": row, "positions": weights.context}.items():
        origin = {"sequence": "tokens of a row", "positions": "the longest text of the model"}.get(key, "")
        result.set(f"train.model.{key}", value, origin)
    result.set("train.init.source", place, "the initial weights")
    result.set("train.data.tokenizer", f"{place}/tokenizer.json", "" if weights.tokenizer else "put it there")
    result.set("train.tune.task", "chat", "or dpo, classify: see the guide of fine-tuning")
    result.set("train.tune.train", "{data}/train.jsonl", "")
    result.set("train.tune.epochs", 3, "")
    result.set("train.micro_batch", 1, "")
    result.set("train.optimizer.lr", 2e-5, "")
    result.set("train.optimizer.warmup", "3%", "")
    result.set("train.precision", "bf16", "")
    return result
