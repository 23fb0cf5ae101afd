"""Loss masks, positions and document numbers, derived from end-of-document tokens as Megatron-core does.

All functions take the inputs of a batch, (batch, sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A target that the loss ignores.
UNCOUNTED = -100


@dataclass(frozen=True)
class Ends:
    """How an end of document (token `eod`) affects the rest of its sample."""

    eod: int
    loss: bool = False
    """Do not predict the token after an end of document: it belongs to another document."""
    positions: bool = False
    """Restart positions after an end of document."""
    attention: bool = False
    """Hide the tokens before an end of document from the tokens after it."""


def counted(inputs: Tensor, targets: Tensor, eod: int) -> Tensor:
    """Return the targets; those whose input is an end of document become IGNORED."""
    return targets.masked_fill(inputs == eod, UNCOUNTED)


def loss_over_counted(loss: Callable[[Tensor], Tensor], targets: Tensor) -> Tensor:
    """Return the mean loss over the targets that count; if none counts, 0 with zero gradients.

    A mean over no target would be NaN. In this case the first target counts, and its loss is multiplied by 0.
    """
    none = (targets == UNCOUNTED).all()
    first = torch.zeros_like(targets, dtype=torch.bool)
    first.view(-1)[0] = True
    return loss(targets.masked_fill(none & first, 0)) * ~none


def positions(inputs: Tensor, eod: int) -> Tensor:
    """Return positions that restart at 0 after each end of document."""
    at = torch.arange(inputs.shape[-1], device=inputs.device).expand(inputs.shape)
    begin = torch.zeros_like(at)
    begin[..., 1:] = torch.where(inputs[..., :-1] == eod, at[..., 1:], 0)
    return at - begin.cummax(-1).values


def documents(inputs: Tensor, eod: int) -> Tensor:
    """Return for each token the number of its document within the sample."""
    number = torch.zeros_like(inputs)
    number[..., 1:] = (inputs[..., :-1] == eod).cumsum(-1)
    return number


def places(numbers: Tensor) -> Tensor:
    """Return the position of each token within its document, given the document numbers."""
    at = torch.arange(numbers.shape[-1], device=numbers.device).expand(numbers.shape)
    begin = torch.zeros_like(at)
    begin[..., 1:] = torch.where(numbers[..., 1:] != numbers[..., :-1], at[..., 1:], 0)
    return at - begin.cummax(-1).values
