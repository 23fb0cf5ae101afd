"""The rows of weights and moments that DeepSpeed keeps in files (offload to NVMe).

A row is in memory only while it is used. DeepSpeed leaves rows of less than 1 MiB in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainer.engine.optimizer import MOMENTS


class RowsOnDisk:
    """Copies rows out of DeepSpeed's files and into them."""

    def __init__(self, zero: Any, adamw: torch.optim.Optimizer, rows: Sequence[Tensor]) -> None:
        """`zero` is DeepSpeed's optimizer of stage 3."""
        self.zero, self.adamw, self.rows = zero, adamw, rows

    def read(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Return copies of all rows and of their moments; moments are zeros before the first update."""
        weights, moments = list[Tensor](), {moment: list[Tensor]() for moment in MOMENTS}
        for number, row in enumerate(self.rows):
            with self._in_memory(number, changed=False):
                weights.append(row.detach().clone())
                own = self.adamw.state.get(row, {})
                for moment, copies in moments.items():
                    copies.append(own[moment].clone() if own else torch.zeros_like(weights[-1]))
        return weights, moments

    def write(self, weights: Sequence[Tensor], moments: Mapping[str, Sequence[Tensor]], taken: int) -> None:
        """Replace all rows and moments, and the weights that DeepSpeed computes with; `taken`: the number of updates so
        far.
        """
        for number, row in enumerate(self.rows):
            with self._in_memory(number, changed=True):
                row.data.copy_(weights[number])
                if taken:
                    own = self.adamw.state.setdefault(row, {})
                    own["step"] = torch.tensor(float(taken), dtype=torch.float32)
                    for moment, copies in moments.items():
                        if moment in own:
                            own[moment].copy_(copies[number])
                        else:
                            own[moment] = copies[number].clone()
                self.zero._reassign_or_swap_out_partitioned_parameters(number)

    @contextmanager
    def _in_memory(self, number: int, *, changed: bool) -> Iterator[None]:
        """Read a row and its moments from their files; write them again if they have changed."""
        swaps = self.zero._swappable_optimizer_subgroup(number)
        if swaps:
            self.zero._optimizer_states_and_gradient_swap_in(number)
        yield
        if swaps and changed:
            self.zero._optimizer_states_and_gradient_swap_out(number)
        elif swaps:
            self.zero._release_swap_buffers(number)
