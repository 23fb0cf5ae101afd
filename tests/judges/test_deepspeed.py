"""DeepSpeed saves what we import with state and loads what we export: ten steps there and ten here are twenty here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import native
from clusterctl.wire.requests import ExportRequest, ImportRequest
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
from trainer.weights.convert import export_weights, import_weights

MODEL = replace(GPT, dropout=0.0, attention_dropout=0.0)
PROGRAM = Path(__file__).with_name("deepspeed_states.py")
PIPELINE = Path(__file__).with_name("deepspeed_pipeline.py")
HUNG = 800
"""Seconds after which ranks count as hung; on a busy machine their imports alone take minutes."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(HUNG + 100)]


def with_deepspeed(task: str, stage: int, *arguments: object) -> None:
    """Run both ranks of the program with a model of transformers."""
    if any(importlib.util.find_spec(name) is None for name in ("deepspeed", "transformers")):
        pytest.skip("deepspeed or transformers is not installed (pip install -e '.[train,judges]')")
    run_ranks(2, PROGRAM, task, stage, *arguments)


def run_ranks(count: int, program: Path, *arguments: object) -> None:
    """Run the ranks of a program. They meet in a file: a port could be taken between its choice and its use."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, str(program), *map(str, arguments)]
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        shared |= {"PYTHONPATH": str(Path(__file__).parents[2])}
        ranks = []
        for rank in map(str, range(count)):
            meeting = f"file://{folder}/store?rank={rank}&world_size={count}"
            own = {"RANK": rank, "LOCAL_RANK": rank, "INIT_METHOD": meeting}
            with (Path(folder) / rank).open("wb") as log:
                ranks.append(
                    subprocess.Popen(argv, env={**os.environ, **shared, **own}, stdout=log, stderr=log)
                )
        wait_for(ranks)
        logs = [(Path(folder) / str(rank)).read_text(errors="replace")[-3000:] for rank in range(count)]
        assert not any(process.returncode for process in ranks), "\n".join(logs)


def wait_for(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all processes to end; when one fails, or they are hung, kill the others."""
    end = time.monotonic() + HUNG
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.returncode for process in processes):
                # The others may be about to say more.
                time.sleep(1)
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()


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
    engine.load_parts(lambda every: None, found.manifest.optimizer_steps)
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
    assert done.format == "deepspeed" and done.step == STEPS
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


def pipelined(tmp_path: Path, zero: int, topology: str, dtype: str) -> Path:
    """Train ten steps in DeepSpeed's pipeline; return the checkpoint of ours with which it began."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (pip install -e '.[train]')")
    source = checkpoint(tmp_path / "ours", MODEL, random_state(MODEL))
    export_weights(source, tmp_path / "megatron", "megatron", ExportRequest())
    file = next((tmp_path / "megatron").glob("release/*/model_optim_rng.pt"))
    language = torch.load(file, weights_only=False)["model"]["language_model"]
    tables = {f"embedding.{table}.weight": own["weight"] for table, own in language["embedding"].items()}
    torch.save({**tables, **language["encoder"]}, tmp_path / "weights.pt")
    arguments = (zero, topology, dtype, tmp_path / "weights.pt", tmp_path / "theirs")
    run_ranks(4 if topology == "tensor" else 2, PIPELINE, *arguments)
    return source


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("topology", ["plain", "model", "tensor"])
def test_ten_steps_in_its_pipeline_and_ten_here_are_twenty_here(
    tmp_path: Path, zero: int, topology: str
) -> None:
    source = pipelined(tmp_path, zero, topology, "fp32")
    names = {path.name for path in (tmp_path / "theirs").glob("*/layer_*")}
    last = {"plain": "", "model": "-model_00", "tensor": "-model_01"}[topology]
    assert f"layer_00{last}-model_states.pt" in names
    done = import_weights(tmp_path / "theirs", tmp_path / "there", request=ImportRequest(state=True))
    assert done.format == "deepspeed" and done.step == STEPS
    expected = train_here(source, 0, 2 * STEPS, 0.1)
    assert largest_difference(train_here(tmp_path / "there", STEPS, 2 * STEPS, 0.1), expected) < 1e-5


@pytest.mark.parametrize("zero", [0, 1])
def test_masters_and_averages_of_its_pipeline_in_bf16_are_imported_as_they_are(
    tmp_path: Path, zero: int
) -> None:
    pipelined(tmp_path, zero, "tensor", "bf16")
    import_weights(tmp_path / "theirs", tmp_path / "there", request=ImportRequest(state=True))
    found = state_of(tmp_path / "there")
    # Ranks 0 and 1 are those of the first stage, 2 and 3 of the second.
    ranks = [torch.load(tmp_path / "theirs" / f"own-{rank}.pt", weights_only=True) for rank in range(4)]
    for stage, block in ((0, 1), (2, 3)):
        for kind in ("param", *MOMENTS):
            name = f"{kind}.layers.{block}.mlp.dense_4h_to_h.weight"
            whole = torch.cat([ranks[stage][name], ranks[stage + 1][name]], 1)
            ours = f"blocks.{block}.feed_forward.down.weight"
            assert torch.equal(found[ours if kind == "param" else f"{kind}.{ours}"], whole)
            table = torch.cat([rank[f"{kind}.embedding.word_embeddings.weight"] for rank in ranks[:2]])
            assert torch.equal(found["tokens.weight" if kind == "param" else f"{kind}.tokens.weight"], table)
    assert found["tokens.weight"].ne(found["tokens.weight"].bfloat16().float()).any(), "no masters"


@pytest.mark.parametrize("form", ["bf16", "fp16", "bf16-rows", "fp16-rows"])
def test_masters_and_averages_of_16_bits_without_zero_are_imported_as_they_are(
    tmp_path: Path, form: str
) -> None:
    source = checkpoint(tmp_path / "ours", MODEL, random_state(MODEL))
    export_weights(source, tmp_path / "hf", "hf", ExportRequest())
    with_deepspeed("save", 0, tmp_path / "hf", tmp_path / "theirs", form)
    (tmp_path / "theirs" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    done = import_weights(tmp_path / "theirs", tmp_path / "there", request=ImportRequest(state=True))
    assert (done.format, done.step, done.state) == ("deepspeed", STEPS, True)
    held = torch.load(tmp_path / "theirs" / "own.pt", weights_only=True)
    found = state_of(tmp_path / "there")
    for kind in ("param", *MOMENTS):
        prefix = "" if kind == "param" else f"{kind}."
        assert torch.equal(found[f"{prefix}tokens.weight"], held[f"{kind}.transformer.wte.weight"])
        for block in range(MODEL.layers):
            down = held[f"{kind}.transformer.h.{block}.mlp.c_proj.weight"].t()
            assert torch.equal(found[f"{prefix}blocks.{block}.feed_forward.down.weight"], down)
            norm = held[f"{kind}.transformer.h.{block}.ln_2.bias"]
            assert torch.equal(found[f"{prefix}blocks.{block}.norm_2.bias"], norm)
    assert found["tokens.weight"].ne(found["tokens.weight"].bfloat16().float()).any(), "no masters"
