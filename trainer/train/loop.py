"""The training loop: steps, evaluations and checkpoints in order, without devices, logging and parallelism."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from clusterctl.wire.metrics import Ended, Evaluated, Failed, MemoryTaken, StepDone
from trainer.checkpoint.checkpointer import Progress
from trainer.config.train_config import TrainConfig
from trainer.engine.optimizer import learning_rate
from trainer.engine.passes import Batch
from trainer.engine.torch_engine import Engine, StepResult
from trainer.errors import TrainingFailed
from trainer.samples.dataset import Batches, Micro
from trainer.train.events import Event, StepBegan


class Checkpoints(Protocol):
    """Saves that may continue in the background; each method returns the checkpoint completed since the last call."""

    tokens: int
    """The tokens that were read before the first step of this process."""

    def save(self, progress: Progress, last: bool = False) -> Sequence[Event]:
        """Save, or start to; at the end of the training, return after the save."""

    def done(self) -> Sequence[Event]:
        """Return the completed checkpoint, if there is one, without waiting."""

    def finish(self) -> Sequence[Event]:
        """Wait for a save in the background."""


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation."""

    loss: float | None = None
    accuracy: float | None = None


@dataclass
class Training:
    """The parts of a training that the loop uses."""

    config: TrainConfig
    engine: Engine
    train: Batches
    valid: Batches | None
    checkpoints: Checkpoints
    emit: Callable[[Event], None]
    """Passes an event to all observers."""
    stop_requested: Callable[[], bool]
    search: Callable[[Callable[[], StepResult]], tuple[StepResult, str]] | None = None
    """Repeats a step and describes where it is not finite."""
    measure: Callable[[int], MemoryTaken] | None = None
    """Returns the memory of all ranks; called after the first step and at the end."""
    tasks: Callable[[int], Iterable[Event]] = lambda step: ()
    """Evaluates tasks after a step; a collective."""
    accuracy: Callable[[], float] | None = None
    """Returns the fraction of correct answers in the evaluation that just ended; a collective."""
    is_enough: Callable[[Measured], bool] = lambda measured: False
    """Returns whether an evaluation shows that more steps would not help."""
    dropout_place: int = 0
    """Makes this rank's dropout differ from that of others; ranks with the same activations have the same place."""
    ahead: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None
    """Starts to copy a micro-batch to the device. If it is given, each batch is read while the step before computes."""
    following: tuple[int, Batch] | None = None
    """The batch that was read ahead, and the number of steps before it."""
    reading: float = 0.0
    """How many seconds reading ahead took in the last step."""


def train(run: Training, step: int = 0) -> Ended:
    """Train from `step` finished steps to the config's last, or until a stop is requested; save at the end."""
    config, began = run.config, time.monotonic()
    measured = _evaluate(run, 0) if step == 0 else Measured()
    loss, saved_at, stopping, first = None, step, False, step + 1
    # Number of consecutive non-finite steps.
    lost: list[StepDone] = []
    # The samples of a task vary in length, so their tokens are counted.
    tokens = run.checkpoints.tokens if config.tune.task else None
    while step < config.steps and not stopping:
        started = time.monotonic()
        run.emit(StepBegan(step + 1))
        done = _step(run, step, started, tokens, search=not lost)
        step, loss = step + 1, done.loss
        tokens = None if tokens is None else done.tokens
        run.emit(done)
        _emit_all(run, run.checkpoints.done())
        if run.measure and step == first:
            run.emit(run.measure(step))
        lost = [*lost, done] if _is_lost(done) else []
        if len(lost) >= config.nan.stop_after:
            _emit_all(run, run.checkpoints.finish())
            raise _failed(run, lost)
        stopping = run.engine.any(run.stop_requested())
        if not stopping and (step == config.steps or _due(step, config.eval.every)):
            measured = _evaluate(run, step)
            stopping = stopping or run.engine.any(run.is_enough(measured))
        if step == config.steps or stopping or _due(step, config.save.every):
            last = step == config.steps or stopping
            progress = Progress(step, loss, measured.loss, measured.accuracy, tokens)
            _emit_all(run, run.checkpoints.save(progress, last))
            saved_at = step
    if saved_at != step:
        progress = Progress(step, loss, measured.loss, measured.accuracy, tokens)
        _emit_all(run, run.checkpoints.save(progress, last=True))
    _emit_all(run, run.checkpoints.finish())
    if run.measure:
        run.emit(run.measure(step))
    ended = Ended(step, step < config.steps, loss, measured.loss, time.monotonic() - began)
    run.emit(ended)
    return ended


