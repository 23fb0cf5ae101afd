"""Measure what each op contributes to a training step: the trainer with all ops, and with one of them by plain torch.

One process has all ops and runs during the whole row. For each op, another process starts in which plain torch computes
this op; both take steps in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.train.field import Field, Subject, start_all, take_turns

# Rounds of one step each.
ROUNDS = 6
# Plain torch's backend of an op, where it is not the reference.
PLAIN = {"attention": "torch"}


@dataclass(frozen=True)
class Contribution:
    """The seconds of a step and the bytes of peak memory, with an op and without it."""

    op: str
    missing: str = ""
    """Why it was not measured."""
    seconds: float = 0.0
    without_seconds: float = 0.0
    ratio: float = 0.0
    """The median of the ratios of steps of the same round."""
    least: float = 0.0
    most: float = 0.0
    memory: float = 0.0
    without_memory: float = 0.0


def contributions(field: Field, ops: Sequence[str], log: Callable[[str], None]) -> list[Contribution]:
    """Return the contribution of each op."""
    whole = Subject("clusterctl", "ours", tuned=True)
    found: list[Contribution] = []
    try:
        if not start_all(field, [whole], log):
            return [Contribution(op, whole.gone) for op in ops]
        for op in ops:
            other = Subject(f"without {op}", "ours", tuned=True, native={op: PLAIN.get(op, "reference")})
            whole.steps.clear()
            try:
                take_turns([whole, *start_all(field, [other], log)], 0.0, ROUNDS)
                found.append(compared(op, whole, other))
            finally:
                other.end()
    finally:
        whole.end()
    return found


def compared(op: str, whole: Subject, other: Subject) -> Contribution:
    """Return the figures of one op from the steps of both processes."""
    if whole.gone or other.gone:
        return Contribution(op, whole.gone or other.gone)
    ratios = [slow.seconds / fast.seconds for fast, slow in zip(whole.steps, other.steps, strict=True)]
    return Contribution(
        op,
        seconds=whole.median("seconds"),
        without_seconds=other.median("seconds"),
        ratio=statistics.median(ratios),
        least=min(ratios),
        most=max(ratios),
        memory=whole.memory,
        without_memory=other.memory,
    )


def contributions_table(name: str, found: Sequence[Contribution]) -> str:
    """Return the figures as text."""
    lines = [f"{name}: a step with all ops, and with one of them computed by plain torch"]
    lines.append(
        f"  {'op':<22}{'ms':>8}{'without':>9}{'ratio':>7}{'(least-most)':>14}{'GB':>7}{'without':>9}"
    )
    for each in found:
        if each.missing:
            lines.append(f"  {each.op:<22}not measured: {each.missing}")
            continue
        times = f"{1000 * each.seconds:>8.0f}{1000 * each.without_seconds:>9.0f}{each.ratio:>7.3f}"
        memory = f"{each.memory / 1e9:>7.2f}{each.without_memory / 1e9:>9.2f}"
        lines.append(f"  {each.op:<22}{times}{f'{each.least:.2f}-{each.most:.2f}':>14}{memory}")
    return "\n".join(lines)
