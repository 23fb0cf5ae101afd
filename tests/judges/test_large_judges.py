"""Megatron-core and MindSpore read our exports and write what we import. `make judges` makes their environments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clusterctl.wire.requests import ExportRequest, ImportRequest
from tests.support.weights import GPT, assert_equal, checkpoint, logits_of, random_state, state_of
from trainer.weights.convert import export_weights, import_weights

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HUNG = 800
"""Seconds after which a program counts as hung."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * HUNG + 100)]


def judge(name: str, program: str, *arguments: object) -> None:
    """Run a program of this folder in the environment of a judge."""
    python = ROOT / ".venv-judges" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{name} is not installed (make judges)")
    argv = [str(python), str(HERE / program), *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HUNG, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def tokens() -> torch.Tensor:
    return torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(3))


def test_what_megatron_core_saves_computes_the_same_here(tmp_path: Path) -> None:
    judge("megatron", "megatron_core.py", "save", tmp_path / "theirs", tmp_path / "logits.pt")
    expected = torch.load(tmp_path / "logits.pt", weights_only=True)
    for form, folder in (("megatron-core", "dist"), ("megatron", "legacy")):
        done = import_weights(tmp_path / "theirs" / folder, tmp_path / form)
        assert done.format == form
        assert (logits_of(tmp_path / form, tokens()) - expected).abs().max() < 1e-5
    assert_equal(state_of(tmp_path / "megatron-core"), state_of(tmp_path / "megatron"))


def test_megatron_core_loads_our_export_and_computes_the_same(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ours", GPT, random_state(GPT))
    export_weights(source, tmp_path / "export", "megatron-core", ExportRequest())
    judge("megatron", "megatron_core.py", "load", tmp_path / "export", tmp_path / "logits.pt")
    expected = torch.load(tmp_path / "logits.pt", weights_only=True)
    assert (logits_of(source, tokens()) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("form", ["mindspore", "mindspore-safetensors"])
def test_mindspore_reads_our_export_and_writes_what_we_import(tmp_path: Path, form: str) -> None:
    state = random_state(GPT, moments=True)
    source = checkpoint(tmp_path / "ours", GPT, state)
    export_weights(source, tmp_path / "export", form, ExportRequest(state=True))
    (file,) = (tmp_path / "export").glob("gpt2.*")
    judge("mindspore", "mindspore_files.py", "load", file, tmp_path / "numbers.npz")
    found: dict[str, Any] = dict(np.load(tmp_path / "numbers.npz"))
    mapping = found["backbone.blocks.2.output.mapping.weight"]
    assert (mapping == state["blocks.2.feed_forward.up.weight"].numpy().T).all()
    assert (found["adam_v.backbone.layernorm.gamma"] == state["exp_avg_sq.norm.weight"].numpy()).all()
    again = tmp_path / f"again{file.suffix}"
    judge("mindspore", "mindspore_files.py", "save", again, tmp_path / "numbers.npz")
    import_weights(again, tmp_path / "back", request=ImportRequest(state=True, heads=4))
    assert_equal(state_of(tmp_path / "back"), state)
