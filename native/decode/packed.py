"""Products with weights packed for generation in fp32, bf16 or 8 bits; a row's result is the same in every batch."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from native.compiled.arguments import INT, POINTER, SIZE, function, structure
from native.compiled.library import load, why_not
from native.compiled.op import address

__all__ = ["KINDS", "Packed", "why_not"]

WIDTH = 16
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
"""The names of the types that weights are stored in; int8 has a scale per output."""
_EACH = {"fp32": 1, "bf16": 2, "int8": 4}
"""How many inputs are stored side by side."""
_WHOLE = {"fp32": 1, "bf16": 2, "int8": 64}
"""Inputs are padded to a multiple of this."""
NARROW = {torch.bfloat16: 3, torch.int8: 1}
"""From this level on, a product reads `x` in the type of its weights."""
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class _Product(ctypes.Structure):
    """The layout of `struct Product` in packed.h."""

    _fields_ = structure((POINTER, "weight scales bias"), (SIZE, "n k"), (INT, "kind threads level"))


@dataclass
class Packed:
    """A matrix (outputs, inputs), in panels of 16 outputs if the compiled library is present."""

    outputs: int
    inputs: int
    data: Tensor
    scales: Tensor | None
    bias: Tensor | None
    native: bool
    _structure: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, kind: str, native: bool = True) -> Packed:
        """Pack an fp32 weight; `native`: for the compiled kernel, which must be present."""
        outputs, inputs = weight.shape
        data, scales = quantized(weight.float()) if kind == "int8" else (weight.to(KINDS[kind]), None)
        bias = None if bias is None else bias.float().clone()
        if native:
            padded = -(-outputs // WIDTH) * WIDTH
            data = torch.nn.functional.pad(data, (0, -inputs % _WHOLE[kind], 0, padded - outputs))
            data = data.view(padded // WIDTH, WIDTH, -1, _EACH[kind]).transpose(1, 2).contiguous()
            scales, bias = (_padded(part, padded) for part in (scales, bias))
        else:
            data = data.clone()
        return cls(outputs, inputs, data, scales, bias, native)

    @property
    def bytes(self) -> int:
        parts = (self.data, self.scales, self.bias)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` (..., inputs) in fp32 times the matrix, (..., outputs)."""
        if not self.native:
            return self._plain(x)
        call = self.structure
        if call.threads != torch.get_num_threads():
            call.threads = torch.get_num_threads()
        x = self._narrowed(x).contiguous()
        rows, width = x.shape[:-1], call.n
        out = torch.empty(*rows, width)
        run = function("native_packed_product", None, POINTER, POINTER, SIZE, SIZE, POINTER, SIZE)
        run(ctypes.addressof(call), x.data_ptr(), rows.numel(), x.shape[-1], out.data_ptr(), width)
        return out if width == self.outputs else out[..., : self.outputs]

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the matrix in fp32: the embedding of each id."""
        if self.native:
            found = self.data[ids // WIDTH, :, ids % WIDTH].flatten(-2)[..., : self.inputs].float()
        else:
            found = self.data[ids].float()
        return found if self.scales is None else found * self.scales[ids].unsqueeze(-1)

    def _plain(self, x: Tensor) -> Tensor:
        out = x @ self.data.float().T
        out = out if self.scales is None else out * self.scales
        return out if self.bias is None else out + self.bias

    @property
    def reads(self) -> torch.dtype:
        """Return the type in which the kernel reads `x`."""
        kind = self.data.dtype
        narrow = self.native and kind in NARROW and self.structure.level >= NARROW[kind]
        return kind if narrow else torch.float32

    def _narrowed(self, x: Tensor) -> Tensor:
        if self.reads == torch.bfloat16:
            # Pairs are read as a whole.
            return torch.nn.functional.pad(x.to(torch.bfloat16), (0, self.inputs % 2))
        if self.reads == torch.float32:
            return x
        x, width = x.contiguous(), quantized_bytes(self.inputs)
        rows = x.shape[:-1]
        out = torch.empty(*rows, width, dtype=torch.int8)
        run = function("native_packed_quantize", None, POINTER, SIZE, SIZE, POINTER, SIZE)
        run(x.data_ptr(), rows.numel(), self.inputs, out.data_ptr(), width)
        return out

    @property
    def structure(self) -> Any:
        """Return the structure for the kernel; it is valid as long as this object."""
        if self._structure is None:
            pointers = map(address, (self.data, self.scales, self.bias))
            sizes = (len(self.data) * WIDTH, self.inputs, _NUMBERS[self.data.dtype])
            self._structure = _Product(*pointers, *sizes, torch.get_num_threads(), level())
        return self._structure


def quantized_bytes(inputs: int) -> int:
    """Return the bytes of a row of `x` in 8 bits: blocks of 64 numbers, each block with a scale and a sum."""
    blocks = -(-inputs // 64)
    return blocks * (64 + 8)


@functools.cache
def level() -> int:
    """Return the instruction set of the products on this processor."""
    return int(load().functions.native_packed_level())


def _padded(part: Tensor | None, width: int) -> Tensor | None:
    return None if part is None else torch.nn.functional.pad(part, (0, width - len(part)))


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weight` in 8 bits, and the scale of each output: the largest number of a row becomes 127."""
    scales = weight.abs().amax(1).clamp_min(1e-30) / 127
    return (weight / scales.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), scales
