"""The pattern by which a job finds the steps of its program in the output."""

from __future__ import annotations

import re

# Names of groups that a pattern may have.
NAMES = (
    "step", "steps", "loss", "eval_loss", "lr", "grad_norm", "tokens", "tokens_per_second", "samples_per_second",
    "step_seconds", "step_ms",
)  # fmt: skip


def compiled(pattern: str) -> re.Pattern[str]:
    """Return the pattern; raise ValueError with the reason if it cannot be used."""
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    names = set(found.groupindex)
    if "step" not in names:
        raise ValueError("it has no group (?P<step>...)")
    if unknown := sorted(names - set(NAMES)):
        raise ValueError(f"unknown group {unknown[0]!r}; known: {', '.join(NAMES)}")
    return found
