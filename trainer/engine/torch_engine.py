"""What the loop asks of an engine, and torch's own: how a step passes the layers, and what a rank holds, together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainer.checkpoint.part import Part
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.engine.optimizer import MOMENTS, LossScale
from trainer.engine.passes import (
    Batch,
    MicroBatchRunner,
    Model,
    SingleStageRunner,
    loss_weights,
    tokens_of,
)
from trainer.engine.pipeline import PipelineRunner
from trainer.engine.rank_state import (
    Arriving,
    RankState,
    ReplicatedState,
    shapes_of,
)
from trainer.model.layers import cuts_of, whole_of
from trainer.parallel.group import Groups
from trainer.parallel.pipeline import of_all_stages


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
    loss_scale: float | None = None
    """What fp16 multiplied the loss by."""
    calibrating: bool = False
    """Whether the step was skipped because that was too much, and is less now: no failure."""


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
    loss_scale: LossScale
    """Of fp16; 1 in other precisions."""

    def step(self, batch: Batch, rate: float, seed: int) -> StepResult:
        """One optimizer step over this rank's part of a global batch; `seed` fixes dropout."""

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over all ranks' parts, without dropout; NaN where there are none."""

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""

    def state(self) -> TrainState:
        """Whole on rank 0; elsewhere parts of it may be stale."""

    @property
    def optimizer_steps(self) -> int:
        """Return how many updates the optimizer has made."""

    def parts(self) -> list[Part]:
        """Return the parts of all weights and moments that this rank holds. No collective."""

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        """Have `fill` write all parts, then continue after so many updates. No collective."""

    def load(self, model: Arriving, optimizer: Arriving, optimizer_steps: int) -> None:
        """Take a whole state, one tensor after another: no device need hold more of it than its own part."""


class TorchEngine:
    """Everything with torch alone; runs wherever torch has collectives."""

    def __init__(
        self,
        model: Model,
        config: TrainConfig,
        groups: Groups,
        device: Device,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """`shapes`: of the whole model's parameters, where this rank's is a stage of it."""
        self.config, self.groups, self.device = config, groups, device
        self.model, self.cuts, self.parallel = model, cuts_of(model), model.parallel
        self.shapes = shapes or shapes_of(model)
        self.loss_scale = LossScale(config.loss_scale if config.precision == "fp16" else None)
        self.rank_state = _rank_state(model, config, groups)
        self.runner: MicroBatchRunner = SingleStageRunner(model, device, config.precision, groups.data)
        if groups.pipeline.stages > 1:
            self.runner = PipelineRunner(model, device, config.precision, groups.data, groups.pipeline)

    def step(self, batch: Batch, rate: float, seed: int) -> StepResult:
        torch.manual_seed(seed)
        self.rank_state.clear()
        data, scale = self.groups.data, self.loss_scale.value
        weights = [weight * scale for weight in loss_weights(self.model, batch, data)]
        own = self.device.stopwatch()
        total = self.runner.step(batch, weights, own, self.rank_state.last_backward)
        self.rank_state.wait()
        norm = self.rank_state.clip(self.config.optimizer.clip, scale)
        # False for NaN too.
        finite = norm < float("inf")
        if finite:
            self.rank_state.update(rate)
        calibrating = not finite and self.loss_scale.can_fall
        self.loss_scale.update(overflow=not finite)
        tokens = tokens_of(batch, data.world, self.config.model.sequence)
        mean = self.groups.pipeline.total(data.total(float(total.item())), self.device) / scale
        told = scale if self.config.precision == "fp16" else None
        return StepResult(mean, norm, tokens, not finite, own.seconds(), told, calibrating)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        return self.runner.evaluate(batches)

    def any(self, flag: bool) -> bool:
        return self.groups.everyone.any(flag)

    def state(self) -> TrainState:
        weights, moments, taken = self.rank_state.state()
        # Elsewhere the moments are not there.
        if self.groups.data.rank == 0:
            weights = whole_of(weights, self.cuts, self.parallel, self.device.name)
            moments = whole_of(moments, self.cuts, self.parallel, self.device.name)
            if self.groups.pipeline.stages > 1 and self.parallel.rank == 0:
                whole = self.groups.pipeline, self.shapes, self.config.stages, self.device
                weights, moments = of_all_stages(weights, *whole), of_all_stages(moments, *whole, MOMENTS)
        return TrainState(weights, moments, taken)

    @property
    def optimizer_steps(self) -> int:
        return self.rank_state.optimizer.taken

    def parts(self) -> list[Part]:
        return self.rank_state.parts()

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        self.rank_state.load_parts(fill, optimizer_steps)

    def load(self, model: Arriving, optimizer: Arriving, optimizer_steps: int) -> None:
        self.rank_state.load(model, optimizer, optimizer_steps)


def _rank_state(model: Model, config: TrainConfig, groups: Groups) -> RankState:
    """What is divided among the data parallel ranks; one of them alone has all of it."""
    if config.zero < 2 or groups.data.world == 1:
        return ReplicatedState(model, config, groups.data, groups.pipeline)
    # Loads 600 modules of torch in 0.6 s.
    from trainer.engine.sharded import ShardedState

    return ShardedState(model, config, groups.data, groups.pipeline)
