"""The interface of an engine, and the engine that uses torch alone: it joins a micro-batch runner and a rank state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trainer.checkpoint.part import Part
from trainer.config.train_config import TrainConfig
from trainer.device import Device, return_unused_memory
from trainer.engine.optimizer import LossScale
from trainer.engine.passes import (
    Batch,
    MicroBatchRunner,
    Model,
    SingleStageRunner,
    loss_weights,
    tokens_of,
)
from trainer.engine.pipeline import PipelineRunner
from trainer.engine.rank_state import RankState, ReplicatedState
from trainer.model.cuts import cuts_of, shapes_of
from trainer.parallel.group import Groups


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step: `loss` is the mean over the global batch, `tokens` counts all ranks.

    `skipped` is True where the gradient was not finite and nothing was updated. `own_seconds` is the time of this
    rank's own work without waiting for others. All ranks take a step in the same time, so it alone shows a slow one.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False
    own_seconds: float = 0.0
    loss_scale: float | None = None
    """The factor that fp16 multiplied the loss by; None in other precisions."""
    calibrating: bool = False
    """True where the step was skipped and the loss scale can be lowered: this is no failure."""


class Engine(Protocol):
    """Trains a model. Every method is a collective over all ranks, unless it says otherwise."""

    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each parameter in a checkpoint, by its logical name."""
    loss_scale: LossScale
    """The loss scale of fp16; always 1 in other precisions."""

    def step(self, batch: Batch, rate: float, seed: int) -> StepResult:
        """Take one optimizer step with this rank's part of a global batch; `seed` fixes dropout."""

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss over the parts of all ranks, without dropout; NaN without batches."""

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""

    @property
    def optimizer_steps(self) -> int:
        """Return how many updates the optimizer has made."""

    def parts(self) -> list[Part]:
        """Return the parts of all weights and moments that this rank holds. No collective."""

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        """Have `fill` write all parts, then continue after so many updates. No collective."""

    def fixed_parts(self) -> list[Part]:
        """Return the parts of the weights that are not learned, which are never saved. No collective."""

    def replicate(self, names: Collection[str]) -> None:
        """Give the ranks that have the same weights those of the first of them, of the named parameters."""

    def finish(self) -> None:
        """Write what the engine recorded of the training to the log. No collective."""


class TorchEngine:
    """The engine that needs torch alone; it runs wherever torch has collectives."""

    def __init__(
        self,
        model: Model,
        config: TrainConfig,
        groups: Groups,
        device: Device,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """`shapes` are those of the whole model's parameters; needed where this rank has one stage of a pipeline."""
        self.config, self.groups, self.device = config, groups, device
        self.model, self.cuts, self.parallel = model, cuts_of(model), model.parallel
        self.shapes = shapes or shapes_of(model, model.parallel)
        self.loss_scale = LossScale(config.loss_scale if config.precision == "fp16" else None)
        self.rank_state = _rank_state(model, config, groups)
        self.runner: MicroBatchRunner = SingleStageRunner(model, device, config.precision, groups.data)
        if groups.pipeline.stages > 1:
            self.runner = PipelineRunner(model, device, config.precision, groups.data, groups.pipeline)
        self._steps = 0

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
        self._steps += 1
        if self._steps == 1 and self.device.kind == "cpu":
            # The start and the first step leave holes between the buffers that later steps use.
            return_unused_memory()
        readers = data.world // self.groups.context.size
        tokens = tokens_of(batch, readers, self.config.model.sequence, self.model.joins_samples)
        mean = self.groups.pipeline.total(data.total(float(total.item())), self.device) / scale
        used = scale if self.config.precision == "fp16" else None
        return StepResult(mean, norm, tokens, not finite, own.seconds(), used, calibrating)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        return self.runner.evaluate(batches)

    def finish(self) -> None:
        """Nothing is recorded."""

    def any(self, flag: bool) -> bool:
        return self.groups.everyone.any(flag)

    @property
    def optimizer_steps(self) -> int:
        return self.rank_state.optimizer.taken

    def parts(self) -> list[Part]:
        return self.rank_state.parts()

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        self.rank_state.load_parts(fill, optimizer_steps)

    def fixed_parts(self) -> list[Part]:
        return self.rank_state.fixed_parts()

    def replicate(self, names: Collection[str]) -> None:
        self.rank_state.replicate(names)


def _rank_state(model: Model, config: TrainConfig, groups: Groups) -> RankState:
    """Return the state of this rank by its ZeRO stage; a single data parallel rank divides nothing."""
    if config.zero < 2 or groups.data.world == 1:
        return ReplicatedState(model, config, groups.data, groups.pipeline)
    # The import loads 600 modules of torch in 0.6 s.
    from trainer.engine.sharded import ShardedState

    return ShardedState(model, config, groups.data, groups.pipeline)
