"""What of a sample counts and what sees what, by its end-of-document tokens: as Megatron-core makes them.

All take the inputs of a batch, (batch, sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A target that the loss passes over.
UNCOUNTED = -100


@dataclass(frozen=True)
class Ends:
    """What an end of document (token `eod`) does to the rest of its sample."""

    eod: int
    loss: bool = False
    """What follows one is not to be predicted: it is another document's first token."""
    positions: bool = False
    """Positions begin anew after one."""
    attention: bool = False
    """Nothing sees what lies before one."""


def future(length: int, device: torch.device) -> Tensor:
    """Return (length, length), True where a column's token comes after a row's."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def counted(inputs: Tensor, targets: Tensor, eod: int) -> Tensor:
    """The targets, without those whose input is an end of document."""
    return targets.masked_fill(inputs == eod, UNCOUNTED)


def loss_over_counted(loss: Callable[[Tensor], Tensor], targets: Tensor) -> Tensor:
    """Return the mean loss over the targets that count; 0, with zero gradients, where none counts.

    A mean over no target would be NaN. The first target then counts, and its loss is multiplied by 0.
    """
    none = (targets == UNCOUNTED).all()
    first = torch.zeros_like(targets, dtype=torch.bool)
    first.view(-1)[0] = True
    return loss(targets.masked_fill(none & first, 0)) * ~none


def positions(inputs: Tensor, eod: int) -> Tensor:
    """Positions that begin at 0 anew after each end of document."""
    at = torch.arange(inputs.shape[-1], device=inputs.device).expand(inputs.shape)
    begin = torch.zeros_like(at)
    begin[..., 1:] = torch.where(inputs[..., :-1] == eod, at[..., 1:], 0)
    return at - begin.cummax(-1).values


def documents(inputs: Tensor, eod: int) -> Tensor:
    """The number of the document, within the sample, that each token belongs to."""
    number = torch.zeros_like(inputs)
    number[..., 1:] = (inputs[..., :-1] == eod).cumsum(-1)
    return number


def hidden(inputs: Tensor, eod: int) -> Tensor:
    """(batch, 1, sequence, sequence), True where a row's token must not see a column's: later, or elsewhere."""
    number = documents(inputs, eod).unsqueeze(-2)
    later = future(inputs.shape[-1], inputs.device)
    return (number.transpose(-1, -2) != number).unsqueeze(-3) | later
