"""The observers of a training: metrics.jsonl, the console, the heartbeat, injected faults. Also describes the start of
a training.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

import native
from clusterctl.wire.contract import HEARTBEAT_DIR, METRICS_FILE, PROFILE_DIR, TENSORBOARD_DIR
from clusterctl.wire.metrics import (
    ChosenBackend,
    Ended,
    Evaluated,
    MemoryTaken,
    Saved,
    SaveSkipped,
    Started,
    StepDone,
    metric_line,
)
from clusterctl.wire.results import Evaluation
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.env import Drill, Env
from trainer.files import open_lines, write_whole
from trainer.parallel.group import Group, Groups
from trainer.plan.time import CONVENTIONS
from trainer.train.collectives import Collectives, groups_of
from trainer.train.events import Event, Observer, StepBegan
from trainer.train.loop import pauses_after
from trainer.train.rates import SHOWN, Rates, memory_line
from trainer.train.startup import Startup, startup_line


class Metrics:
    """The only writer of metrics.jsonl: one JSON object per line, each line in one unbuffered write."""

    def __init__(
        self,
        path: Path,
        rates: Rates | None = None,
        views: Sequence[Callable[[Mapping[str, object]], None]] = (),
    ) -> None:
        """`views` receive every line too."""
        self._handle = open_lines(path)
        self._rates, self._views = rates, tuple(views)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepBegan):
            return
        more: Mapping[str, object] = {}
        if isinstance(event, Started) and self._rates:
            more = {"rates": self._rates.as_json()}
        elif isinstance(event, StepDone) and self._rates:
            more = self._rates.of_step(event)
        elif isinstance(event, Evaluated) and event.accuracy is None:
            more = {"perplexity": perplexity(event.loss)}
        line = metric_line(event, more)
        write_whole(self._handle, json.dumps(line).encode() + b"\n")
        for view in self._views:
            view(line)


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else float("inf")


class Console:
    """Writes a line per event to rank 0's log."""

    def __init__(self, every: int, stream: TextIO, rates: Rates | None = None) -> None:
        self._every, self._stream, self._rates = every, stream, rates

    def __call__(self, event: Event) -> None:
        line = self._line(event)
        if line:
            self._stream.write(line + "\n")
            self._stream.flush()

    def _line(self, event: Event) -> str:
        if isinstance(event, StepDone):
            due = event.step % self._every == 0 or event.step == event.steps or event.skipped
            return step_line(event, self._rates) if due else ""
        if isinstance(event, Evaluated):
            shown = (
                f"perplexity {perplexity(event.loss):.2f}"
                if event.accuracy is None
                else f"accuracy {event.accuracy:.2%}"
            )
            return f"eval at step {event.step} | loss {event.loss:.4f} | {shown}"
        if isinstance(event, Evaluation):
            return task_line(event)
        if isinstance(event, Saved):
            stall = f" ({event.stall:.2f} s of them without training)" if event.background else ""
            return f"saved {event.path} | {event.bytes / 1e6:.1f} MB | {event.seconds:.2f} s{stall}"
        if isinstance(event, SaveSkipped):
            return f"no checkpoint of step {event.step}: that of step {event.writing} is still being written"
        if isinstance(event, MemoryTaken):
            return memory_line(event)
        if isinstance(event, Ended):
            return (
                f"{'stopped' if event.stopped else 'finished'} at step {event.step} | {event.seconds:.1f} s"
            )
        return ""


def task_line(event: Evaluation) -> str:
    """Return the results of a task on one line."""
    figures = (f"{name.replace('_', ' ')} {figure.value:.4g}" for name, figure in event.metrics.items())
    return f"{event.task} at step {event.step} | {' | '.join(figures)}"


def step_line(event: StepDone, rates: Rates | None = None) -> str:
    width = len(str(event.steps))
    parts = [
        f"step {event.step:>{width}}/{event.steps}",
        f"loss {event.loss:.4f}",
        f"lr {event.lr:.2e}",
        f"grad norm {event.grad_norm:.3f}",
        f"{event.tokens_per_second:,.0f} tokens/s",
        f"{event.step_seconds * 1000:.0f} ms",
    ]
    if rates is not None:
        parts += [
            f"{event.samples / event.step_seconds:,.1f} samples/s",
            rates.text(event.tokens_per_second),
        ]
    if event.loss_scale is not None:
        parts.append(f"loss scale {event.loss_scale:,.0f}")
    if event.skipped:
        why = "calibrating the loss scale" if event.calibrating else "the gradient is not finite"
        parts.append(f"skipped: {why}")
    return " | ".join([*parts, *filter(None, [event.cause])])


