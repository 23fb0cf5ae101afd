"""A rank's place in a pipeline, its exchanges outside of the passes, and the order of its passes.

The order is one forward, one backward (1F1B), plain or interleaved.

The orders are the same as torch's (tests compare them). Torch's schedules are not used, because they take 1.8 s to load
on every rank, keep a receive buffer for each micro-batch of a step, and need micro-batches of equal shape, while GLM's
rows vary in length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.device import Device

# The first stage uses it for embeddings; the last stage has a copy for the output.
TIED = "tokens.weight"


@dataclass(frozen=True)
class Pipeline:
    """The stages that together have all layers; by default one rank has the whole model."""

    stage: int = 0
    ranks: tuple[int, ...] = (0,)
    """The ranks of all stages."""
    interleave: int = 1
    """How many pieces of the model each stage has."""
    tied: bool = True
    """Whether the first and the last stage share the token table."""
    group: Any = None
    """Torch's process group of these ranks."""
    ends: Any = None
    """The group of the first and the last stage; None on other stages."""
    ways: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    """Groups for the messages of backward passes, and of forward passes; the sender's stage decides which one is used.

    Each group carries one kind of message in one direction between two ranks. NCCL runs the operations between two
    ranks of a group in order, so two ranks that both send before they receive would wait for each other forever.
    """

    @property
    def stages(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def way(self, forward: bool, sender: int) -> Any:
        return self.ways[forward][sender % len(self.ways[forward])]

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over the stages in place and return it."""
        if self.stages > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def total(self, value: float, device: Device) -> float:
        """Return the sum of a number over all stages."""
        if self.stages == 1:
            return value
        kind = torch.float64 if device.kind == "cpu" else torch.float32
        return float(self.sum(torch.tensor(value, dtype=kind, device=device.name)).item())

    def sum_ends(self, x: Tensor) -> None:
        """Sum `x` in place over the first and the last stage, if they share the token table."""
        if self.tied and self.stages > 1 and (self.is_first or self.is_last):
            dist.all_reduce(x, group=self.ends)

    def counts(self, name: str) -> bool:
        """Return whether this stage's copy of a parameter counts in a norm over all stages."""
        return name != TIED or self.is_first


UNDIVIDED = Pipeline()


class Action(NamedTuple):
    """A forward or backward pass of one micro-batch through one of the stage's pieces."""

    forward: bool
    piece: int
    """The index of the piece within the stage."""
    micro: int


def one_forward_one_backward(stage: int, stages: int, pieces: int, micros: int) -> list[Action]:
    """Return the actions of a stage in one step (1F1B); with several pieces, interleaved in groups of `stages`."""
    forwards = forward_only(stages, pieces, micros)
    backwards = [Action(False, pieces - 1 - action.piece, action.micro) for action in forwards]
    ahead = stages - 1 - stage
    warm = min(len(forwards), ahead if pieces == 1 else 2 * ahead + (pieces - 1) * stages)
    actions = forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - warm :]


def forward_only(stages: int, pieces: int, micros: int) -> list[Action]:
    """Return the actions of every stage in an evaluation."""
    if pieces == 1:
        return [Action(True, 0, micro) for micro in range(micros)]
    return [
        Action(True, piece, micro)
        for start in range(0, micros, stages)
        for piece in range(pieces)
        for micro in range(start, min(start + stages, micros))
    ]


def source_of(action: Action, stage: int, stages: int, pieces: int) -> int | None:
    """Return the stage whose result an action needs, or None if it needs none."""
    if action.forward:
        return None if stage == 0 and action.piece == 0 else (stage - 1) % stages
    return None if stage == stages - 1 and action.piece == pieces - 1 else (stage + 1) % stages


def target_of(action: Action, stage: int, stages: int, pieces: int) -> int | None:
    """Return the stage that needs an action's result, or None if no stage does."""
    return source_of(action._replace(forward=not action.forward), stage, stages, pieces)
