"""fp32 masters stored as bf16 weights and 16-bit remainders: restored bit for bit, updated as if they were whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import native
from native import masters
from native.compiled import library

BACKENDS = ("cpu", "reference")


def of_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def boundaries() -> Tensor:
    """Masters around every place where rounding to bf16 changes, for all 65,536 upper halves."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64).unsqueeze(1) << 16
    lower = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    return of_bits((upper + lower).flatten())


def divided(master: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    weight, remainder = (torch.empty_like(master, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    masters.split(master, weight, remainder, square)
    return weight, remainder


def same_bits(one: Tensor, other: Tensor) -> bool:
    nan = other.isnan()
    return torch.equal(one.isnan(), nan) and torch.equal(
        one[~nan].view(torch.int32), other[~nan].view(torch.int32)
    )


def test_every_boundary_is_restored_and_its_weight_is_rounded_to_even() -> None:
    master = boundaries()
    square = torch.linspace(0, 1, len(master))
    given = square.clone()
    weight, remainder = divided(master, square)
    nan = master.isnan()
    assert torch.equal(weight[~nan].view(torch.int16), master.bfloat16()[~nan].view(torch.int16))
    assert weight[nan].isnan().all()
    # Ties that are rounded down are the only values that need the mark.
    bits = master.view(torch.int32)
    tie = (bits & 0x1FFFF) == 0x8000
    assert torch.equal(square.view(torch.int32) < 0, tie & ~nan) and tie.any()
    assert same_bits(masters.join(weight, remainder, square), master)
    assert torch.equal(square.view(torch.int32), given.view(torch.int32))


def state(gradient_type: torch.dtype) -> tuple[list[Tensor], ...]:
    """Masters with and without ties, gradients, averages, squares; some squares and gradients are 0."""
    generator = torch.Generator().manual_seed(0)
    master = [torch.randn(70_001, generator=generator), boundaries()[::97].clone(), torch.zeros(0)]
    # With zero gradients and no decay a master stays as it is: its tie must survive the step.
    gradients = [torch.randn(x.shape, generator=generator).mul_(0.01).to(gradient_type) for x in master]
    gradients[1].zero_()
    averages = [torch.randn(x.shape, generator=generator) for x in master]
    averages[1].zero_()
    squares = [average.square() for average in averages]
    return master, gradients, averages, squares


def step(ops: native.Choice, number: int, *tensors: object, remainders: object = ()) -> None:
    held, gradients, averages, squares, lowered = tensors
    update = native.AdamWStep(
        held, gradients, averages, squares, lowered, [0.1, 0.0, 0.1], number, 1e-3, (0.9, 0.95), 1e-8, 0.3,
        remainders,
    )  # fmt: skip
    ops.adamw(update)


@pytest.mark.parametrize("level", range(3), ids=library.LEVELS)
@pytest.mark.parametrize("gradient_type", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_updates_are_those_of_fp32_masters_to_the_last_bit(
    backend: str, gradient_type: torch.dtype, level: int, compiled: library.Library
) -> None:
    if level > compiled.level or (backend == "reference" and level):
        pytest.skip("this processor has no such level, or the reference has none")
    own = compiled.level
    object.__setattr__(compiled, "level", level)
    ops = native.choose("cpu", {"adamw": backend})
    master, gradients, averages, squares = state(gradient_type)
    whole = [[x.clone() for x in part] for part in (master, averages, squares)]
    lowered = [x.bfloat16() for x in master]
    pairs = [divided(x, square) for x, square in zip(master, squares, strict=True)]
    weights, remainders = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    try:
        for number in (1, 2, 3):
            given = [[x.clone() for x in gradients] for _ in range(2)]
            step(ops, number, whole[0], given[0], whole[1], whole[2], lowered)
            step(ops, number, weights, given[1], averages, squares, [None] * 3, remainders=remainders)
    finally:
        object.__setattr__(compiled, "level", own)
    joined = [masters.join(*row) for row in zip(weights, remainders, squares, strict=True)]
    for one, other in zip([*joined, *averages, *squares], [x for part in whole for x in part], strict=True):
        assert same_bits(one, other)
    assert all(same_bits(x.float(), low.float()) for x, low in zip(weights, lowered, strict=True))


def test_what_is_not_finite_stays_so() -> None:
    master = torch.tensor([math.inf, -math.inf, math.nan, 3.4028235e38, -3.4028235e38, 1e-45, -0.0])
    square = torch.zeros(len(master))
    weight, remainder = divided(master, square)
    assert weight.tolist()[3:5] == [math.inf, -math.inf]
    assert same_bits(masters.join(weight, remainder, square), master)
