"""Products with weights packed for generation, in fp32, bf16 or 8 bits; a row's result is the same in every batch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from native.compiled.library import load, why_not

__all__ = ["KINDS", "Packed", "why_not"]

WIDTH = 16
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
"""Names of the types that weights are stored in. int8 has a scale for each output."""
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class _Product(ctypes.Structure):
    """The layout of `struct Product` in packed.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "bias")),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("kind", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("level", ctypes.c_int),
    )


@dataclass
class Packed:
    """A matrix of (outputs, inputs), in panels of 16 outputs where the compiled library is present."""

    outputs: int
    inputs: int
    data: Tensor
    scales: Tensor | None
    bias: Tensor | None
    native: bool
    _call: Any = field(default=None, repr=False)
    _function: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, kind: str, native: bool = True) -> Packed:
        """Pack an fp32 weight; `native`: for the compiled kernel, which must be present."""
        outputs, inputs = weight.shape
        data, scales = quantized(weight.float()) if kind == "int8" else (weight.to(KINDS[kind]), None)
        bias = None if bias is None else bias.float().clone()
        if native:
            padded = -(-outputs // WIDTH) * WIDTH
            data = torch.nn.functional.pad(data, (0, 0, 0, padded - outputs))
            data = data.view(-1, WIDTH, inputs)[:, _order(kind)].transpose(1, 2).contiguous()
            scales, bias = (_padded(part, padded) for part in (scales, bias))
        else:
            data = data.clone()
        return cls(outputs, inputs, data, scales, bias, native)

    @property
    def bytes(self) -> int:
        parts = (self.data, self.scales, self.bias)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` (rows, inputs) in fp32 times the matrix, (rows, outputs)."""
        if not self.native:
            return self._plain(x)
        if self._call is None or self._call.threads != torch.get_num_threads():
            self._prepare()
        x = x.contiguous()
        rows, width = x.shape[0], self._call.n
        out = torch.empty(rows, width)
        self._function(self._call, x.data_ptr(), rows, self.inputs, out.data_ptr(), width)
        return out if width == self.outputs else out[:, : self.outputs]

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the matrix in fp32: the embedding of each id."""
        if self.native:
            inside = ids % WIDTH
            if self.data.dtype == torch.bfloat16:
                inside = inside % 8 * 2 + inside // 8
            found = self.data[ids // WIDTH, :, inside].float()
        else:
            found = self.data[ids].float()
        return found if self.scales is None else found * self.scales[ids].unsqueeze(-1)

    def _plain(self, x: Tensor) -> Tensor:
        out = x @ self.data.float().T
        out = out if self.scales is None else out * self.scales
        return out if self.bias is None else out + self.bias

    def _prepare(self) -> None:
        library = load()
        function = library.functions.native_packed_product
        word = ctypes.c_int64
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, word, word, ctypes.c_void_p, word)
        function.restype = None
        pointers = [None if part is None else part.data_ptr() for part in (self.data, self.scales, self.bias)]
        call = _Product(
            *pointers,
            len(self.data) * WIDTH,
            self.inputs,
            _NUMBERS[self.data.dtype],
            torch.get_num_threads(),
            library.level,
        )
        self._call, self._function = call, function
        self._function = _bound(function, ctypes.addressof(call))


def _order(kind: str) -> list[int]:
    """Return the order of a panel's outputs: bf16 has 0 and 8, 1 and 9, ... side by side for the kernel."""
    if kind != "bf16":
        return list(range(WIDTH))
    return [number // 2 + number % 2 * 8 for number in range(WIDTH)]


def _bound(function: Any, address: int) -> Any:
    return lambda _, *rest: function(address, *rest)


def _padded(part: Tensor | None, width: int) -> Tensor | None:
    return None if part is None else torch.nn.functional.pad(part, (0, width - len(part)))


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weight` in 8 bits, and the scale of each output: the largest number of a row becomes 127."""
    scales = weight.abs().amax(1).clamp_min(1e-30) / 127
    return (weight / scales.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), scales
