"""A step's micro-batches through DeepSpeed: on a rank with every layer, or on a stage of its pipeline.

Both call the model within an autocast of their own. One around DeepSpeed's call is turned off by it, without a word at
this log level. Its bf16 mode is no choice: it would cast layer norms too, whose gradients torch then sums in bf16.
"""

from __future__ import annotations

import contextlib
import io
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
    model_loss,
)
from trainer.parallel.group import Group, Groups
from trainer.parallel.pipeline import TIED


class Passes(Protocol):
    """How micro-batches go through the layers; `module` is what DeepSpeed is given."""

    module: nn.Module

    def step(self, engine: Any, batch: Batch, own: Stopwatch, scale: float) -> float:
        """Run forward, backward and update; return the mean loss over all ranks.

        `scale` multiplies the loss before its backward pass. `own` is stopped while this rank waits for others.
        """

    def evaluate(self, engine: Any, batches: Iterable[Batch]) -> float:
        """Mean loss over all ranks' parts, without dropout; NaN where there are none."""


class Dense:
    """Each micro-batch forward and backward, then the next."""

    def __init__(self, model: Model, device: Device, precision: str, data: Group) -> None:
        self.module: nn.Module = _Loss(model, device, precision)
        self.device, self.data = device, data

    def step(self, engine: Any, batch: Batch, own: Stopwatch, scale: float) -> float:
        total = torch.zeros((), device=self.device.name)
        for micro in batch:
            last = micro is batch[-1]
            # Batches may grow, and DeepSpeed counts by the config.
            engine.set_gradient_accumulation_boundary(last)
            loss = engine(*micro) / len(batch)
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
        losses = [engine(*micro) for batch in batches for micro in batch]
        engine.train()
        if not losses:
            return float("nan")
        return self.data.total(float(torch.stack(losses).double().mean().item())) / self.data.world


class _Loss(nn.Module):
    def __init__(self, model: Model, device: Device, precision: str) -> None:
        super().__init__()
        self.model, self.device, self.precision = model, device, precision

    def forward(self, *micro: Tensor) -> Tensor:
        return model_loss(self.model, self.model, micro, self.device, self.precision)


class Staged:
    """One forward, one backward through the stages, by DeepSpeed's schedule.

    Every stage is one layer to it, and reads the micro-batches by itself, so that masks and targets are there; only
    the hidden state travels.
    """

    def __init__(self, deepspeed: Any, model: Model, device: Device, precision: str, groups: Groups) -> None:
        line, pipe = groups.pipeline, deepspeed.pipe
        self.data = groups.data
        own = (model, device, precision, line.is_first)
        middle = [pipe.LayerSpec(_Stage, *own) for _ in range(line.stages - 2)]
        first, last = (
            pipe.TiedLayerSpec("ends", _Stage, *own, tied_weight_attr=f"model.{TIED}") for _ in range(2)
        )
        topology = deepspeed.runtime.pipe.topology.PipeModelDataParallelTopology
        # It prints what it divides, and sends the table as if that were to be differentiated.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            self.module: nn.Module = pipe.PipelineModule(
                [first, *middle, last],
                topology=topology(num_pp=line.stages, num_mp=groups.tensor.size, num_dp=groups.data.world),
                partition_method="uniform",
                # Whose rows are as long as their blanks make them.
                dynamic_shape=model.config.kind == "glm",
            )
        for name, parameter in model.named_parameters():
            # By the norm.
            parameter.ds_pipe_replicated = not line.counts(name)  # type: ignore[attr-defined]
        self.stage: _Stage = next(one for one in self.module.modules() if isinstance(one, _Stage))

    def step(self, engine: Any, batch: Batch, own: Stopwatch, scale: float) -> float:
        # What waits for other stages is no part of it, and of the rest only forward passes are seen here.
        own.stop()
        self.stage.clock, self.stage.scale = own, scale
        engine.set_train_batch_size(len(batch) * engine.train_micro_batch_size_per_gpu() * self.data.world)
        loss: Tensor = engine.train_batch(self._reads(batch))
        self.stage.clock, self.stage.scale = None, 1.0
        return float(loss.item()) / scale

    def evaluate(self, engine: Any, batches: Iterable[Batch]) -> float:
        micros = [micro for batch in batches for micro in batch]
        if not micros:
            return float("nan")
        return float(engine.eval_batch(self._reads(micros), num_micro_batches=len(micros)).item())

    def _reads(self, micros: Sequence[Micro]) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the stage its micro-batches, and DeepSpeed something for the places where it wants them."""
        self.stage.micros = deque(micros)
        return iter([(torch.zeros(1), torch.zeros(1))] * len(micros))


class _Stage(nn.Module):
    def __init__(self, model: Model, device: Device, precision: str, first: bool) -> None:
        super().__init__()
        self.model, self.device, self.precision, self.first = model, device, precision, first
        self.micros: deque[Micro] = deque()
        self.clock: Stopwatch | None = None
        # Multiplies the loss in a step, where this stage computes it.
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.clock:
            self.clock.go_on()
        run = self.model if self.first else partial(self.model, x=x)
        result = model_loss(run, self.model, self.micros.popleft(), self.device, self.precision)
        if self.model.pieces[0].last:
            result = result * self.scale
        if self.clock:
            self.clock.stop()
        return result
