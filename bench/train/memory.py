"""Compare the plan's memory with what ranks use on CPUs: predicted and measured peak of each case.

    python -m bench.train.memory [--only WORD] [--json]

Each case trains for some steps on random tokens; every rank is a process with the launcher's environment. The measured
value is the rank's peak resident memory minus its memory after loading the libraries, before a checkpoint is written.
The exit code is 1 if a prediction is more than 10 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.field import Option, read_options, status_of
from bench.train.ranks import run, write_config
from trainer.env import Env
from trainer.plan.memory import stages
from trainer.plan.resolve import read_config

STEPS = 2
ALLOWED = 0.10
GPT2 = {"model": "gpt2-124M", "micro_batch": 1}
SMALL = {
    "model": {"layers": 6, "hidden": 384, "heads": 6, "sequence": 256, "vocab": 50257},
    "micro_batch": 8,
}
BROAD = {
    "model": {"layers": 6, "hidden": 1024, "heads": 8, "sequence": 128, "vocab": 8192},
    "micro_batch": 2,
}
DROPPING = {
    "model": {"layers": 12, "hidden": 512, "heads": 8, "sequence": 512, "vocab": 8192, "dropout": 0.1},
    "micro_batch": 4,
}
BF16 = {"precision": "bf16"}
CASES: dict[str, tuple[int, dict[str, object]]] = {
    "124M fp32": (1, GPT2),
    "124M bf16": (1, {**GPT2, **BF16}),
    "124M bf16 batch 4": (1, {**GPT2, **BF16, "micro_batch": 4}),
    "124M bf16 batch 4 full": (1, {**GPT2, **BF16, "micro_batch": 4, "recompute": "full"}),
    "6x384 fp32 batch 8": (1, SMALL),
    "6x384 bf16 batch 8": (1, {**SMALL, **BF16}),
    "6x384 bf16 batch 8 x 2": (1, {**SMALL, **BF16, "global_batch": 16}),
    "12x512 dropout": (1, DROPPING),
    "6x1024 bf16 data 2": (2, {**BROAD, **BF16}),
    "6x1024 bf16 zero 1": (2, {**BROAD, **BF16, "zero": 1}),
    "6x1024 bf16 zero 2": (2, {**BROAD, **BF16, "zero": 2}),
    "6x1024 fp32 zero 3": (2, {**BROAD, "zero": 3}),
    "6x1024 bf16 tensor 2": (2, {**BROAD, **BF16, "parallel": {"tensor": 2}}),
    "6x1024 bf16 pipeline 2": (2, {**BROAD, **BF16, "parallel": {"pipeline": 2}, "global_batch": 8}),
}


@dataclass(frozen=True)
class Row:
    """One case, with the GB of the rank that uses most."""

    case: str
    ranks: int
    predicted: float
    measured: float
    off: float


def be_rank(file: Path) -> None:
    """Train as one rank; print the peak memory in bytes."""
    import torch

    from trainer.train.assemble import run_training

    environment = Env.read()
    config = read_config(json.loads(file.read_text()), environment.world_size)
    warm = torch.randn(256, 256, requires_grad=True)
    (warm @ warm).sum().backward()
    before = 1024 * status_of("self", "VmRSS")
    # Measure the peak from here on.
    Path("/proc/self/clear_refs").write_text("5")
    highest = 0

    def stop() -> bool:
        nonlocal highest
        highest = max(highest, 1024 * status_of("self", "VmHWM"))
        print(1024 * status_of("self", "VmHWM") - before, file=sys.stderr)
        return False

    run_training(config, environment, file.parent / f"run-{environment.rank}", stop)
    print(f"took {highest - before}", flush=True)
    os._exit(0)


def measure(ranks: int, train: dict[str, object]) -> int:
    """Return the bytes of the rank that used most."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [sys.executable, "-m", "bench.train.memory", "--rank", str(write_config(folder, train))]
        outputs = run(argv, ranks, folder)
    return max(int(text.rsplit("took ", 1)[1]) for text in outputs)


def rows(only: str) -> Iterator[Row]:
    for case, (ranks, given) in CASES.items():
        if only not in case:
            continue
        train = {"steps": STEPS, "eval": {"batches": 0}, **given}
        config = read_config({**train, "data": {"prefix": "tokens"}}, ranks)
        layout = config.layout(ranks)
        predicted = max(stage.memory.total for stage in stages(config, layout))
        measured = measure(ranks, train)
        yield Row(case, ranks, predicted / 1e9, measured / 1e9, predicted / measured - 1)


def main() -> int:
    arguments = read_options(__doc__, only="", json=False, rank=Option(Path, argparse.SUPPRESS))
    if arguments.rank:
        be_rank(arguments.rank)
    worst = 0.0
    for row in rows(arguments.only):
        worst = max(worst, abs(row.off))
        if arguments.json:
            print(json.dumps(asdict(row)), flush=True)
        else:
            figures = f"predicted {row.predicted:6.3f} GB  measured {row.measured:6.3f} GB  {row.off:+6.1%}"
            print(f"{row.case:<26} {row.ranks} ranks  {figures}", flush=True)
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
