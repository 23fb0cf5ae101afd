"""Run folders as a training leaves them, made without a training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.state import RankState, RunState, write_state
from tests.support.records import record_of

BEGAN = 1_790_000_000.0
# Seconds of a step, and from the launch to the first one.
STEP, START = 0.5, 4.0
CONFIG: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 2, "hidden": 64},
    "optimizer": {"lr": 1e-3},
    "global_batch": 16,
    "seed": 1234,
}


def step_line(step: int, steps: int, at: float, **more: Any) -> dict[str, Any]:
    """Return a step as the trainer writes it."""
    return {
        "event": "step",
        "step": step,
        "steps": steps,
        "loss": 2.0 + 4.0 / step,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "tokens": 2048 * step,
        "tokens_per_second": 2048 / STEP,
        "step_seconds": STEP,
        "skipped": False,
        "cause": "",
        "own_seconds": 0.4,
        "samples": 16,
        "consumed": 16 * step,
        "tflops": {"model": 2.0, "palm": 2.2},
        "of_peak": {"model": 0.25},
        "time": at,
        **more,
    }


def start_line(step: int, at: float, attempt: int, config: Mapping[str, Any] = CONFIG) -> dict[str, Any]:
    return {
        "event": "start",
        "step": step,
        "steps": 40,
        "attempt": attempt,
        "world": 4,
        "parameters": 940_800,
        "engine": "torch",
        "zero": 0,
        "precision": "fp32",
        "torch": "2.13.0",
        "native": [{"op": "gelu", "backend": "cpu", "reason": "C++"}],
        "startup": {"libraries": 3.0},
        "config": config,
        "time": at,
    }


def restarted_run(folder: Path, name: str = "tiny-1122-100000-abcd", **more: Any) -> RunDir:
    """Return a training of 40 steps whose first attempt failed at step 25, five steps after its checkpoint."""
    run = RunDir(folder / name)
    job = {"train": {"steps": 40}, **more.pop("job", {})}
    record = record_of({"node1": [0, 1], "node2": [2, 3]}, job=job, created=BEGAN, attempt=2)
    run.write_record(replace(record, run=name, **more))
    saved = {"event": "checkpoint", "path": "/nodes/node1/r/checkpoints/step-00000020", "bytes": 3_000_000}
    second = BEGAN + START + 25 * STEP + START
    lines = [
        start_line(0, BEGAN + START, 1),
        {"event": "eval", "step": 0, "loss": 7.0, "time": BEGAN + START},
        *(step_line(step, 40, BEGAN + START + step * STEP) for step in range(1, 26)),
        start_line(20, second, 2),
        *(step_line(step, 40, second + (step - 20) * STEP) for step in range(21, 41)),
        {"event": "eval", "step": 40, "loss": 2.5, "time": second + 20 * STEP},
        {"event": "memory", "step": 40, "bytes": [70, 90], "planned": [100, 120], "time": second + 20 * STEP},
        {**saved, "step": 40, "path": "/nodes/node1/r/checkpoints/step-00000040", "time": second + 20 * STEP},
    ]
    lines.insert(22, {**saved, "step": 20, "time": BEGAN + START + 20 * STEP})
    write_lines(run.metrics, lines)
    lost = BEGAN + START + 25 * STEP
    events = [
        {"time": BEGAN, "event": "planned", "ranks": 4, "attempt": 1},
        {"time": BEGAN + 1, "event": "started", "nodes": ["node1", "node2"], "ranks": 4, "attempt": 1},
        {"time": lost, "event": "failed", "node": "node2", "rank": 3},
        {"time": lost, "event": "restart", "why": "restart 1 of 3 now: rank 3 was killed"},
        {"time": lost + 1, "event": "started", "nodes": ["node1", "node2"], "ranks": 4, "attempt": 2},
        {"time": second + 21 * STEP, "event": "ended", "phase": "finished"},
    ]
    write_lines(run.events, events)
    killed = {"title": "rank 3 on node2 (device 1) was killed by signal 9 (SIGKILL)", "attempt": 1}
    run.write_json(run.attempt_cause(1), killed)
    end_run(run, Phase.FINISHED)
    return run


def end_run(run: RunDir, phase: Phase) -> None:
    """Record how a run ended."""
    ranks = tuple(
        RankState(rank, node=node, device=rank % 2, pid=100 + rank, exit_code=0, step=40)
        for node, numbers in run.read_record().ranks.items()
        for rank in numbers
    )
    write_state(run, RunState(phase, dict.fromkeys(run.read_record().ranks, phase), ranks))


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write lines of JSON as trainer and launcher do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
