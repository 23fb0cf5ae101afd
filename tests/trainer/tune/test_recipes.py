"""The recipes of instruction tuning on small random models of their families."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.document import load_document
from tests.support.tuning import config_for, learn, losses_of
from trainer.checkpoint.store import found, open_checkpoint

FOLDER = Path(__file__).resolve().parents[3] / "examples"
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 256, "ffn": 64}
HEADS = {
    "llama-lora": {"query_groups": 2, "positions": 512},
    "qwen3-lora": {"query_groups": 2, "head_dim": 16},
}


@pytest.mark.parametrize("name", ["gpt2-sft", "llama-lora", "qwen3-lora"])
def test_a_recipe_learns_on_random_weights(name: str, material: Path, tmp_path: Path) -> None:
    raw = dict(load_document(FOLDER / f"{name}.yaml").value["train"])
    tokenizer = str(material / "tokenizer.json")
    plain = config_for(material)
    model = {**raw["model"], **SIZES, **HEADS.get(name, {}), "vocab": plain["model"]["vocab"]}
    learn(tmp_path / "base", {**plain, "model": model, "steps": 1})
    tune = {**raw["tune"], "train": plain["tune"]["train"], "valid": plain["tune"]["valid"]}
    small = {"steps": 8, "micro_batch": 1, "global_batch": 2, "eval": {"every": 4}, "hardware": {}}
    changed = {"model": model, "tune": tune, "data": {"tokenizer": tokenizer}, **small}
    optimizer = {**raw["optimizer"], "lr": 1e-2}
    init = {"source": str(tmp_path / "base")}
    learn(tmp_path / "run", {**raw, **changed, "optimizer": optimizer, "init": init, "save": {"every": 4}})
    losses = losses_of(tmp_path / "run")
    assert losses[9] < losses[1]
    table = open_checkpoint(found(tmp_path / "run" / "checkpoints")[0]).table
    assert all(".adapter." in tensor for tensor in table) == name.endswith("lora")
