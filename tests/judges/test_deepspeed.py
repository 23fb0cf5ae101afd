"""DeepSpeed saves what we import with state and loads what we export: ten steps there and ten here are twenty here."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import native
from tests.judges.deepspeed_states import RATE, STEPS, batch
from tests.support.weights import GPT, assert_equal, checkpoint, random_state, state_of
from trainer.checkpoint.part import MOMENTS
from trainer.checkpoint.store import open_checkpoint
from trainer.config.layout import Layout
from trainer.device import Device
from trainer.engine.torch_engine import TorchEngine
from trainer.model.gpt import GPT as Network
from trainer.parallel.group import Group, Groups
from trainer.plan.resolve import read_config
from trainer.weights.contents import ExportRequest, ImportRequest
from trainer.weights.convert import export_weights, import_weights

MODEL = replace(GPT, dropout=0.0, attention_dropout=0.0)
PROGRAM = Path(__file__).with_name("deepspeed_states.py")
PIPELINE = Path(__file__).with_name("deepspeed_pipeline.py")
pytestmark = pytest.mark.slow


def with_deepspeed(task: str, stage: int, *arguments: object) -> None:
    """Run both ranks of the program with a model of transformers."""
    if any(importlib.util.find_spec(name) is None for name in ("deepspeed", "transformers")):
        pytest.skip("deepspeed or transformers is not installed (pip install -e '.[train,judges]')")
    run_both(PROGRAM, task, stage, *arguments)


def run_both(program: Path, *arguments: object) -> None:
    """Run two ranks of a program."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    argv = [sys.executable, str(program), *map(str, arguments)]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    ranks = [
        subprocess.Popen(
            argv,
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in ("0", "1")
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), outputs[0][-3000:]


def train_here(source: Path, first: int, last: int, decay: float) -> dict[str, Tensor]:
    """Return weights and averages after these steps from a checkpoint of ours."""
    raw = {
        "model": {key: value for key, value in asdict(MODEL).items() if key in MODEL_KEYS},
        "data": {"prefix": "none"},
        "steps": 2 * STEPS,
        "micro_batch": 4,
        "global_batch": 4,
        "optimizer": {"weight_decay": decay, "clip": 0.0, "eps": 1e-6},
    }
    config, device = read_config(raw), Device("cpu")
    group = Group(0, 1, device)
    model = Network(config.model, native.choose("cpu"), seed=3)
    engine = TorchEngine(model, config, Groups.of(group, Layout.of(1, 1, 1)), device)
    found = open_checkpoint(source)
    parts = engine.parts()
    if not any(key.startswith(MOMENTS) for key in found.table):
        parts = [part for part in parts if not part.key.startswith(MOMENTS)]
    found.fill(parts)
    engine.load_parts(lambda every: None, int(found.manifest["optimizer_steps"]))
    for step in range(first, last):
        engine.step([(batch(step),)], RATE, 1)
    return {part.key: part.tensor.detach().clone() for part in engine.parts()}


MODEL_KEYS = ("layers", "hidden", "heads", "sequence", "vocab", "dropout", "attention_dropout")


def largest_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of a weight.

    The biases of the keys are left out: a bias of all keys changes no attention, so that their gradients are rounding
    alone, which AdamW makes steps of full size.
    """
    keys = slice(MODEL.hidden, 2 * MODEL.hidden)
    largest = 0.0
    for key, tensor in wanted.items():
        difference = (found[key] - tensor).abs()
        if key.endswith("attention.qkv.bias"):
            difference[keys] = 0.0
        largest = max(largest, float(difference.max()))
    return largest


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ten_steps_there_and_ten_here_are_twenty_here(tmp_path: Path, stage: int) -> None:
    decay = 0.0 if stage == 3 else 0.1
    source = checkpoint(tmp_path / "ours", MODEL, random_state(MODEL))
    export_weights(source, tmp_path / "hf", "hf", ExportRequest())
    with_deepspeed("save", stage, tmp_path / "hf", tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    done = import_weights(tmp_path / "theirs", tmp_path / "there", request=ImportRequest(state=True))
    assert done["from"] == "deepspeed" and done["step"] == STEPS
    expected = train_here(source, 0, 2 * STEPS, decay)
    found = train_here(tmp_path / "there", STEPS, 2 * STEPS, decay)
    assert largest_difference(found, expected) < 1e-5
    # Without the averages the result is another one: this test can fail.
    import_weights(tmp_path / "theirs", tmp_path / "weights")
    assert largest_difference(train_here(tmp_path / "weights", STEPS, 2 * STEPS, decay), expected) > 1e-4


@pytest.mark.parametrize("stage", [1, 3])
def test_ten_steps_here_and_ten_there_are_twenty_here(tmp_path: Path, stage: int) -> None:
    decay = 0.0 if stage == 3 else 0.1
    source = checkpoint(tmp_path / "ours", MODEL, random_state(MODEL))
    export_weights(source, tmp_path / "hf", "hf", ExportRequest())
    # DeepSpeed's own first ten steps, as a checkpoint of ours.
    with_deepspeed("save", stage, tmp_path / "hf", tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    import_weights(tmp_path / "theirs", tmp_path / "there", request=ImportRequest(state=True))
    export_weights(tmp_path / "there", tmp_path / "universal", "deepspeed", ExportRequest(state=True))
    import_weights(tmp_path / "universal", tmp_path / "back", request=ImportRequest(state=True))
    assert_equal(state_of(tmp_path / "back"), state_of(tmp_path / "there"))
    with_deepspeed("load", stage, tmp_path / "hf", tmp_path / "universal", tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    expected = train_here(source, 0, 2 * STEPS, decay)
    assert float((state["transformer.wte.weight"] - expected["tokens.weight"]).abs().max()) < 1e-5
    up = expected["blocks.3.feed_forward.up.weight"].t()
    assert float((state["transformer.h.3.mlp.c_fc.weight"] - up).abs().max()) < 1e-5


@pytest.mark.parametrize(("zero", "topology"), [(1, "plain"), (1, "model"), (0, "plain"), (0, "model")])
def test_ten_steps_in_its_pipeline_and_ten_here_are_twenty_here(
    tmp_path: Path, zero: int, topology: str
) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (pip install -e '.[train]')")
    source = checkpoint(tmp_path / "ours", MODEL, random_state(MODEL))
    export_weights(source, tmp_path / "megatron", "megatron", ExportRequest())
    file = next((tmp_path / "megatron").glob("release/*/model_optim_rng.pt"))
    language = torch.load(file, weights_only=False)["model"]["language_model"]
    tables = {f"embedding.{table}.weight": own["weight"] for table, own in language["embedding"].items()}
    torch.save({**tables, **language["encoder"]}, tmp_path / "weights.pt")
    run_both(PIPELINE, zero, topology, tmp_path / "weights.pt", tmp_path / "theirs")
    names = {path.name for path in (tmp_path / "theirs").glob("*/layer_*")}
    assert f"layer_00{'-model_00' if topology == 'model' else ''}-model_states.pt" in names
    done = import_weights(tmp_path / "theirs", tmp_path / "there", request=ImportRequest(state=True))
    assert done["from"] == "deepspeed" and done["step"] == STEPS
    expected = train_here(source, 0, 2 * STEPS, 0.1)
    assert largest_difference(train_here(tmp_path / "there", STEPS, 2 * STEPS, 0.1), expected) < 1e-5
