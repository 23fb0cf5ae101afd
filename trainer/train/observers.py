"""Who watches a training: metrics.jsonl (the truth), the console, the heartbeat, a drill's end.

Who watches a training on each rank, and what its start is told to be.

What a rank's start takes, part by part: a restart costs this much again, on every rank.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

import native
from trainer.checkpoint.saved import Saved, SaveSkipped
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.env import HEARTBEAT_DIR, METRICS_FILE, PROFILE_DIR, TENSORBOARD_DIR, Drill, Env
from trainer.parallel.group import Group
from trainer.plan.time import CONVENTIONS
from trainer.train.events import (
    Ended,
    Evaluated,
    Event,
    Failed,
    MemoryTaken,
    Observer,
    StepBegan,
    StepDone,
)
from trainer.train.loop import pauses_after
from trainer.train.rates import SHOWN, Rates, memory_line


class Metrics:
    """metrics.jsonl: one object a line, whole lines only, each given to the system at once."""

    def __init__(
        self,
        path: Path,
        start: Mapping[str, Any],
        rates: Rates | None = None,
        views: Sequence[Callable[[Mapping[str, Any]], None]] = (),
    ) -> None:
        """`views` are given every line too."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._rates, self._views = rates, tuple(views)
        self._write("start", start)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._write("step", {**asdict(event), **(self._rates.of_step(event) if self._rates else {})})
        elif isinstance(event, Evaluated):
            self._write("eval", {**asdict(event), "perplexity": perplexity(event.loss)})
        elif isinstance(event, Saved):
            self._write("checkpoint", {**asdict(event), "path": str(event.path)})
        elif isinstance(event, SaveSkipped):
            self._write("checkpoint_skipped", asdict(event))
        elif isinstance(event, MemoryTaken):
            self._write("memory", asdict(event))
        elif isinstance(event, Failed):
            self._write("failed", asdict(event))
        elif isinstance(event, Ended):
            self._write("stopped" if event.stopped else "end", asdict(event))

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        line = {"event": name, **{key: _plain(value) for key, value in values.items()}, "time": time.time()}
        os.write(self._handle, json.dumps(line).encode() + b"\n")
        for view in self._views:
            view(line)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity; they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else float("inf")


class Console:
    """One line an event, on rank 0's log."""

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
            return (
                f"eval at step {event.step} | loss {event.loss:.4f} | perplexity {perplexity(event.loss):.2f}"
            )
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
    """A file a rank that holds its last finished step and the seconds that this rank itself took for it; the
    supervisor reads its age too.

    A second line, `pause`, says that an evaluation or a checkpoint follows, which may take longer than any step.
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
                # Always as wide.
                self._own = f" {min(event.own_seconds, 99999.0):10.4f}"
            self._beat(event.step, self._pauses(event.step))
        elif isinstance(event, StepBegan) and self._paused:
            self._beat(event.step - 1)

    def _beat(self, step: int, pause: bool = False) -> None:
        # One short write at the start: steps only grow within an attempt, so a reader sees a whole number.
        written = os.pwrite(self._handle, f"{step}{self._own}\n{'pause' * pause}".encode(), 0)
        if self._paused and not pause:
            os.ftruncate(self._handle, written)
        self._paused = pause


class DrillObserver:
    """Ends this rank as a drill arranged, when it begins the drill's step; or makes it slow from then on."""

    def __init__(self, drill: Drill) -> None:
        self._drill = drill

    def __call__(self, event: Event) -> None:
        if not isinstance(event, StepBegan) or event.step < self._drill.step:
            return
        if self._drill.how == "slow":
            time.sleep(self._drill.number / 1000)
        elif event.step == self._drill.step:
            self._end(event)

    def _end(self, event: StepBegan) -> None:
        sys.stderr.write(f"drill: rank {self._drill.rank} ends at step {event.step} by {self._drill.how}\n")
        sys.stderr.flush()
        if self._drill.how == "exit":
            os._exit(self._drill.number)
        if self._drill.how == "kill":
            os.kill(os.getpid(), signal.Signals(self._drill.number))
        raise RuntimeError(f"drill: arranged at step {event.step}")


def tell(observers: Sequence[Observer], event: Event) -> None:
    for observer in observers:
        observer(event)


