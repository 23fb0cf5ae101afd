"""What a rank holds between steps: weights, gradients, moments, whole or its part of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

import native
from trainer.config import TrainConfig
from trainer.gradients import GradientBuffer, clip_factor
from trainer.group import Group
from trainer.layers import LayerNorm
from trainer.logical import cuts_of, own_of, parameter_of
from trainer.optim import ShardedAdamW
from trainer.passes import Model
from trainer.pipeline import UNDIVIDED, Pipeline

COMPUTED_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Arriving = Iterable[tuple[str, Tensor]]  # names and whole tensors; all ranks must take all of them


class Holding(Protocol):
    """Weights and what belongs to them, of one rank among its data parallel ones; all methods are for all of these."""

    def clear(self) -> None:
        """Before a step's first backward pass: no gradients."""

    def last_backward(self, names: Collection[str] = ()) -> None:
        """The next backward pass finishes the gradients, of these if not of all: they may travel while it goes on."""

    def wait(self) -> None:
        """Until every gradient is the sum over the data parallel ranks, the sequence's parts and tied copies."""

    def clip(self, limit: float, scale: float = 1.0) -> float:
        """The norm over all parts of the model; gradients above `limit` (if not 0) are scaled down to it.

        `scale`: what the loss was multiplied by; norm and update are as if it had not been.
        """

    def update(self, rate: float) -> None:
        """One optimizer step; every rank has the new weights afterwards."""

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], int]:
        """Weights, moments, steps taken; of the tensor parallel part, whole on the first data parallel rank."""

    def load(self, model: Arriving, optimizer: Arriving, taken: int) -> None:
        """Take a whole state; this rank keeps its parts."""


class Buffered:
    """ZeRO 0 and 1: every rank has all weights and gradients; the optimizer's state may be divided.

    Below fp32 the weights are kept in the type that matrices compute in, but for layer norms, and the optimizer
    has masters of them in fp32. Nothing is cast in a pass then.
    """

    def __init__(
        self, model: Model, config: TrainConfig, data: Group, pipeline: Pipeline = UNDIVIDED
    ) -> None:
        self.model, self.cuts, self.parallel = model, cuts_of(model), model.parallel
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        data.broadcast(parameter.data for parameter in self.parameters.values())
        self.gradients = GradientBuffer(self.parameters, self.cuts, data, self.parallel, pipeline)
        self.ops = native.choose(data.device.kind, config.native)
        host = moves_optimizer(config, data)
        self.optimizer = ShardedAdamW(self.parameters, config.optimizer, data, config.zero, self.ops, host)
        if config.precision != "fp32":
            self.optimizer.lower(lowered(model), COMPUTED_IN[config.precision])
        self.factor = 1.0

    def clear(self) -> None:
        self.gradients.clear()

    def last_backward(self, names: Collection[str] = ()) -> None:
        self.gradients.sum_on_next_backward(names)

    def wait(self) -> None:
        self.gradients.wait()

    def clip(self, limit: float, scale: float = 1.0) -> float:
        norm = self.gradients.norm(self.ops.square_sum) / scale
        self.factor = clip_factor(norm, limit) / scale
        return norm

    def update(self, rate: float) -> None:
        self.optimizer.step(rate, self.gradients.gradients(), self.factor)
        self.gradients.clear()

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], int]:
        moments, taken = self.optimizer.state()
        return self.optimizer.weights(), moments, taken

    def load(self, model: Arriving, optimizer: Arriving, taken: int) -> None:
        for arriving in (model, optimizer):
            for key, whole in arriving:
                like = self.parameters.get(parameter_of(key, self.cuts))
                if like is not None:  # else another stage has it
                    self.optimizer.take(key, own_of(key, whole, like, self.cuts, self.parallel))
        self.optimizer.taken = taken


def moves_optimizer(config: TrainConfig, data: Group) -> bool:
    """Whether the optimizer's state leaves the device; a CPU's memory is the node's already."""
    return config.offload and data.device.kind != "cpu"


def lowered(model: nn.Module) -> list[str]:
    """Parameters that may be kept in less than fp32: all but those of layer norms."""
    kept = {one for module in model.modules() if isinstance(module, LayerNorm) for one in module.parameters()}
    return [name for name, parameter in model.named_parameters() if parameter not in kept]


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
