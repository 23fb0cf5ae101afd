"""A matrix on a device in fp32, bf16 or fp16, multiplied by torch; the counterpart of `Packed` for devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["TYPES", "Matrix"]

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The names of the types that weights can have on a device."""


@dataclass(frozen=True)
class Matrix:
    """A matrix (outputs, inputs) with an optional bias of the same type."""

    data: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: str) -> Matrix:
        """Return the matrix on a device. It is converted before the copy, so that fewer bytes are copied."""
        return cls(weight.to(dtype).to(device), None if bias is None else bias.to(dtype).to(device))

    @property
    def outputs(self) -> int:
        return self.data.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` (..., inputs) times the matrix, (..., outputs), in the matrix's type."""
        return F.linear(x.to(self.data.dtype), self.data, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the matrix in fp32: the embedding of each id."""
        return F.embedding(ids, self.data).float()