def observers(
    config: TrainConfig, environment: Env, run_dir: Path, device: Device, start: Mapping[str, Any]
) -> list[Observer]:
    """Who watches on this rank; the profiler is last, so that a trace has the others' time apart."""
    rank = environment.rank
    watching: list[Observer] = []
    if environment.drill is not None and environment.drill.rank == rank:
        watching.append(DrillObserver(environment.drill))
    pauses = partial(pauses_after, config)
    watching.append(Heartbeat(run_dir / HEARTBEAT_DIR / f"rank-{rank}", start["step"], pauses))
    if rank == 0:
        watching += _of_rank_0(config, run_dir, device, start)
    if config.profile.repeat and rank in config.profile.ranks:
        from trainer.train.profiler import Profiler

        watching.append(Profiler(config.profile, device, run_dir / PROFILE_DIR, rank))
    return watching


def _of_rank_0(
    config: TrainConfig, run_dir: Path, device: Device, start: Mapping[str, Any]
) -> list[Observer]:
    views, lines = [], start_lines(start)
    if config.tensorboard:
        from trainer.train.tensorboard import EventFile

        views.append(EventFile(run_dir / TENSORBOARD_DIR).add)
        lines += f"tensorboard --logdir {run_dir / TENSORBOARD_DIR}\n"
    rates = Rates.of(config, start["world"], device.kind, device.described(), start["threads"])
    lines += f"rates are of {rates.peak:.3g} TFLOP/s a device ({rates.source}); " + "".join(
        f"{name}: {CONVENTIONS[name]}; " for name in SHOWN
    )
    sys.stdout.write(lines.removesuffix("; ") + "\n")
    sys.stdout.flush()
    metrics = Metrics(run_dir / METRICS_FILE, {**start, "rates": rates.as_json()}, rates, views)
    return [metrics, Console(config.log_every, sys.stdout, rates)]


def start_facts(
    config: TrainConfig,
    environment: Env,
    group: Group,
    device: Device,
    ops: native.Choice,
) -> dict[str, Any]:
    """What a start is on and of; who resumes adds from where."""
    return {
        "steps": config.steps,
        "run": environment.run_id,
        "attempt": environment.attempt,
        "world": group.world,
        "layout": config.layout(group.world).as_json(),
        "parameters": config.model.parameters(),
        "engine": config.engine,
        "zero": config.zero,
        "precision": config.precision,
        "native": [{"op": one.op, "backend": one.backend, "reason": one.reason} for one in ops.report()],
        "device": device.kind,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "config": config.as_json(),
    }


def start_lines(start: Mapping[str, Any]) -> str:
    """What rank 0's log begins with: what runs, on what, and which backend serves each op."""
    layout = " x ".join(f"{kind} {ranks}" for kind, ranks in start["layout"].items() if ranks > 1)
    ranks = f"{start['world']} ranks" + (f" ({layout})" if start["layout"]["tensor"] > 1 else "")
    lines = [
        f"{start['parameters']:,} parameters | {ranks} x {start['threads']} threads | "
        f"{start['device']} | {start['precision']} | {start['engine']} engine, zero {start['zero']} | "
        f"torch {start['torch']}",
    ]
    lines += [f"native {one['op']}: {one['backend']} ({one['reason']})" for one in start["native"]]
    lines.append(in_words(start["startup"]))
    lines += start["notes"]
    if start["resumed_from"]:
        lines.append(f"resumed from {start['resumed_from']} at step {start['step']}")
    return "\n".join(lines) + "\n"


class Startup:
    """Seconds of each part of a start, one after the other, from the process's first moment."""

    def __init__(self, age: float | None = None) -> None:
        """`age` is how long the process has run; by default the kernel is asked."""
        self.parts: dict[str, float] = {}
        self._last = time.monotonic() - (process_age() if age is None else age)

    def done(self, part: str) -> None:
        """What was done since the last call, or since the process began, was this part."""
        now = time.monotonic()
        self.parts[part] = round(now - self._last, 3)
        self._last = now


def process_age() -> float:
    """Seconds since this process began, to a hundredth; 0 where the system does not say."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def in_words(parts: Mapping[str, float]) -> str:
    """`started in 3.1 s: python 0.1, libraries 2.0, ...`, without the parts that took no time."""
    told = [f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05]
    return f"started in {sum(parts.values()):.1f} s" + (f": {', '.join(told)}" if told else "")
