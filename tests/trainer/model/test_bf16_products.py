"""A step in bf16 multiplies in fp32 where torch has no products of bf16 for the processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import native
from native import products
from trainer.config.lora import LoraConfig
from trainer.config.model import ModelConfig
from trainer.model.adapter import adapt
from trainer.model.gpt import GPT

pytestmark = pytest.mark.usefixtures("compiled")
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"rotary": True, "norm": "rms", "swiglu": True, "bias": "none", "query_groups": 2},
    "experts": {"experts": 4, "top_k": 2, "shared_ffn": 32},
}
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv"}


def step(shape: dict[str, Any], lora: LoraConfig | None) -> tuple[float, dict[str, torch.Tensor]]:
    config = ModelConfig(layers=2, hidden=64, heads=4, sequence=48, vocab=97, **shape)
    model = GPT(config, native.choose("cpu"), seed=3)
    if lora is not None:
        adapt(model, config, lora, 7)
    model.bfloat16()
    tokens = torch.randint(97, (3, 49), generator=torch.Generator().manual_seed(1))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapters"])
def test_no_product_of_a_step_is_in_bf16(
    shape: dict[str, Any], adapted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lora = LoraConfig(4, 8.0, 0.0, ("all",)) if adapted else None
    expected, wanted = step(shape, lora)
    monkeypatch.setattr(products, "multiplies_bf16", lambda: False)
    # A processor without products of bf16 cannot run our kernel either.
    monkeypatch.setattr(products, "_wanted", [False])
    with torch.profiler.profile(record_shapes=True) as profile:
        loss, gradients = step(shape, lora)
    assert loss == pytest.approx(expected, rel=2e-3)
    assert gradients.keys() == wanted.keys()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    types = [event["args"]["Input type"] for event in events if event.get("name") in PRODUCTS]
    assert len(types) >= 20
    assert not [each for each in types if "c10::BFloat16" in each]
