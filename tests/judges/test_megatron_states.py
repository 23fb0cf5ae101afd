"""Megatron-core trains ten steps and saves its optimizer in each of its forms; ten steps here follow."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.judges.deepspeed_states import STEPS
from tests.judges.test_deepspeed import MODEL, largest_difference, train_here
from tests.support.weights import checkpoint, random_state, state_of
from trainer.checkpoint.part import MOMENTS
from trainer.weights.contents import ExportRequest, ImportRequest
from trainer.weights.convert import export_weights, import_weights
from trainer.weights.files.torch_read import read_torch
from trainer.weights.megatron.names import core_name, core_of, flat

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-judges" / "megatron" / "bin" / "python"
pytestmark = pytest.mark.slow


def trained(tmp_path: Path, form: str, ranks: int = 1) -> tuple[Path, Path]:
    """Return a checkpoint of ours, and the folder in which Megatron-core saved it after ten steps."""
    if not PYTHON.exists():
        pytest.skip("megatron is not installed (make judges)")
    source = checkpoint(tmp_path / "ours", MODEL, random_state(MODEL))
    export_weights(source, tmp_path / "given", "megatron", ExportRequest())
    file = next((tmp_path / "given").glob("release/*/model_optim_rng.pt"))
    weights = {core_name(name): lazy.whole() for name, lazy in flat(read_torch(file)["model"], file)}
    torch.save(weights, tmp_path / "weights.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    given |= {"WORLD_SIZE": str(ranks), "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    argv = [
        str(PYTHON),
        str(HERE / "megatron_states.py"),
        form,
        str(tmp_path / "weights.pt"),
        str(tmp_path / "theirs"),
    ]
    started = [
        subprocess.Popen(
            argv, env={**given, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0].decode() for rank in started]
    finally:
        for rank in started:
            rank.kill()
    assert all(rank.returncode == 0 for rank in started), outputs[0][-3000:]
    return source, tmp_path / "theirs"


@pytest.mark.parametrize(("form", "ranks"), [("fp32", 1), ("distributed", 1), ("distributed", 2)])
def test_ten_steps_of_megatron_core_and_ten_here_are_twenty_here(
    tmp_path: Path, form: str, ranks: int
) -> None:
    source, theirs = trained(tmp_path, form, ranks)
    done = import_weights(theirs, tmp_path / "there", request=ImportRequest(state=True))
    assert done["from"] == "megatron" and done["step"] == STEPS
    expected = train_here(source, 0, 2 * STEPS, 0.1)
    assert largest_difference(train_here(tmp_path / "there", STEPS, 2 * STEPS, 0.1), expected) < 1e-5
    # Without the averages the result is another one: this test can fail.
    import_weights(theirs, tmp_path / "weights")
    assert largest_difference(train_here(tmp_path / "weights", STEPS, 2 * STEPS, 0.1), expected) > 1e-4


@pytest.mark.parametrize("form", ["bf16", "distributed-bf16"])
def test_masters_and_averages_of_megatron_core_are_imported_as_they_are(tmp_path: Path, form: str) -> None:
    _, theirs = trained(tmp_path, form)
    import_weights(theirs, tmp_path / "there", request=ImportRequest(state=True))
    held = torch.load(theirs / "state.pt", weights_only=True)
    found = state_of(tmp_path / "there")
    for name in (name for name in found if not name.startswith(MOMENTS)):
        for ours, kind in ((name, "param"), *((f"{moment}.{name}", moment) for moment in MOMENTS)):
            wanted: Tensor = held[f"{kind}.{core_of(name)}"]
            if ".attention.qkv." in name:
                wanted = wanted.unflatten(0, (MODEL.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
            assert torch.equal(found[ours], wanted[: len(found[ours])]), ours
    assert found["tokens.weight"].ne(found["tokens.weight"].bfloat16().float()).any(), "no masters"
