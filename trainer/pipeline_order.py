"""In which order a pipeline's stage computes: one forward, one backward (1F1B), plain or interleaved. Arithmetic alone.

The orders are torch's own (tests compare them). Its schedules themselves are not used: they take 1.8 s of every rank's
start to load, keep a receiving buffer for every micro-batch of a step, and want all micro-batches in one shape, which
GLM's rows have not.
"""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    """One pass of one micro-batch through one of the stage's pieces."""

    forward: bool
    piece: int
    """The number among the pieces that the stage holds."""
    micro: int


def one_forward_one_backward(stage: int, stages: int, pieces: int, micros: int) -> list[Action]:
    """A stage's actions of a step. With several pieces, groups of as many micro-batches as stages go around."""
    forwards = forward_only(stages, pieces, micros)
    backwards = [Action(False, pieces - 1 - one.piece, one.micro) for one in forwards]
    ahead = stages - 1 - stage
    warm = min(len(forwards), ahead if pieces == 1 else 2 * ahead + (pieces - 1) * stages)
    actions = forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - warm :]


def forward_only(stages: int, pieces: int, micros: int) -> list[Action]:
    """Every stage's order of an evaluation."""
    if pieces == 1:
        return [Action(True, 0, micro) for micro in range(micros)]
    return [
        Action(True, piece, micro)
        for start in range(0, micros, stages)
        for piece in range(pieces)
        for micro in range(start, min(start + stages, micros))
    ]


def source_of(action: Action, stage: int, stages: int, pieces: int) -> int | None:
    """The stage whose result an action takes; None where it takes none."""
    if action.forward:
        return None if stage == 0 and action.piece == 0 else (stage - 1) % stages
    return None if stage == stages - 1 and action.piece == pieces - 1 else (stage + 1) % stages


def target_of(action: Action, stage: int, stages: int, pieces: int) -> int | None:
    """The stage that an action's result goes to; None where it goes nowhere."""
    return source_of(action._replace(forward=not action.forward), stage, stages, pieces)
