"""What a rank holds under DeepSpeed's ZeRO: whole parameters and moments, or its share of them in rows of its own.

Stages 1 and 2 lay a group of parameters in a row and give every rank an equal part of it; stage 3 gives every rank an
equal part of each parameter, and lays these in rows. Both are told by where a share of a parameter lies in which row,
so that one parameter after another can be put together, and a device never has more than one of them whole.
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
    """The numbers [start, end) of a flattened parameter, which lie from `at` on in a row."""

    row: int
    at: int
    start: int
    end: int


class Shares:
    """Where each rank of a data parallel group has which part of which parameter."""

    def __init__(self, zero: Any, stage: int, parameters: Mapping[str, nn.Parameter], data: Group) -> None:
        """`zero`: DeepSpeed's optimizer, which knows no names."""
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
        """Of each parameter, every rank's share; one alone where every rank has the whole."""
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
        """Return this rank's share of a parameter: where it starts in the flattened whole, and its numbers."""
        share = self.of[name][min(self.data.rank, len(self.of[name]) - 1)]
        flat = rows[share.row].detach().view(-1)
        return share.start, flat[share.at : share.at + share.end - share.start]

    def collect(self, name: str, rows: Sequence[Tensor]) -> Tensor | None:
        """A parameter's numbers out of all ranks' rows, whole in the first one's host memory; None elsewhere."""
        data, device = self.data, self.data.device.name
        whole = torch.empty(self.shapes[name].numel()) if data.rank == 0 else None
        for owner, share in enumerate(self.of[name]):
            if share.start == share.end or data.rank not in (0, owner):
                continue
            if data.rank == owner:
                part = (
                    rows[share.row]
                    .detach()
                    .view(-1)[share.at : share.at + share.end - share.start]
                    .to(device)
                )
            else:
                part = torch.empty(share.end - share.start, device=device)
            data.bring_to_zero(part, owner)
            if whole is not None:
                whole[share.start : share.end] = part
        return None if whole is None else whole.view(self.shapes[name])

    @torch.no_grad()
    def put(self, name: str, whole: Tensor, rows: Sequence[Tensor]) -> None:
        """This rank's share of a parameter's numbers into its row."""
        share = self.of[name][min(self.data.rank, len(self.of[name]) - 1)]
        part = whole.flatten()[share.start : share.end]
        rows[share.row].view(-1)[share.at : share.at + share.end - share.start] = part.to(
            rows[share.row].device
        )


def _share(
    row: int, numbers: int, begun: int, rank: int, parameter: Any, of_row: Tensor, stage: int
) -> Share:
    """A rank's part of a parameter of so many numbers; `begun`: what is before it in the row."""
    if stage == 0:
        return Share(row, 0, 0, numbers)
    # Each is cut by itself; the last parts may be short or empty.
    if stage == 3:
        length = parameter.partition_numel()
        return Share(row, begun, min(rank * length, numbers), min((rank + 1) * length, numbers))
    first = rank * of_row.numel()
    start = min(max(first - begun, 0), numbers)
    end = max(start, min(first + of_row.numel() - begun, numbers))
    return Share(row, begun + start - first, start, end)


class Moments:
    """The optimizer's averages of rows."""

    def __init__(self, adamw: torch.optim.Optimizer, rows: Sequence[Tensor]) -> None:
        self.adamw, self.rows = adamw, rows

    @property
    def taken(self) -> int:
        """Optimizer steps."""
        own = self.adamw.state.get(self.rows[0], {})
        return int(own["step"].item()) if own else 0

    def of(self, moment: str) -> list[Tensor]:
        """One of the averages, a tensor a row; zeros before the first step."""
        states = [self.adamw.state.get(row, {}) for row in self.rows]
        return [
            own[moment] if own else torch.zeros_like(row) for own, row in zip(states, self.rows, strict=True)
        ]

    def begin(self, taken: int) -> None:
        """Averages to be filled, after so many steps."""
        for row in self.rows:
            step = torch.tensor(float(taken), dtype=torch.float32, device=row.device)
            zeros = {moment: torch.zeros_like(row, requires_grad=False) for moment in MOMENTS}
            self.adamw.state[row] = {"step": step, **zeros}
