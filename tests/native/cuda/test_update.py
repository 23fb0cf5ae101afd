"""The update of weights and the sum of squares by Triton's kernels, on a GPU or in its interpreter."""

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import native
from native import masters
from native.cuda.adamw import adamw
from native.cuda.square_sum import square_sum
from native.update import AdamWStep
from tests.native.test_adamw import by_hand, tensors
from tests.native.test_masters import boundaries, divided, same_bits, step

DECAYS = (0.1, 0.0, 0.0, 0.1)


@pytest.mark.parametrize("gradient_type", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_step_is_what_the_formula_says_and_the_copy_is_rounded(gradient_type: torch.dtype) -> None:
    warnings.simplefilter("error")
    given = tensors(gradient_type)
    expected = [[x.double() for x in part] for part in given]
    by_hand(*expected)
    held, gradients, averages, squares = given
    lowered = [torch.empty_like(x, dtype=torch.bfloat16) if x.dim() > 1 else None for x in held]
    adamw(
        AdamWStep(
            held,
            gradients,
            averages,
            squares,
            lowered,
            DECAYS,
            3,
            0.01,
            betas=(0.9, 0.95),
            eps=1e-8,
            factor=0.5,
        )
    )
    for ours, right in zip((held, averages, squares), (expected[0], *expected[2:]), strict=True):
        for mine, other in zip(ours, right, strict=True):
            assert torch.allclose(mine.double(), other, rtol=2e-6, atol=1e-6)
    for mine, low in zip(held, lowered, strict=True):
        assert low is None or torch.equal(low, mine.bfloat16())


def many(count: int) -> AdamWStep:
    """Return an update of `count` tensors of different lengths, every third with weight decay."""
    generator = torch.Generator().manual_seed(7)
    parts = [[torch.randn(5 + 40 * i, generator=generator) for i in range(count)] for _ in range(3)]
    squares = [x.square() for x in parts[2]]
    decays = [0.1 * (i % 3 == 0) for i in range(count)]
    return AdamWStep(*parts, squares, [None] * count, decays, 3, 0.01, (0.9, 0.95), 1e-8, 0.25)


def copied(update: AdamWStep, factor: float | Tensor) -> AdamWStep:
    """Return the update on copies of its tensors, with another factor."""
    parts = ("held", "gradients", "averages", "squares")
    return replace(
        update, factor=factor, **{part: [x.clone() for x in getattr(update, part)] for part in parts}
    )


def test_many_tensors_take_one_launch_for_each_decay_and_one_for_their_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = []
    for module in ("adamw", "square_sum"):
        owner = importlib.import_module(f"native.cuda.{module}")
        kernel = getattr(owner, f"_{module}")

        class Counted:
            def __getitem__(self, grid: tuple[int, ...], kernel: Any = kernel) -> Any:
                launches.append(grid)
                return kernel[grid]

        monkeypatch.setattr(owner, f"_{module}", Counted())
    update = many(40)
    right = sum(float(x.double().square().sum()) for x in update.gradients)
    assert float(square_sum(update.gradients)) == pytest.approx(right, rel=1e-6)
    adamw(update)
    assert launches == [(40,), (14,), (26,)]


def test_a_factor_on_the_device_is_read_there_and_nan_changes_nothing() -> None:
    start = many(6)
    by_number, on_device, skipped = copied(start, 0.25), copied(start, torch.tensor(0.25)), copied(start, 1.0)
    for update in (by_number, on_device, replace(skipped, factor=torch.tensor(float("nan")))):
        adamw(update)
    # Gradients that are not contiguous are copied; weights that are not are left to the reference.
    columns = [torch.randn(6, 7).t() for _ in range(4)]
    kept = [x.clone() for x in columns]
    adamw(replace(start, held=columns[:1], gradients=columns[1:2], averages=columns[2:3],
                  squares=columns[3:], lowered=[None], decays=[0.0], factor=torch.tensor(float("nan"))))  # fmt: skip
    assert all(torch.equal(x, y) for x, y in zip(columns, kept, strict=True))
    for part in ("held", "averages", "squares"):
        rows = zip(*(getattr(each, part) for each in (by_number, on_device, skipped, start)), strict=True)
        for number, tensor, unchanged, before in rows:
            assert torch.equal(number, tensor) and not torch.equal(number, before)
            assert torch.equal(unchanged, before)


def test_squares_are_summed_in_any_type_and_what_is_not_finite_shows() -> None:
    held, gradients, *_ = tensors(torch.bfloat16)
    given = [*held, *gradients, torch.zeros(0), torch.randn(6, 7).t()]
    right = sum(float(x.double().square().sum()) for x in given)
    assert float(square_sum(given)) == pytest.approx(right, rel=1e-6)
    assert torch.equal(square_sum(given), square_sum(given))
    assert float(square_sum([])) == 0
    held[1][39_999] = float("inf")
    assert float(square_sum(given)) == float("inf")
    gradients[0][0, 0] = float("nan")
    assert math.isnan(float(square_sum(given)))


def state(gradient_type: torch.dtype) -> tuple[list[Tensor], ...]:
    """Masters around every place where rounding to bf16 changes, some without a gradient: their ties must survive."""
    master = [torch.randn(5001), boundaries()[::13].clone(), torch.zeros(0)]
    gradients = [torch.randn(x.shape).mul_(0.01).to(gradient_type) for x in master]
    gradients[1].zero_()
    averages = [torch.randn(x.shape) for x in master]
    averages[1].zero_()
    return master, gradients, averages, [average.square() for average in averages]


@pytest.mark.parametrize("gradient_type", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_updates_of_weights_and_remainders_are_those_of_fp32_masters_to_the_last_bit(
    gradient_type: torch.dtype,
) -> None:
    ops = native.choose("cuda", {"adamw": "cuda"})
    master, gradients, averages, squares = state(gradient_type)
    whole = [[x.clone() for x in part] for part in (master, averages, squares)]
    lowered = [x.bfloat16() for x in master]
    pairs = [divided(x, square) for x, square in zip(master, squares, strict=True)]
    weights, remainders = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for number in (1, 2):
        step(ops, number, whole[0], gradients, whole[1], whole[2], lowered)
        step(ops, number, weights, gradients, averages, squares, [None] * 3, remainders=remainders)
    joined = [masters.join(*row) for row in zip(weights, remainders, squares, strict=True)]
    for own, other in zip([*joined, *averages, *squares], [x for part in whole for x in part], strict=True):
        assert same_bits(own, other)
    assert all(same_bits(x.float(), low.float()) for x, low in zip(weights, lowered, strict=True))
