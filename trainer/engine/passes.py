"""Forward and backward over a step's micro-batches, one after another on a rank that has every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.device import Device, Stopwatch
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.parallel.group import Group

# What the model's `arguments` takes: (micro_batch, ...) each.
Micro = Sequence[Tensor]
# One rank's micro-batches.
Batch = Sequence[Micro]
Model = GPT | GLM


class Passes(Protocol):
    """How the micro-batches of a step go through the layers; which ranks hold what is not its business."""

    def step(self, batch: Batch, scale: float, own: Stopwatch, before_last: Callable[..., None]) -> Tensor:
        """Leave the gradients of `scale` times the sum of the losses; gives that sum, as this rank knows it.

        `before_last` is called before the backward pass that finishes the gradients, with their names where that
        does not finish all; `own` is stopped when this rank's part is done.
        """

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over all ranks' parts, without dropout; NaN where there are none."""


class Plain:
    """Each micro-batch forward and backward, then the next."""

    def __init__(self, model: Model, device: Device, precision: str, data: Group) -> None:
        self.model, self.device, self.precision, self.data = model, device, precision, data

    def step(self, batch: Batch, scale: float, own: Stopwatch, before_last: Callable[..., None]) -> Tensor:
        total = torch.zeros((), device=self.device.name)
        for i, micro in enumerate(batch):
            if i == len(batch) - 1:
                before_last()
            loss = model_loss(self.model, self.model, micro, self.device, self.precision) * scale
            loss.backward()
            total += loss.detach()
        own.stop()
        return total

    def evaluate(self, batches: Iterable[Batch]) -> float:
        return mean_loss(self.model, batches, self.device, self.precision, self.data)


def model_loss(
    run: Callable[..., Tensor], model: Model, micro: Micro, device: Device, precision: str
) -> Tensor:
    """Mean loss of one micro-batch; `run` is the model itself, or what an engine wraps it in."""
    there = [part.to(device.name, non_blocking=True) for part in micro]
    with device.autocast(precision):
        return run(*model.arguments(there))


def tokens_of(batch: Batch, ranks: int, sequence: int) -> int:
    """Tokens of a step's samples over so many data parallel ranks; what GLM adds to a sample is not counted."""
    return sum(len(micro[0]) for micro in batch) * ranks * sequence


@torch.no_grad()
def mean_loss(model: Model, batches: Iterable[Batch], device: Device, precision: str, group: Group) -> float:
    """The evaluation that both engines share; `group` is data parallel."""
    model.eval()
    losses = [model_loss(model, model, micro, device, precision) for batch in batches for micro in batch]
    model.train()
    if not losses:
        return float("nan")
    return group.total(float(torch.stack(losses).double().mean().item())) / group.world
