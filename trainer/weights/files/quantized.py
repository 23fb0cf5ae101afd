"""Quantized tensors as numbers: blocks of 4 bits with one exponent (mxfp4), or of fp8 with one factor, read as bf16."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.weights.lazy import Lazy

# The keys of `quant_method` that are read, and the ends of the names of their tensors.
METHODS = {"mxfp4": ("_blocks", "_scales"), "fp8": ("", "_scale_inv")}
# What 4 bits are: a sign, two bits of exponent and one of the number.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127
BLOCK = 128
"""The rows, and the columns, of an fp8 matrix that share a factor."""


def as_numbers(named: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """Return tensors under their names, of which the quantized ones become bf16."""
    found, used = dict(named), set[str]()
    for method, (of_blocks, of_scales) in METHODS.items():
        for name, scales in named.items():
            stem = name.removesuffix(of_scales)
            blocks = named.get(stem + of_blocks)
            if stem == name or blocks is None:
                continue
            used |= {name, stem + of_blocks}
            found[stem] = _of_fours(blocks, scales) if method == "mxfp4" else _of_eights(blocks, scales)
    return {
        name: tensor for name, tensor in found.items() if name not in used or tensor is not named.get(name)
    }


def _of_fours(blocks: Lazy, scales: Lazy) -> Lazy:
    """Return (experts, inputs, outputs) from 16 bytes with an exponent each, (experts, outputs, inputs / 32, 16)."""
    experts, outputs, groups, size = blocks.shape
    values = torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.bfloat16)

    def read(start: int, stop: int) -> Tensor:
        packed, exponents = blocks.read(start, stop), scales.read(start, stop).int() - BIAS
        pairs = torch.stack([values[(packed & 15).int()], values[(packed >> 4).int()]], -1).flatten(-2)
        numbers = torch.ldexp(pairs, exponents.unsqueeze(-1))
        return numbers.flatten(2).transpose(1, 2).to(torch.bfloat16).contiguous()

    return Lazy((experts, groups * size * 2, outputs), torch.bfloat16, read)


def _of_eights(matrix: Lazy, factors: Lazy) -> Lazy:
    """Return a matrix of which each block of 128 x 128 numbers is multiplied by its factor."""

    def read(start: int, stop: int) -> Tensor:
        first = start // BLOCK
        own = factors.read(first, -(-stop // BLOCK)).float()
        rows = torch.arange(start, stop) // BLOCK - first
        wide = own[rows].repeat_interleave(BLOCK, 1)[:, : matrix.shape[1]]
        return (matrix.read(start, stop).float() * wide).to(torch.bfloat16)

    return Lazy(matrix.shape, torch.bfloat16, read)