def pauses_after(config: TrainConfig, step: int) -> bool:
    """Return whether an evaluation or a checkpoint follows a step."""
    return step == config.steps or _due(step, config.eval.every) or _due(step, config.save.every)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _is_lost(done: StepDone) -> bool:
    return (done.skipped and not done.calibrating) or not math.isfinite(done.loss)


def _failed(run: Training, lost: Sequence[StepDone]) -> TrainingFailed:
    """Emit the failure of a training whose steps are no longer finite; return its error."""
    message = f"no finite loss or gradient in {len(lost)} steps up to step {lost[-1].step}"
    if lost[0].cause:
        message += f": at step {lost[0].step} {lost[0].cause}"
    run.emit(Failed(lost[-1].step, message))
    return TrainingFailed(message, "lower train.optimizer.lr, or raise warmup_steps")


def _step(run: Training, finished: int, began: float, tokens: int | None, *, search: bool) -> StepDone:
    """Take one step; with `search`, repeat one that is not finite to find the cause.

    `tokens`: those read before, if they are counted.
    """
    config = run.config
    consumed = config.batches.consumed(finished)
    samples = config.batches.after(consumed)
    batch = _batch(run, finished)
    rate = learning_rate(config.optimizer, finished + 1, config.steps, config.batches, config.model.sequence)
    read = time.monotonic() - began
    seed = dropout_seed(config.seed, finished + 1, run.dropout_place)
    meanwhile = partial(_read_ahead, run, finished + 1) if run.ahead else None
    again = partial(run.engine.step, batch, rate, seed, meanwhile)
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
        tokens=config.tokens(finished + 1) if tokens is None else tokens + result.tokens,
        tokens_per_second=result.tokens / seconds,
        step_seconds=seconds,
        skipped=result.skipped,
        calibrating=result.calibrating,
        loss_scale=result.loss_scale,
        cause=cause,
        # Reading counts as the rank's own time, because a slow disk makes a slow rank.
        own_seconds=max(read + result.own_seconds, run.reading),
        samples=samples,
        consumed=consumed + samples,
    )


def _batch(run: Training, finished: int) -> Batch:
    """Return the batch of the step after `finished` steps."""
    if run.following and run.following[0] == finished:
        return run.following[1]
    config = run.config
    consumed, whole = config.batches.consumed(finished), config.model.sequence
    length = config.curriculum.length(finished + 1, whole)
    return tensors(run.train.at(consumed, config.batches.after(consumed), length if length < whole else 0))


def _read_ahead(run: Training, finished: int) -> None:
    """Read the batch after `finished` steps, unless this is done, and start to copy it to the device."""
    began = time.monotonic()
    if run.ahead and finished < run.config.steps and (not run.following or run.following[0] != finished):
        run.following = finished, [run.ahead(micro) for micro in _batch(run, finished)]
    run.reading = time.monotonic() - began


def dropout_seed(seed: int, step: int, index: int) -> int:
    """Return a different seed for every step and place, so that a resume needs no saved generator."""
    return (seed * 1_000_003 + step) * 65_537 + index


def _evaluate(run: Training, step: int) -> Measured:
    for event in run.tasks(step):
        run.emit(event)
    if run.valid is None:
        return Measured()
    began = time.monotonic()
    loss = run.engine.evaluate(tensors(batch) for batch in run.valid.first(run.config.eval.batches))
    measured = Measured(loss, run.accuracy() if run.accuracy else None)
    run.emit(Evaluated(step, loss, time.monotonic() - began, measured.accuracy))
    return measured


def _emit_all(run: Training, events: Sequence[Event]) -> None:
    for event in events:
        run.emit(event)


def tensors(batch: Sequence[Micro]) -> Batch:
    """Return the micro-batches of a batch as tensors."""
    return [tuple(torch.from_numpy(array) for array in micro) for micro in batch]
