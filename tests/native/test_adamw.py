"""The update of weights: every backend held to fp64, with the types that a training has."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import native
from native import reference

# One longer than what a thread takes at a time.
SHAPES = ((3, 5), (40_000,), (1,), (257, 129))


def tensors(gradient_type: torch.dtype, seed: int = 0) -> tuple[list[Tensor], ...]:
    """Held, gradients, averages, squares."""
    generator = torch.Generator().manual_seed(seed)
    held, gradients, averages = (
        [torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(3)
    )
    squares = [average.square() + 0.1 for average in averages]
    return held, [gradient.to(gradient_type) for gradient in gradients], averages, squares


def by_hand(
    held: list[Tensor], gradients: list[Tensor], averages: list[Tensor], squares: list[Tensor]
) -> None:
    for w, g, m, v, decay in zip(held, gradients, averages, squares, (0.1, 0.0, 0.0, 0.1), strict=True):
        g.mul_(0.5)
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.95).add_(g * g, alpha=0.05)
        w.mul_(1 - 0.01 * decay)
        w.sub_(0.01 * (m / (1 - 0.9**3)) / ((v / (1 - 0.95**3)).sqrt() + 1e-8))


@pytest.mark.parametrize("gradient_type", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_step_is_what_the_formula_says_and_the_copy_is_rounded(
    backend: str, gradient_type: torch.dtype
) -> None:
    try:
        ops = native.choose("cpu", {"adamw": backend})
    except native.BackendUnavailable as missing:
        pytest.skip(str(missing))
    given = tensors(gradient_type)
    expected = [[x.double() for x in part] for part in given]
    by_hand(*expected)
    held, gradients, averages, squares = given
    lowered = [torch.empty_like(one, dtype=torch.bfloat16) if one.dim() > 1 else None for one in held]
    decays = (0.1, 0.0, 0.0, 0.1)
    given_to = (held, gradients, averages, squares, lowered, decays)
    ops.adamw(native.AdamWStep(*given_to, step=3, rate=0.01, betas=(0.9, 0.95), eps=1e-8, factor=0.5))
    for ours, right in zip((held, averages, squares), (expected[0], *expected[2:]), strict=True):
        for one, other in zip(ours, right, strict=True):
            assert torch.allclose(one.double(), other, rtol=2e-6, atol=1e-6)
    for one, low in zip(held, lowered, strict=True):
        assert low is None or torch.equal(low, one.bfloat16())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_squares_of_tensors_in_any_type_are_summed_and_what_is_not_finite_shows(backend: str) -> None:
    try:
        ops = native.choose("cpu", {"square_sum": backend})
    except native.BackendUnavailable as missing:
        pytest.skip(str(missing))
    held, gradients, *_ = tensors(torch.bfloat16)
    given = [*held, *gradients, torch.zeros(0)]
    right = sum(float(one.double().square().sum()) for one in given)
    assert float(ops.square_sum(given)) == pytest.approx(right, rel=1e-5)
    held[1][39_999] = float("inf")
    assert float(ops.square_sum(given)) == float("inf")
    gradients[0][0, 0] = float("nan")
    assert math.isnan(float(ops.square_sum(given)))


def test_a_device_without_torchs_fused_kernel_counts_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for fused_on in (("cpu",), ()):
        monkeypatch.setattr(reference, "FUSED_ON", fused_on)
        tensors = [[torch.full((3, 2), value), torch.full((4,), value)] for value in (1.0, 0.1, 0.01, 0.02)]
        update = native.AdamWStep(*tensors, [None] * 2, [0.1] * 2, 3, 0.01, (0.9, 0.95), 1e-8)
        reference.adamw(update)
        weights.append(tensors[0])
    assert all(torch.allclose(one, other, rtol=1e-6) for one, other in zip(*weights, strict=True))
