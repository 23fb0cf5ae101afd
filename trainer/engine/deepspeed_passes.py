"""Run a step's micro-batches through DeepSpeed, on a rank with all layers or on one stage of its pipeline.

Both runners call the model inside their own autocast, because DeepSpeed silently turns off an autocast around its call.
DeepSpeed's bf16 and fp16 modes would also cast layer norms, and torch would sum their gradients in 16 bits.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.device import Device, Stopwatch
from trainer.engine.passes import (
    Batch,
    Micro,
    Model,
    loss_weights,
    mean_loss,
    model_loss,
)
from trainer.parallel.group import Group, Groups
from trainer.parallel.pipeline import TIED


class DeepSpeedRunner(Protocol):
    """Runs micro-batches through the layers; `module` is the module that DeepSpeed wraps."""

    module: nn.Module

    def step(
        self, engine: Any, batch: Batch, weights: Sequence[float], own: Stopwatch, scale: float
    ) -> float:
        """Run forward, backward and update; return the sum over all ranks of their losses times their weights.

        `scale` multiplies the loss before its backward pass. `own` stops while this rank waits for other ranks.
        """

    def evaluate(self, engine: Any, batches: Iterable[Batch]) -> float:
        """Return the mean loss over the counted tokens of all ranks, without dropout; NaN without batches."""


class SingleStageRunner:
    """Runs each micro-batch forward and backward, one by one, on a rank with all layers."""

    def __init__(self, model: Model, device: Device, precision: str, data: Group) -> None:
        self.module: nn.Module = _Loss(model, device, precision)
        self.model, self.device, self.data = model, device, data

    def step(
        self, engine: Any, batch: Batch, weights: Sequence[float], own: Stopwatch, scale: float
    ) -> float:
        total = torch.zeros((), device=self.device.name)
        for micro, weight in zip(batch, weights, strict=True):
            last = micro is batch[-1]
            # DeepSpeed takes the number of micro-batches from its config, but our batches may grow.
            engine.set_gradient_accumulation_boundary(last)
            # DeepSpeed divides the gradients by the number of ranks.
            loss = engine(*micro) / (1.0 / (weight * self.data.world) if weight else math.inf)
            if last:
                # The backward pass waits for the other ranks.
                own.stop()
            engine.backward(loss * scale, scale_wrt_gas=False)
            total += loss.detach()
            engine.step()
        return self.data.total(float(total.item())) / self.data.world

    @torch.no_grad()
    def evaluate(self, engine: Any, batches: Iterable[Batch]) -> float:
        engine.eval()
        losses, counts = [], []
        for micro in (micro for batch in batches for micro in batch):
            losses.append(engine(*micro))
            counts.append(self.model.counted(micro))
        engine.train()
        return mean_loss(losses, counts, self.model.counts_vary, self.data)


class _Loss(nn.Module):
    def __init__(self, model: Model, device: Device, precision: str) -> None:
        super().__init__()
        self.model, self.device, self.precision = model, device, precision

    def forward(self, *micro: Tensor) -> Tensor:
        return model_loss(self.model, self.model, micro, self.device, self.precision)


class PipelineRunner:
    """Runs micro-batches through the stages by DeepSpeed's 1F1B schedule.

    For DeepSpeed each stage is one layer. Each stage reads the micro-batches itself and so has masks and targets; only
    hidden states are sent.
    """

    def __init__(self, deepspeed: Any, model: Model, device: Device, precision: str, groups: Groups) -> None:
        line, pipe = groups.pipeline, deepspeed.pipe
        self.data = groups.data
        own = (model, device, precision, line.is_first)
        middle = [pipe.LayerSpec(_Stage, *own) for _ in range(line.stages - 2)]
        # The first and the last stage sum the gradient of a shared table, unless the table is frozen.
        shares = model.config.tied and any(
            name == TIED and parameter.requires_grad for name, parameter in model.named_parameters()
        )
        first, last = (
            pipe.TiedLayerSpec("ends", _Stage, *own, tied_weight_attr=f"model.{TIED}")
            if shares
            else pipe.LayerSpec(_Stage, *own)
            for _ in range(2)
        )
        topology = deepspeed.runtime.pipe.topology.PipeModelDataParallelTopology
        # DeepSpeed prints how it divides the layers, and broadcasts the tied table, which must happen without autograd.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            self.module: nn.Module = pipe.PipelineModule(
                [first, *middle, last],
                topology=topology(num_pp=line.stages, num_mp=groups.tensor.size, num_dp=groups.data.world),
                partition_method="uniform",
                # GLM's micro-batches and rows of examples differ in length.
                dynamic_shape=model.config.kind == "glm" or model.joins_samples,
            )
        for name, parameter in model.named_parameters():
            # Parameters that the norm must not count on this stage.
            parameter.ds_pipe_replicated = not line.counts(name)  # type: ignore[attr-defined]
        self.stage: _Stage = next(module for module in self.module.modules() if isinstance(module, _Stage))

    def step(
        self, engine: Any, batch: Batch, weights: Sequence[float], own: Stopwatch, scale: float
    ) -> float:
        # Waiting for other stages does not count; only forward passes can be measured here.
        own.stop()
        self.stage.clock = own
        engine.set_train_batch_size(len(batch) * engine.train_micro_batch_size_per_gpu() * self.data.world)
        loss: Tensor = engine.train_batch(self._reads(batch, weights, scale))
        self.stage.clock = None
        return float(loss.item()) / scale

    def evaluate(self, engine: Any, batches: Iterable[Batch]) -> float:
        micros = [micro for batch in batches for micro in batch]
        if not micros:
            return float("nan")
        weights = loss_weights(self.stage.model, micros, self.data)
        reads = self._reads(micros, weights)
        return float(engine.eval_batch(reads, num_micro_batches=len(micros)).item())

    def _reads(
        self, micros: Sequence[Micro], weights: Sequence[float], scale: float = 1.0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the stage its micro-batches; return an iterator that DeepSpeed requires, whose values are not used."""
        self.stage.micros = deque(micros)
        # DeepSpeed computes the mean of the losses over micro-batches and ranks.
        losses = len(micros) * self.data.world
        self.stage.factors = deque(weight * losses * scale for weight in weights)
        return iter([(torch.zeros(1), torch.zeros(1))] * len(micros))


class _Stage(nn.Module):
    def __init__(self, model: Model, device: Device, precision: str, first: bool) -> None:
        super().__init__()
        self.model, self.device, self.precision, self.first = model, device, precision, first
        self.micros: deque[Micro] = deque()
        self.clock: Stopwatch | None = None
        # The factor for each micro-batch's loss.
        self.factors: deque[float] = deque()

    def forward(self, x: Tensor) -> Tensor:
        if self.clock:
            self.clock.resume()
        run = self.model if self.first else partial(self.model, x=x)
        result = model_loss(run, self.model, self.micros.popleft(), self.device, self.precision)
        factor = self.factors.popleft()
        if self.model.pieces[0].last:
            result = result * factor
        if self.clock:
            self.clock.stop()
        return result
