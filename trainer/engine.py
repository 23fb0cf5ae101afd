"""What the loop asks of an engine, and torch's own: data and tensor parallel, optimizer state whole or divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.config import TrainConfig
from trainer.device import Device
from trainer.glm import GLM
from trainer.gpt import GPT
from trainer.gradients import GradientBuffer
from trainer.group import Group, Groups
from trainer.logical import cuts_of, own_of, whole_of
from trainer.optim import ShardedAdamW

Micro = Sequence[Tensor]  # what the model's `arguments` takes: (micro_batch, ...) each
Batch = Sequence[Micro]  # one rank's micro-batches
Model = GPT | GLM


Arriving = Iterable[tuple[str, Tensor]]  # names and whole tensors; all ranks must take all of them


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: `loss` is the mean over the global batch, `tokens` counts all ranks.

    `skipped`: the gradient was not finite and nothing was updated. `own_seconds`: what this rank took for its own
    part, before it waited for others; of ranks in step it alone tells the slow one.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False
    own_seconds: float = 0.0


@dataclass(frozen=True)
class TrainState:
    """All that training changes, whole, under logical names and without padding."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    optimizer_steps: int


class Engine(Protocol):
    """Moves a model forward. All methods are for all ranks together."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of each parameter, by its logical name, the shape in a checkpoint."""

    def step(self, batch: Batch, rate: float, seed: int) -> StepResult:
        """One optimizer step over this rank's part of a global batch; `seed` fixes dropout."""

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over all ranks' parts, without dropout; NaN where there are none."""

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""

    def state(self) -> TrainState:
        """Whole on rank 0; elsewhere parts of it may be stale."""

    def load(self, model: Arriving, optimizer: Arriving, optimizer_steps: int) -> None:
        """Take a whole state, one tensor after another: no device need hold more of it than its own part."""


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


class TorchEngine:
    """Data and tensor parallel with torch alone; runs wherever torch has collectives."""

    def __init__(self, model: Model, config: TrainConfig, groups: Groups, device: Device) -> None:
        self.model, self.config, self.groups, self.device = model, config, groups, device
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self.cuts, self.parallel = cuts_of(model), model.parallel
        self.shapes: Mapping[str, tuple[int, ...]] = shapes_of(model)
        groups.data.broadcast(parameter.data for parameter in self.parameters.values())
        self.gradients = GradientBuffer(self.parameters, self.cuts, groups.data, self.parallel)
        self.optimizer = ShardedAdamW(self.parameters, config.optimizer, groups.data, config.zero)

    def step(self, batch: Batch, rate: float, seed: int) -> StepResult:
        torch.manual_seed(seed)
        self.gradients.clear()
        data = self.groups.data
        share = 1.0 / (len(batch) * data.world)
        total, own = torch.zeros((), device=self.device.name), self.device.stopwatch()
        for i, micro in enumerate(batch):
            if i == len(batch) - 1:
                self.gradients.sum_on_next_backward()
            loss = model_loss(self.model, self.model, micro, self.device, self.config.precision) * share
            loss.backward()
            total += loss.detach()
        own.stop()
        self.gradients.wait()
        norm = self.gradients.clip(self.config.optimizer.clip)
        finite = norm < float("inf")  # False for NaN too
        if finite:
            self.optimizer.step(rate)
        tokens = tokens_of(batch, data.world, self.config.model.sequence)
        mean = data.total(float(total.item()))
        return StepResult(mean, norm, tokens, skipped=not finite, own_seconds=own.seconds())

    def evaluate(self, batches: Iterable[Batch]) -> float:
        return mean_loss(self.model, batches, self.device, self.config.precision, self.groups.data)

    def any(self, flag: bool) -> bool:
        return self.groups.everyone.any(flag)

    def state(self) -> TrainState:
        moments, taken = self.optimizer.state()
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        if self.groups.data.rank == 0:  # elsewhere the moments are not there
            weights = whole_of(weights, self.cuts, self.parallel)
            moments = whole_of(moments, self.cuts, self.parallel)
        return TrainState(weights, moments, taken)

    def load(self, model: Arriving, optimizer: Arriving, optimizer_steps: int) -> None:
        load_parameters(self.model, model)
        for key, whole in optimizer:
            own = self.optimizer.moments.get(key)
            if own is not None:  # else another rank updates it
                own.copy_(own_of(key, whole, own, self.cuts, self.parallel))
        self.optimizer.taken = optimizer_steps


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Of each parameter its shape in a checkpoint."""
    cuts = cuts_of(model)
    return {
        name: cuts[name].whole_shape(parameter.shape, model.parallel.size)
        for name, parameter in model.named_parameters()
    }


@torch.no_grad()
def load_parameters(model: Model, arriving: Arriving) -> None:
    """Take whole parameters; this rank keeps its parts."""
    cuts, parameters = cuts_of(model), dict(model.named_parameters())
    for name, whole in arriving:
        parameters[name].copy_(own_of(name, whole, parameters[name], cuts, model.parallel))