class Heartbeat:
    """A file per rank with its last finished step and the seconds of this rank's own work in it.

    The supervisor also reads the file's age. A second line, `pause`, announces an evaluation or a checkpoint, which
    may take longer than a step.
    """

    def __init__(self, path: Path, step: int, pauses: Callable[[int], bool] = lambda step: False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._pauses, self._paused = pauses, False
        self._own = ""
        self._beat(step)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            if event.own_seconds:
                # The width is constant.
                self._own = f" {min(event.own_seconds, 99999.0):10.4f}"
            self._beat(event.step, self._pauses(event.step))
        elif isinstance(event, StepBegan) and self._paused:
            self._beat(event.step - 1)

    def _beat(self, step: int, pause: bool = False) -> None:
        # One short write from the beginning. Steps only grow within an attempt, so a reader always sees a whole number.
        written = os.pwrite(self._handle, f"{step}{self._own}\n{'pause' * pause}".encode(), 0)
        if self._paused and not pause:
            os.ftruncate(self._handle, written)
        self._paused = pause


class DrillObserver:
    """Injects a fault: ends or halts this rank when it begins the drill's step, or makes it slow from that step on."""

    def __init__(self, drill: Drill) -> None:
        self._drill = drill

    def __call__(self, event: Event) -> None:
        if not isinstance(event, StepBegan) or event.step < self._drill.step:
            return
        if self._drill.how == "slow":
            time.sleep(self._drill.number / 1000)
        elif event.step == self._drill.step:
            self._end(event)

    @staticmethod
    def _hang() -> None:
        while True:
            time.sleep(60)

    def _end(self, event: StepBegan) -> None:
        sys.stderr.write(f"drill: rank {self._drill.rank} ends at step {event.step} by {self._drill.how}\n")
        sys.stderr.flush()
        if self._drill.how == "hang":
            self._hang()
        if self._drill.how == "exit":
            os._exit(self._drill.number)
        if self._drill.how == "kill":
            os.kill(os.getpid(), signal.Signals(self._drill.number))
        raise RuntimeError(f"drill: arranged at step {event.step}")


def emit(observers: Sequence[Observer], event: Event) -> None:
    """Pass an event to each observer, in order."""
    for observer in observers:
        observer(event)


def observers(
    config: TrainConfig, environment: Env, run_dir: Path, groups: Groups, start: Started
) -> list[Observer]:
    """Return the observers of this rank; the profiler is last, so that traces show the others' time separately."""
    device = groups.everyone.device
    rank = environment.rank
    found: list[Observer] = []
    if environment.drill is not None and environment.drill.rank == rank:
        found.append(DrillObserver(environment.drill))
    pauses = partial(pauses_after, config)
    beats = run_dir / HEARTBEAT_DIR
    found.append(Heartbeat(beats / f"rank-{rank}", start.step, pauses))
    found.append(Collectives(beats / f"calls-{rank}", groups_of(groups), start.step, pauses))
    if rank == 0:
        found += _of_rank_0(config, run_dir, device, start)
    if config.profile.repeat and rank in config.profile.ranks:
        from trainer.train.profiler import Profiler

        found.append(Profiler(config.profile, device, run_dir / PROFILE_DIR, rank))
    return found


def _of_rank_0(config: TrainConfig, run_dir: Path, device: Device, start: Started) -> list[Observer]:
    views, lines = [], start_lines(start)
    if config.tensorboard:
        from trainer.train.tensorboard import EventFile

        views.append(EventFile(run_dir / TENSORBOARD_DIR).add)
        lines += f"tensorboard --logdir {run_dir / TENSORBOARD_DIR}\n"
    rates = Rates.of(config, start.world, device.kind, device.described(), start.threads)
    lines += f"peak rate: {rates.peak:.3g} TFLOP/s per device ({rates.source}); " + "".join(
        f"{name}: {CONVENTIONS[name]}; " for name in SHOWN
    )
    sys.stdout.write(lines.removesuffix("; ") + "\n")
    sys.stdout.flush()
    metrics = Metrics(run_dir / METRICS_FILE, rates, views)
    return [metrics, Console(config.log_every, sys.stdout, rates)]


def started(
    config: TrainConfig,
    environment: Env,
    group: Group,
    device: Device,
    ops: native.Choice,
    checkpointer: Checkpointer,
    step: int,
    startup: Startup,
) -> Started:
    """Return the event of this start, after `step` finished steps."""
    return Started(
        step=step,
        resumed_from=checkpointer.resumed_from or None,
        steps=config.steps,
        run=environment.run_id,
        attempt=environment.attempt,
        world=group.world,
        layout=config.layout(group.world).as_json(),
        parameters=config.model.parameters(),
        engine=config.engine,
        zero=config.zero,
        precision=config.precision,
        native=tuple(ChosenBackend(chosen.op, chosen.backend, chosen.reason) for chosen in ops.report()),
        device=device.kind,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        config=config.as_json(),
        notes=tuple(checkpointer.notes),
        startup=startup.parts,
    )


def start_lines(start: Started) -> str:
    """Return the first lines of rank 0's log: model, hardware, and the backend of each op."""
    layout = " x ".join(f"{kind} {ranks}" for kind, ranks in start.layout.items() if ranks > 1)
    ranks = f"{start.world} ranks" + (f" ({layout})" if start.layout["tensor"] > 1 else "")
    lines = [
        f"{start.parameters:,} parameters | {ranks} x {start.threads} threads | "
        f"{start.device} | {start.precision} | {start.engine} engine, zero {start.zero} | torch {start.torch}",
    ]
    lines += [f"native {chosen.op}: {chosen.backend} ({chosen.reason})" for chosen in start.native]
    lines.append(startup_line(start.startup))
    lines += start.notes
    if start.resumed_from:
        lines.append(f"resumed from {start.resumed_from} at step {start.step}")
    return "\n".join(lines) + "\n"
