"""DeepSpeed trains a GLM with GLM's names ten steps and saves it; ten steps here follow."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import native
from clusterctl.wire.requests import ImportRequest
from tests.judges.deepspeed_states import RATE, STEPS
from tests.judges.glm_states import batch
from tests.judges.test_deepspeed import HUNG, MODEL_KEYS, largest_difference, run_ranks
from tests.support.weights import GLM, checkpoint, random_state, write_glm
from trainer.checkpoint.part import MOMENTS
from trainer.checkpoint.store import open_checkpoint
from trainer.config.layout import Layout
from trainer.device import Device
from trainer.engine.torch_engine import TorchEngine
from trainer.model.glm import GLM as Network
from trainer.parallel.group import Group, Groups
from trainer.plan.resolve import read_config
from trainer.weights.convert import import_weights

PROGRAM = Path(__file__).with_name("glm_states.py")
MODEL = replace(GLM, dropout=0.0, attention_dropout=0.0)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(HUNG + 100)]


def train_here(source: Path, first: int, last: int) -> dict[str, Tensor]:
    """Return weights and averages after these steps from a checkpoint of ours."""
    given = asdict(MODEL)
    raw = {
        "model": {key: given[key] for key in (*MODEL_KEYS, "kind", "positions")},
        "data": {"prefix": "none", "eod": 1},
        "steps": 2 * STEPS,
        "micro_batch": 4,
        "global_batch": 4,
        "optimizer": {"weight_decay": 0.1, "clip": 0.0, "eps": 1e-6},
    }
    config, device = read_config(raw), Device("cpu")
    model = Network(config.model, native.choose("cpu"), seed=3)
    engine = TorchEngine(model, config, Groups.of(Group(0, 1, device), Layout.of(1, 1, 1)), device)
    found = open_checkpoint(source)
    parts = engine.parts()
    if not any(key.startswith(MOMENTS) for key in found.table):
        parts = [part for part in parts if not part.key.startswith(MOMENTS)]
    found.fill(parts)
    engine.load_parts(lambda every: None, found.manifest.optimizer_steps)
    for step in range(first, last):
        engine.step([batch(step)], RATE, 1)
    return {part.key: part.tensor.detach().clone() for part in engine.parts()}


@pytest.mark.parametrize(("stage", "old"), [(1, False), (2, False), (2, True)])
def test_ten_steps_of_a_glm_there_and_ten_here_are_twenty_here(tmp_path: Path, stage: int, old: bool) -> None:
    """`old`: without the names that older versions of DeepSpeed did not record."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (pip install -e '.[train]')")
    state = random_state(MODEL)
    source = checkpoint(tmp_path / "ours", MODEL, state)
    write_glm(tmp_path / "glm", state, 1)
    run_ranks(2, PROGRAM, stage, tmp_path / "glm" / "mp_rank_00_model_states.pt", tmp_path / "theirs")
    if old:
        for file in (tmp_path / "theirs").glob(f"global_step{STEPS}/*_states.pt"):
            document = torch.load(file, weights_only=False)
            document.pop("param_shapes", None)
            document.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)
            torch.save(document, file)
    asked = ImportRequest(state=True, heads=4, vocab=300)
    done = import_weights(tmp_path / "theirs", tmp_path / "there", request=asked)
    assert (done.format, done.step, done.state) == ("glm", STEPS, True)
    expected = train_here(source, 0, 2 * STEPS)
    assert largest_difference(train_here(tmp_path / "there", STEPS, 2 * STEPS), expected) < 1e-5
    # Without the averages the result is another one: this test can fail.
    import_weights(tmp_path / "theirs", tmp_path / "weights", request=replace(asked, state=False))
    assert largest_difference(train_here(tmp_path / "weights", STEPS, 2 * STEPS), expected) > 1e-4
