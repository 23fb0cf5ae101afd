"""A rank's place in a pipeline, its exchanges outside of the passes, and the order of its passes.

The order is one forward, one backward (1F1B), plain or interleaved.

The orders are torch's own (tests compare them). Its schedules themselves are not used: they take 1.8 s of every rank's
start to load, keep a receiving buffer for every micro-batch of a step, and want all micro-batches in one shape, which
GLM's rows have not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.device import Device

# The first stage embeds with it; the last one has a copy for the output.
TIED = "tokens.weight"


@dataclass(frozen=True)
class Pipeline:
    """The stages that together hold a model; the default is a rank that holds it alone."""

    stage: int = 0
    ranks: tuple[int, ...] = (0,)
    """The rank of every stage."""
    interleave: int = 1
    """Pieces of the model per stage."""
    tied: bool = True
    """Whether the first and the last stage share the token table."""
    group: Any = None
    """torch's process group of these ranks."""
    ends: Any = None
    """Group of the first and the last stage; None on other stages."""
    ways: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    """Groups for what the passes send backward and forward, by the sender's stage in turn.

    Each carries one kind of message in one direction between two ranks. NCCL queues all between two ranks of a group,
    so that two of them that send first and receive then would wait for each other.
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
        """Sum over the stages in place and return the result."""
        if self.stages > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def total(self, value: float, device: Device) -> float:
        """Return the sum of a number over the stages."""
        if self.stages == 1:
            return value
        kind = torch.float64 if device.kind == "cpu" else torch.float32
        return float(self.sum(torch.tensor(value, dtype=kind, device=device.name)).item())

    def sum_ends(self, x: Tensor) -> None:
        """Sum in place over the first and the last stage, if they share the token table."""
        if self.tied and self.stages > 1 and (self.is_first or self.is_last):
            dist.all_reduce(x, group=self.ends)

    def counts(self, name: str) -> bool:
        """Return whether a norm counts this stage's copy of a parameter."""
        return name != TIED or self.is_first


UNDIVIDED = Pipeline()


class Action(NamedTuple):
    """One pass of one micro-batch through one of the stage's pieces."""

    forward: bool
    piece: int
    """Index among the stage's pieces."""
    micro: int


def one_forward_one_backward(stage: int, stages: int, pieces: int, micros: int) -> list[Action]:
    """Return a stage's actions of a step (1F1B); several pieces are interleaved in groups of `stages`."""
    forwards = forward_only(stages, pieces, micros)
    backwards = [Action(False, pieces - 1 - action.piece, action.micro) for action in forwards]
    ahead = stages - 1 - stage
    warm = min(len(forwards), ahead if pieces == 1 else 2 * ahead + (pieces - 1) * stages)
    actions = forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - warm :]


def forward_only(stages: int, pieces: int, micros: int) -> list[Action]:
    """Return every stage's actions of an evaluation."""
    if pieces == 1:
        return [Action(True, 0, micro) for micro in range(micros)]
    return [
        Action(True, piece, micro)
        for start in range(0, micros, stages)
        for piece in range(pieces)
        for micro in range(start, min(start + stages, micros))
    ]


def source_of(action: Action, stage: int, stages: int, pieces: int) -> int | None:
    """Return the stage whose result an action needs, or None."""
    if action.forward:
        return None if stage == 0 and action.piece == 0 else (stage - 1) % stages
    return None if stage == stages - 1 and action.piece == pieces - 1 else (stage + 1) % stages


def target_of(action: Action, stage: int, stages: int, pieces: int) -> int | None:
    """Return the stage that needs an action's result, or None."""
    return source_of(action._replace(forward=not action.forward), stage, stages, pieces)
