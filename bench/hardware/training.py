"""The step of one program's training: `python -m bench.hardware.training DEVICE MODEL SUBJECT [COMPILE]`.

One process trains with random tokens: this project's trainer as `launch` runs it (SUBJECT `ours`, with its key
`compile`), or a peer of bench/train. The median of steps after a warm-up; then what the device does in one more step.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.hardware.step import emit, part
from bench.train.field import Field, Subject, Work
from bench.train.spec import StepFigures
from clusterctl.wire.contract import METRICS_FILE
from trainer.plan.time import per_token

TABLE = "training steps, bf16"
SMALL = {"layers": 2, "hidden": 64, "heads": 2, "sequence": 64, "vocab": 384}
# Samples in a step, all in one micro-batch.
SAMPLES = 8
# A captured graph replays from the third step on; a compiled one may compile twice.
WARM = 4
MOST, SECONDS = 20, 4.0


def measure(device: str, model: str, kind: str, compiled: str) -> None:
    """Measure one subject and print its row."""
    by = f"{kind}, compile {compiled}" if compiled else kind
    about = {"model": "small" if device == "cpu" else model, "by": by}
    with part(TABLE, **about), tempfile.TemporaryDirectory() as folder:
        name = device if device == "cpu" else f"{device}:0"
        work = Work(SMALL if device == "cpu" else model, SAMPLES, "bf16", device=name)
        field = Field(Path(folder), work, more={"compile": compiled} if compiled else {}, threads=8)
        subject = Subject(kind, kind, tuned=True)
        try:
            field.start(subject)
            steps = take_steps(subject)
            show(field, subject, steps, about)
            subject.send("profile")
            show_activities(subject.step(), steps, about)
        finally:
            subject.end()
            print((Path(folder) / f"{kind}.log").read_text(errors="replace"), file=sys.stderr)


def show(field: Field, subject: Subject, steps: Sequence[StepFigures], about: Mapping[str, str]) -> None:
    """Print the times and the memory of a subject's steps."""
    seconds = statistics.median(step.seconds for step in steps)
    rate = field.tokens / seconds
    planned = planned_bytes(field.folder / f"run-{subject.name}" / METRICS_FILE)
    # On a CPU the memory of the libraries is not counted.
    peak = max(step.peak - step.base for step in steps)
    emit(
        TABLE,
        **about,
        ms=seconds * 1e3,
        least=min(step.seconds for step in steps) * 1e3,
        **{"tokens/s": rate, "TFLOP/s": rate * per_token(field.config.model)["palm"] / 1e12},
        **{"peak GB": peak / 1e9, "planned GB": planned and planned / 1e9},
        **{"of plan": planned and peak / planned, "first step s": subject.first, "loss": steps[-1].loss},
    )


def show_activities(recorded: StepFigures, steps: Sequence[StepFigures], about: Mapping[str, str]) -> None:
    """Print what the device does in a step; recording takes time, so `busy share` is of a step without it."""
    seconds = statistics.median(step.seconds for step in steps)
    busy = recorded.busy or None
    counts = {"activities": recorded.count, "starts": recorded.starts, "waits": recorded.waits}
    emit(
        "activities of a training step",
        **about,
        **{"busy ms": busy and busy * 1e3, "busy share": busy and busy / seconds},
        **(counts if busy else {}),
    )


def take_steps(subject: Subject) -> list[StepFigures]:
    """Return the figures of some steps after a warm-up."""
    for _ in range(WARM):
        subject.step()
    subject.send("reset")
    until, steps = time.monotonic() + SECONDS, list[StepFigures]()
    while len(steps) < 3 or (len(steps) < MOST and time.monotonic() < until):
        steps.append(subject.step())
    return steps


def planned_bytes(metrics: Path) -> float | None:
    """Return the peak memory that the planner expects; None for a peer."""
    if not metrics.exists():
        return None
    records = map(json.loads, metrics.read_text().splitlines())
    return next((float(max(record["planned"])) for record in records if record["event"] == "memory"), None)


if __name__ == "__main__":
    measure(sys.argv[1], sys.argv[2], sys.argv[3], "".join(sys.argv[4:]))
