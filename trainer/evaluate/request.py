"""The requests of a task to the model, and the model's scores."""

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
    """The result of a request."""

    log_likelihood: float
    """The sum of log probabilities over the target's tokens, in nats."""
    greedy: bool
    """Whether every token of the target is the most likely one."""


@dataclass(frozen=True)
class Example:
    """One document of a task as a list of requests."""

    requests: tuple[Request, ...]
    truncated: bool = False
    """Whether the context was cut on the left to fit the model's window."""
