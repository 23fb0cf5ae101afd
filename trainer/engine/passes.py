"""Run a step's micro-batches forward and backward, one by one, on a rank with all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.device import CopiedAhead, Device, Stopwatch
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.parallel.group import Group

# The tensors that the model's `arguments` takes, each of shape (micro_batch, ...).
Micro = Sequence[Tensor]
# The micro-batches of one rank.
Batch = Sequence[Micro]
Model = GPT | GLM


class MicroBatchRunner(Protocol):
    """Runs the micro-batches of a step through the layers, independent of how weights are divided among ranks."""

    def step(
        self, batch: Batch, weights: Sequence[float], own: Stopwatch, before_last: Callable[..., None]
    ) -> Tensor:
        """Compute the gradients of the sum of each micro-batch's loss times its weight; return this rank's sum.

        `before_last` is called before a backward pass that completes gradients, with the names of their parameters if
        these are not all. `own` stops when this rank's own work is done.
        """

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss over the counted tokens of all ranks, without dropout; NaN without batches."""


class SingleStageRunner:
    """Runs each micro-batch forward and backward, one by one, on a rank with all layers."""

    def __init__(self, model: Model, device: Device, precision: str, data: Group) -> None:
        self.model, self.device, self.precision, self.data = model, device, precision, data

    def step(
        self, batch: Batch, weights: Sequence[float], own: Stopwatch, before_last: Callable[..., None]
    ) -> Tensor:
        total = torch.zeros((), device=self.device.name)
        for i, micro in enumerate(batch):
            if i == len(batch) - 1:
                before_last()
            total += self.run(micro, weights[i])
        own.stop()
        return total

    def run(self, micro: Micro, weight: float) -> Tensor:
        """Compute the gradients of the micro-batch's loss times `weight`; return this product."""
        self.model.check_ids(micro)
        return self.both_passes(moved(micro, self.device), weight)

    def both_passes(self, inputs: Micro, weight: float | Tensor) -> Tensor:
        """Run the forward and the backward pass of inputs on the device; return the loss times `weight`."""
        self.model.aux_weight = weight
        with self.device.autocast(self.precision):
            loss = self.model(*self.model.arguments(inputs)) * weight
        loss.backward()
        result: Tensor = loss.detach()
        return result

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        self.model.eval()
        self.model.aux_weight = 0.0
        losses, counts = [], []
        for micro in (micro for batch in batches for micro in batch):
            losses.append(model_loss(self.model, self.model, micro, self.device, self.precision))
            counts.append(self.model.counted(micro))
        self.model.train()
        return mean_loss(losses, counts, self.model.counts_vary, self.data)


def model_loss(
    run: Callable[..., Tensor], model: Model, micro: Micro, device: Device, precision: str
) -> Tensor:
    """Return the mean loss of one micro-batch; `run` is the model, or an engine's wrapper of it."""
    model.check_ids(micro)
    inputs = moved(micro, device)
    with device.autocast(precision):
        return run(*model.arguments(inputs))


def moved(micro: Micro, device: Device) -> Micro:
    """Return the micro-batch on the device; the host does not wait for the copy."""
    if isinstance(micro, CopiedAhead):
        return micro.arrive()
    return [device.pinned(part).to(device.name, non_blocking=True) for part in micro]


def tokens_of(batch: Batch, ranks: int, sequence: int, joined: bool = False) -> int:
    """Return how many tokens a step's samples have on all `ranks` data parallel ranks, without GLM's special tokens.

    `joined`: samples vary in length, and each other rank is assumed to have as many tokens as this one.
    """
    if joined:
        return sum(micro[0].numel() for micro in batch) * ranks
    if len(batch[0]) == 1:
        # A GPT's samples may be shorter. Each has one more token, which is only a target.
        return sum(micro[0].numel() - len(micro[0]) for micro in batch) * ranks
    return sum(len(micro[0]) for micro in batch) * ranks * sequence


def loss_weights(model: Model, micros: Batch, data: Group) -> list[float]:
    """Return each micro-batch's fraction of the tokens that the loss counts, over all data parallel ranks.

    The sum of mean losses times these fractions is the mean over all counted tokens, for any division into
    micro-batches. The fractions are 0 if no token counts.
    """
    counts = [model.counted(micro) for micro in micros]
    total = data.total(float(sum(counts))) if model.counts_vary else sum(counts) * data.world
    return [count / total if count else 0.0 for count in counts]


def mean_loss(losses: Sequence[Tensor], counts: Sequence[int], counts_vary: bool, data: Group) -> float:
    """Return the mean loss over the counted tokens of all data parallel ranks, from each micro-batch's mean and count.

    `losses` may be empty if another stage computes them. The result is NaN without micro-batches.
    """
    if not counts:
        return float("nan")
    if not losses:
        losses = [torch.zeros(())] * len(counts)
    values = torch.stack(list(losses)).double().cpu()
    if not counts_vary:
        return data.total(float(values.mean().item())) / data.world
    tokens = torch.tensor(counts, dtype=torch.float64)
    return data.total(float((values * tokens).sum().item())) / max(
        1.0, data.total(float(tokens.sum().item()))
    )
