"""The interface of an engine, and the engine that only needs torch: a micro-batch runner and a rank state."""

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

    `skipped`: the gradient was not finite, so nothing was updated. `own_seconds`: the time of this rank's own work,
    without waiting for other ranks. All ranks take equally long for a step, so only `own_seconds` shows a slow rank.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False
    own_seconds: float = 0.0
    loss_scale: float | None = None
    """The factor of the loss in fp16; None in other precisions."""
    calibrating: bool = False
    """Whether the step was skipped because of an overflow and the loss scale can be lowered: this is not a failure."""


class Engine(Protocol):
    """Trains a model. All methods are collectives over all ranks, unless their docstring says otherwise."""

    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each parameter in a checkpoint, by logical name."""
    loss_scale: LossScale
    """The loss scale of fp16; always 1 in other precisions."""

    def step(
        self, batch: Batch, rate: float, seed: int, meanwhile: Callable[[], None] | None = None
    ) -> StepResult:
        """Take one optimizer step with this rank's part of a global batch; `seed` is for dropout.

        An engine may call `meanwhile`, once, when the device has the whole step to compute.
        """

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss over the parts of all ranks, without dropout; NaN without batches."""

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""

    @property
    def optimizer_steps(self) -> int:
        """Return how many updates the optimizer has made."""

    def parts(self) -> list[Part]:
        """Return this rank's parts of all weights and moments. Not a collective."""

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        """Let `fill` write all parts, then continue after `optimizer_steps` updates. Not a collective."""

    def fixed_parts(self) -> list[Part]:
        """Return this rank's parts of the frozen weights, which are never saved. Not a collective."""

    def replicate(self, names: Collection[str]) -> None:
        """Copy the named parameters from the first rank with the same weights to the others."""

    def finish(self) -> None:
        """Log what the engine recorded during training. Not a collective."""


class TorchEngine:
    """The engine that only needs torch; it runs wherever torch has collectives."""

    def __init__(
        self,
        model: Model,
        config: TrainConfig,
        groups: Groups,
        device: Device,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """`shapes`: the shapes of the whole model's parameters; needed on a rank with one stage of a pipeline."""
        self.config, self.groups, self.device = config, groups, device
        self.model, self.cuts, self.parallel = model, cuts_of(model), model.parallel
        self.shapes = shapes or shapes_of(model, model.parallel)
        self.loss_scale = LossScale(config.loss_scale if config.precision == "fp16" else None)
        self.rank_state = _rank_state(model, config, groups)
        self.runner = self._runner()
        self._steps = 0

    def _runner(self) -> MicroBatchRunner:
        """Return what runs the micro-batches of this layout on this device."""
        given = self.model, self.device, self.config.precision, self.groups.data
        if self.config.compiles_blocks(self.device.kind):
            # Import it only here: its modules take a second.
            from trainer.engine.compiled import CompiledBlocks

            CompiledBlocks(self.model)
        if self.groups.pipeline.stages > 1:
            return PipelineRunner(*given, self.groups.pipeline)
        state = self.rank_state
        if self.config.captures(self.device.kind) and isinstance(state, ReplicatedState):
            # Import it only here: a CPU has no graphs.
            from trainer.engine.captured import CapturedRunner

            falls_back = self.config.compile == "auto"
            return CapturedRunner(*given, state.gradients, state.weights_arrived, falls_back)
        return SingleStageRunner(*given)

    def step(
        self, batch: Batch, rate: float, seed: int, meanwhile: Callable[[], None] | None = None
    ) -> StepResult:
        torch.manual_seed(seed)
        own = self.device.stopwatch()
        self.rank_state.clear(own)
        data, scale = self.groups.data, self.loss_scale.value
        weights = [weight * scale for weight in loss_weights(self.model, batch, data)]
        total = self.runner.step(batch, weights, own, self.rank_state.last_backward)
        self.rank_state.wait()
        measured = self.rank_state.clip(self.config.optimizer.clip, scale)
        report = self.device.fetch(torch.stack([measured.to(total.device), total]))
        if self.rank_state.skips:
            # The device computes the update while the host waits for the norm.
            self.rank_state.update(rate)
        if meanwhile:
            meanwhile()
        norm, own_loss = report()
        # This is also False for NaN.
        finite = norm < float("inf")
        if finite and not self.rank_state.skips:
            self.rank_state.update(rate)
        elif not finite and self.rank_state.skips:
            self.rank_state.skipped()
        calibrating = not finite and self.loss_scale.can_fall
        self.loss_scale.update(overflow=not finite)
        self._steps += 1
        if self._steps == 1 and self.device.kind == "cpu":
            # Free the gaps that the start and the first step left between the buffers of later steps.
            return_unused_memory()
        readers = data.world // self.groups.context.size
        tokens = tokens_of(batch, readers, self.config.model.sequence, self.model.joins_samples)
        mean = self.groups.pipeline.total(data.total(own_loss), self.device) / scale
        used = scale if self.config.precision == "fp16" else None
        return StepResult(mean, norm, tokens, not finite, own.seconds(), used, calibrating)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        return self.runner.evaluate(batches)

    def finish(self) -> None:
        """Do nothing: this engine records nothing."""

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
    """Return this rank's state for its ZeRO stage; a single data parallel rank divides nothing."""
    if config.zero < 2 or groups.data.world == 1:
        return ReplicatedState(model, config, groups.data, groups.pipeline)
    # Import it only here: it loads 600 modules of torch in 0.6 s.
    from trainer.engine.sharded import ShardedState

    return ShardedState(model, config, groups.data, groups.pipeline)
