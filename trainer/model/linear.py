"""Matrices divided among the tensor parallel ranks: the first of a pair by its outputs, the second by its inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.cuts import Cut
from trainer.parallel.tensor import Parallel, column_linear


class ColumnLinear(nn.Module):
    """A matrix divided by outputs (columns): each rank has its part of every section of the result."""

    def __init__(self, inputs: int, sections: tuple[int, ...], parallel: Parallel, bias: bool = True) -> None:
        super().__init__()
        own = sum(sections) // parallel.size
        self.weight = nn.Parameter(torch.zeros(own, inputs))
        self.bias = nn.Parameter(torch.zeros(own)) if bias else None
        self.cuts = {"weight": Cut(0, sections), "bias": Cut(0, sections)}
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.parallel)


class RowLinear(nn.Module):
    """A matrix divided by inputs (rows): the ranks' results are summed, and a bias is added once."""

    def __init__(self, inputs: int, outputs: int, parallel: Parallel, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs // parallel.size))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.cuts = {"weight": Cut(1), "bias": Cut(partial=True)}
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return F.linear(x, self.weight, self.bias)
        whole = self.parallel.leave(F.linear(x, self.weight))
        return whole if self.bias is None else whole + self.bias
