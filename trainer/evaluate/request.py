"""What a task asks of the model, and what the model answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """Score `target` after `context`, both as token ids.

    For a GLM, `context` is the source with its mask at index `mask`, and `target` fills in the mask.
    """

    context: tuple[int, ...]
    target: tuple[int, ...]
    mask: int | None = None

    @property
    def length(self) -> int:
        """Return the number of tokens that the model reads."""
        return len(self.context) + len(self.target) - (self.mask is None)


@dataclass(frozen=True)
class Score:
    """The model's answer to a request."""

    log_likelihood: float
    """Sum over the target's tokens, in nats."""
    greedy: bool
    """Whether each token of the target is the most likely one."""


@dataclass(frozen=True)
class Example:
    """One document of a task, as requests."""

    requests: tuple[Request, ...]
    truncated: bool = False
    """Whether the context lost tokens on the left because the model's window is shorter."""
