"""The parts of parameters and moments that a rank holds with DeepSpeed's ZeRO.

Stages 1 and 2 concatenate a group of parameters into a row and give each rank an equal part of the row. Stage 3 gives
each rank an equal part of each parameter and concatenates these parts into rows. A `Share` describes both cases: it
says which part of a parameter is where in which row. Parameters are assembled one by one, so that a device never holds
more than one complete parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.engine.optimizer import MOMENTS
from trainer.parallel.group import Group


@dataclass(frozen=True)
class Share:
    """The numbers [start, end) of a flattened parameter, stored in a row from index `at` on."""

    row: int
    at: int
    start: int
    end: int


class Shares:
    """Where each rank of a data parallel group stores its part of each parameter."""

    def __init__(self, zero: Any, stage: int, parameters: Mapping[str, nn.Parameter], data: Group) -> None:
        """`zero`: DeepSpeed's optimizer, which does not know the names of the parameters."""
        self.data = data
        names = {id(parameter): name for name, parameter in parameters.items()}
        if stage == 0:
            groups: Any = [[parameter] for parameter in parameters.values()]
            self.rows: Sequence[Tensor] = list(parameters.values())
        elif stage < 3:
            groups, self.rows = zero.round_robin_bit16_groups, zero.single_partition_of_fp32_groups
        else:
            groups, self.rows = zero.fp16_groups, zero.fp32_partitioned_groups_flat
        self.shapes: dict[str, torch.Size] = {}
        self.of: dict[str, list[Share]] = {}
        """Every rank's share of each parameter; a single share if every rank has the whole parameter."""
        for row, group in enumerate(groups):
            begun = 0
            for parameter in group:
                name = names[id(parameter)]
                shape = self.shapes[name] = parameter.ds_shape if stage == 3 else parameter.shape
                self.of[name] = [
                    _share(row, shape.numel(), begun, rank, parameter, self.rows[row], stage)
                    for rank in range(data.world if stage else 1)
                ]
                begun += parameter.partition_numel() if stage == 3 else shape.numel()

    def own(self, name: str, rows: Sequence[Tensor]) -> tuple[int, Tensor]:
        """Return this rank's share of a parameter: where it starts in the flattened parameter, and its numbers."""
        share = self.of[name][min(self.data.rank, len(self.of[name]) - 1)]
        flat = rows[share.row].detach().view(-1)
        return share.start, flat[share.at : share.at + share.end - share.start]


def _share(
    row: int, numbers: int, begun: int, rank: int, parameter: Any, of_row: Tensor, stage: int
) -> Share:
    """Return a rank's share of a parameter with `numbers` numbers that begins at index `begun` of its row."""
    if stage == 0:
        return Share(row, 0, 0, numbers)
    # Each parameter is divided separately; the last parts may be short or empty.
    if stage == 3:
        length = parameter.partition_numel()
        return Share(row, begun, min(rank * length, numbers), min((rank + 1) * length, numbers))
    first = rank * of_row.numel()
    start = min(max(first - begun, 0), numbers)
    end = max(start, min(first + of_row.numel() - begun, numbers))
    return Share(row, begun + start - first, start, end)


class Moments:
    """The optimizer's moments, stored in rows like the weights."""

    def __init__(self, adamw: torch.optim.Optimizer, rows: Sequence[Tensor]) -> None:
        self.adamw, self.rows = adamw, rows

    @property
    def taken(self) -> int:
        """Return how many updates were made."""
        own = self.adamw.state.get(self.rows[0], {})
        return int(own["step"].item()) if own else 0

    def of(self, moment: str) -> list[Tensor]:
        """Return a moment as one tensor per row; all zeros before the first update."""
        states = [self.adamw.state.get(row, {}) for row in self.rows]
        return [
            own[moment] if own else torch.zeros_like(row) for own, row in zip(states, self.rows, strict=True)
        ]

    def begin(self, taken: int) -> None:
        """Set all moments to zero, so that they can be loaded, and the number of updates to `taken`."""
        for row in self.rows:
            step = torch.tensor(float(taken), dtype=torch.float32, device=row.device)
            zeros = {moment: torch.zeros_like(row, requires_grad=False) for moment in MOMENTS}
            self.adamw.state[row] = {"step": step, **zeros}
