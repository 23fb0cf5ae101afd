"""Ascend's ops hand CANN's kernels what these document: held to the cases through kernels that mean the same."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from native import cases, reference
from native.npu import adamw as npu_adamw
from native.npu import attention as npu_attention
from native.update import AdamWStep


def fusion(q: Tensor, k: Tensor, v: Tensor, heads: int, input_layout: str, **how: Any) -> tuple[Tensor, ...]:
    """npu_fusion_attention as documented, for a mask compressed to 2048 x 2048 or none."""
    assert (input_layout, heads, how.pop("keep_prob")) == ("BNSD", q.shape[1], 1.0)
    scores = q @ k.transpose(2, 3) * how.pop("scale")
    if how:
        mask = how.pop("atten_mask")
        assert (how.pop("sparse_mode"), mask.dtype, tuple(mask.shape)) == (3, torch.bool, (2048, 2048))
        assert not how and not mask[5, 5] and mask[5, 6]
        rows, columns = scores.shape[2:]
        scores = scores.masked_fill(
            torch.ones(rows, columns, dtype=torch.bool).triu(1 + columns - rows), -torch.inf
        )
    return scores.softmax(-1) @ v, *(torch.zeros(0),) * 3


def apply_adam_w(*given: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
    """npu_apply_adam_w as documented."""
    power_1, power_2, rate, decay, beta_1, beta_2, eps, gradient, _, amsgrad, maximize = given
    assert not (amsgrad or maximize)
    weight, mean, square = out
    mean.mul_(beta_1).add_(gradient, alpha=1 - beta_1)
    square.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
    below = (square / (1 - power_2 * beta_2)).sqrt() + eps
    weight.mul_(1 - rate * decay).sub_(rate * mean / (1 - power_1 * beta_1) / below)


@pytest.fixture(autouse=True)
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(npu_fusion_attention=fusion, npu_apply_adam_w=apply_adam_w)
    monkeypatch.setitem(sys.modules, "torch_npu", library)


@pytest.mark.parametrize("case", list(cases.cases("attention")), ids=str)
def test_attention_is_the_reference(case: cases.Case) -> None:
    inputs = case.inputs()
    expected = cases.meaning(case, reference.attention, inputs)
    actual = cases.run(case, npu_attention.attention, inputs)
    assert cases.error(actual.value, expected.value) <= case.value_error
    for one, other in zip(actual.gradients, expected.gradients, strict=True):
        assert cases.error(one, other) <= case.gradient_error


def test_an_update_is_the_reference_with_its_copy_in_bf16() -> None:
    shapes, decays = ((3, 5), (7,)), (0.1, 0.0)
    given = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    results = []
    for update in (reference.adamw, npu_adamw.adamw):
        held, gradients, means = ([one.clone() for one in part] for part in given)
        squares = [one.square() + 0.1 for one in means]
        lowered = [torch.empty(3, 5, dtype=torch.bfloat16), None]
        tensors = (held, gradients, means, squares, lowered, decays)
        update(AdamWStep(*tensors, step=3, rate=0.01, betas=(0.9, 0.95), eps=1e-8, factor=0.5))
        results.append([*held, *means, *squares, lowered[0].float()])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
