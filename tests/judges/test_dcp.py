"""torch trains ten steps and saves a distributed checkpoint; ten steps here follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clusterctl.wire.requests import ExportRequest, ImportRequest
from tests.judges.deepspeed_states import STEPS
from tests.judges.test_deepspeed import HUNG, MODEL, largest_difference, run_ranks, train_here
from tests.support.weights import checkpoint, random_state
from trainer.weights.convert import export_weights, import_weights
from trainer.weights.files.safetensors import read_safetensors

PROGRAM = Path(__file__).with_name("dcp_states.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(HUNG + 100)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_steps_of_torch_and_ten_here_are_twenty_here(tmp_path: Path, ranks: int) -> None:
    source = checkpoint(tmp_path / "ours", MODEL, random_state(MODEL))
    export_weights(source, tmp_path / "hf", "hf", ExportRequest())
    weights = read_safetensors(tmp_path / "hf" / "model.safetensors")
    torch.save({name: tensor.whole() for name, tensor in weights.items()}, tmp_path / "weights.pt")
    run_ranks(ranks, PROGRAM, MODEL.heads, tmp_path / "weights.pt", tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    done = import_weights(tmp_path / "theirs", tmp_path / "there", request=ImportRequest(state=True))
    assert (done.format, done.step, done.state) == ("dcp", STEPS, True)
    expected = train_here(source, 0, 2 * STEPS, 0.1)
    found = train_here(tmp_path / "there", STEPS, 2 * STEPS, 0.1)
    assert largest_difference(found, expected) < 1e-5
    # Without the averages the result is another one: this test can fail.
    import_weights(tmp_path / "theirs", tmp_path / "weights")
    assert largest_difference(train_here(tmp_path / "weights", STEPS, 2 * STEPS, 0.1), expected) > 1e-4
