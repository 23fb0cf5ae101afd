"""The loop: steps, evaluations, checkpoints in their order. It knows no device, logging or parallelism."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from trainer.checkpoint.checkpointer import Progress
from trainer.config.train_config import TrainConfig
from trainer.engine.optimizer import learning_rate
from trainer.engine.passes import Batch
from trainer.engine.torch_engine import Engine, StepResult
from trainer.errors import TrainingFailed
from trainer.samples.dataset import Batches, Micro
from trainer.train.events import (
    Ended,
    Evaluated,
    Event,
    Failed,
    MemoryTaken,
    StepBegan,
    StepDone,
)


class Checkpoints(Protocol):
    """Saves that may go on in the background; each method returns what was saved since the last call."""

    def save(self, progress: Progress, last: bool = False) -> Sequence[Event]:
        """Save, or begin to; where training ends, return once it is saved."""

    def done(self) -> Sequence[Event]:
        """Do not wait."""

    def finish(self) -> Sequence[Event]:
        """Wait for a save in the background."""


@dataclass
class Training:
    """What the loop runs on."""

    config: TrainConfig
    engine: Engine
    train: Batches
    valid: Batches | None
    checkpoints: Checkpoints
    tell: Callable[[Event], None]
    stop_asked: Callable[[], bool]
    search: Callable[[Callable[[], StepResult]], tuple[StepResult, str]] | None = None
    """Repeats a step and says where it is not finite."""
    measure: Callable[[int], MemoryTaken] | None = None
    """What memory the ranks took, asked after the first step and at the end."""
    dropout_place: int = 0
    """What tells this rank's dropout from others'; those that hold the same numbers must drop the same."""


def train(run: Training, step: int = 0) -> Ended:
    """Train from `step` finished steps to the config's last, or until asked to stop; a stop saves first."""
    config, began = run.config, time.monotonic()
    eval_loss = _evaluate(run, 0) if step == 0 else None
    loss, saved_at, stopping, first = None, step, False, step + 1
    # Steps in a row that were not finite.
    lost: list[StepDone] = []
    while step < config.steps and not stopping:
        started = time.monotonic()
        run.tell(StepBegan(step + 1))
        done = _step(run, step, started, search=not lost)
        step, loss = step + 1, done.loss
        run.tell(done)
        _tell_all(run, run.checkpoints.done())
        if run.measure and step == first:
            run.tell(run.measure(step))
        lost = [*lost, done] if _is_lost(done) else []
        if len(lost) >= config.nan.stop_after:
            _tell_all(run, run.checkpoints.finish())
            raise _failed(run, lost)
        stopping = run.engine.any(run.stop_asked())
        if not stopping and (step == config.steps or _due(step, config.eval.every)):
            eval_loss = _evaluate(run, step)
        if step == config.steps or stopping or _due(step, config.save.every):
            last = step == config.steps or stopping
            _tell_all(run, run.checkpoints.save(Progress(step, loss, eval_loss), last))
            saved_at = step
    if saved_at != step:
        _tell_all(run, run.checkpoints.save(Progress(step, loss, eval_loss), last=True))
    _tell_all(run, run.checkpoints.finish())
    if run.measure:
        run.tell(run.measure(step))
    ended = Ended(step, step < config.steps, loss, eval_loss, time.monotonic() - began)
    run.tell(ended)
    return ended


def pauses_after(config: TrainConfig, step: int) -> bool:
    """Whether an evaluation or a checkpoint follows a step."""
    return step == config.steps or _due(step, config.eval.every) or _due(step, config.save.every)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _is_lost(done: StepDone) -> bool:
    return (done.skipped and not done.calibrating) or not math.isfinite(done.loss)


def _failed(run: Training, lost: Sequence[StepDone]) -> TrainingFailed:
    """What ends a training that no longer learns, told first."""
    told = f"no finite loss or gradient in {len(lost)} steps up to step {lost[-1].step}"
    cause = f": at step {lost[0].step} {lost[0].cause}" if lost[0].cause else ""
    run.tell(Failed(lost[-1].step, told + cause))
    return TrainingFailed(told + cause, "lower train.optimizer.lr, or raise warmup_steps")


def _step(run: Training, finished: int, began: float, search: bool) -> StepDone:
    """One step; with `search`, one that is not finite is computed again to see where."""
    config = run.config
    consumed = config.batches.consumed(finished)
    samples = config.batches.after(consumed)
    batch = _tensors(run.train.at(consumed, samples))
    rate = learning_rate(config.optimizer, finished + 1, config.steps, config.batches, config.model.sequence)
    # A slow disk makes a slow rank too.
    read = time.monotonic() - began
    again = partial(run.engine.step, batch, rate, dropout_seed(config.seed, finished + 1, run.dropout_place))
    result, cause = again(), ""
    if (
        search
        and run.search
        and not result.calibrating
        and not (math.isfinite(result.loss) and not result.skipped)
    ):
        result, cause = run.search(again)
    seconds = time.monotonic() - began
    return StepDone(
        finished + 1,
        config.steps,
        result.loss,
        rate,
        result.grad_norm,
        tokens=(consumed + samples) * config.model.sequence,
        tokens_per_second=result.tokens / seconds,
        step_seconds=seconds,
        skipped=result.skipped,
        calibrating=result.calibrating,
        loss_scale=result.loss_scale,
        cause=cause,
        own_seconds=read + result.own_seconds,
        samples=samples,
        consumed=consumed + samples,
    )


def dropout_seed(seed: int, step: int, place: int) -> int:
    """A seed of its own for every step and place, so that a resume needs no saved generator."""
    return (seed * 1_000_003 + step) * 65_537 + place


def _evaluate(run: Training, step: int) -> float | None:
    if run.valid is None:
        return None
    began = time.monotonic()
    loss = run.engine.evaluate(_tensors(batch) for batch in run.valid.first(run.config.eval.batches))
    run.tell(Evaluated(step, loss, time.monotonic() - began))
    return loss


def _tell_all(run: Training, events: Sequence[Event]) -> None:
    for event in events:
        run.tell(event)


def _tensors(batch: Sequence[Micro]) -> Batch:
    return [tuple(torch.from_numpy(array) for array in micro) for micro in batch]
