"""Who watches a training on each rank, and what its start is told to be."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import native
from trainer.config import TrainConfig
from trainer.device import Device
from trainer.env import HEARTBEAT_DIR, METRICS_FILE, PROFILE_DIR, TENSORBOARD_DIR, Env
from trainer.events import Observer
from trainer.group import Group
from trainer.loop import pauses_after
from trainer.observers import Console, DrillObserver, Heartbeat, Metrics
from trainer.plan_flops import CONVENTIONS
from trainer.rates import TOLD, Rates
from trainer.startup import in_words


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
        from trainer.profiler import Profiler

        watching.append(Profiler(config.profile, device, run_dir / PROFILE_DIR, rank))
    return watching


def _of_rank_0(
    config: TrainConfig, run_dir: Path, device: Device, start: Mapping[str, Any]
) -> list[Observer]:
    views, lines = [], start_lines(start)
    if config.tensorboard:
        from trainer.tensorboard import EventFile

        views.append(EventFile(run_dir / TENSORBOARD_DIR).add)
        lines += f"tensorboard --logdir {run_dir / TENSORBOARD_DIR}\n"
    rates = Rates.of(config, start["world"], device.kind, device.described(), start["threads"])
    lines += f"rates are of {rates.peak:.3g} TFLOP/s a device ({rates.source}); " + "".join(
        f"{name}: {CONVENTIONS[name]}; " for name in TOLD
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
