"""Compare the plan's order of layouts with the measured order, for the same model and ranks on this machine.

    python -m bench.train.layout_order [--ranks 4] [--rounds 3] [--only WORD] [--precision fp32] [--json]

Two figures of the plan are measured first: a rank's rate of matrix products while all ranks multiply, and the bandwidth
of a sum over all ranks. The other figures are the plan's defaults. If there are more ranks than cores, idle stages of a
pipeline leave their cores to others; the plan does not model this and predicts a too large bubble. Layouts are trained
in turn. The fastest median of a round counts, because other load on the machine only makes a step slower. The exit code
is 1 if a slower layout was predicted to be faster by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.field import Option, in_turn, read_options, timed
from bench.train.ranks import run, train
from trainer.plan.hardware import hardware_of
from trainer.plan.resolve import plan_config
from trainer.plan.time import Cost, cost

STEPS, WARM = 4, 1
# Layouts whose predicted times differ by less than this fraction may be in any order.
ALIKE = 0.10
MODEL = {"layers": 8, "hidden": 512, "heads": 8, "sequence": 128, "vocab": 4096}
MICRO, BATCH = 1, 16
SUMMED_BYTES = 32 << 20
LAYOUTS: dict[str, dict[str, object]] = {
    "data": {},
    "data, zero 3": {"zero": 3},
    "data, recompute": {"recompute": "full"},
    "tensor": {"parallel": {"tensor": 0}},
    "pipeline": {"parallel": {"pipeline": 0}},
    "data x tensor": {"parallel": {"tensor": 2}},
    "data x pipeline": {"parallel": {"pipeline": 2}},
    "tensor x pipeline": {"parallel": {"tensor": 2, "pipeline": 2}},
}


@dataclass(frozen=True)
class Machine:
    """Measured properties of a rank of this machine."""

    tflops: float
    gbytes: float
    latency_ms: float


@dataclass(frozen=True)
class Row:
    layout: str
    predicted: float
    """Seconds per step."""
    measured: float
    parts: dict[str, float]
    """Parts of the prediction."""


def be_rank(precision: str) -> None:
    """Measure the rates of this rank while the other ranks measure theirs, and print them."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    kind = torch.float32 if precision == "fp32" else torch.bfloat16
    a, b = torch.randn(1024, 512, dtype=kind), torch.randn(2048, 512, dtype=kind)
    rate = 2 * a.shape[0] * b.numel() / _seconds(lambda: torch.nn.functional.linear(a, b), 200)
    whole = torch.zeros(SUMMED_BYTES // 4)
    world = dist.get_world_size()
    summed = _seconds(lambda: dist.all_reduce(whole), 10)
    gbytes = 2 * (world - 1) / world * SUMMED_BYTES / summed
    small = torch.zeros(1)
    latency = _seconds(lambda: dist.all_reduce(small), 200)
    print(
        json.dumps({"tflops": rate / 1e12, "gbytes": gbytes / 1e9, "latency_ms": latency * 1e3}), flush=True
    )
    dist.barrier()
    os._exit(0)


def _seconds(work: Any, times: int) -> float:
    """Return the median of the measured seconds, without the first fifth of them."""
    return statistics.median([timed(work) for _ in range(times)][times // 5 :])


def machine(ranks: int, precision: str) -> Machine:
    with tempfile.TemporaryDirectory() as folder:
        outputs = run(
            [sys.executable, "-m", "bench.train.layout_order", "--rank", precision], ranks, Path(folder)
        )
    results = [Machine(**json.loads(text.splitlines()[-1])) for text in outputs]
    return Machine(
        *(statistics.median(getattr(result, name) for result in results) for name in asdict(results[0]))
    )


def layouts(
    ranks: int, precision: str, hardware: dict[str, object]
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the layouts that can be trained on `ranks` ranks; 0 means all of them."""
    base = {
        "model": MODEL,
        "steps": STEPS,
        "micro_batch": MICRO,
        "global_batch": BATCH,
        "precision": precision,
        "eval": {"batches": 0},
        "hardware": {"kind": "cpu", "devices_per_node": ranks, **hardware},
    }
    seen = []
    for name, given in LAYOUTS.items():
        parallel = {key: value or ranks for key, value in given.get("parallel", {}).items()}
        part = {**base, **given, "parallel": parallel}
        found = plan_config({**part, "data": {"prefix": "x"}}, ranks)
        if not found.faults and parallel not in [layout for layout in seen if layout]:
            seen.append(parallel)
            yield name, part


def predicted(part: dict[str, object], ranks: int) -> Cost:
    config = plan_config({**part, "data": {"prefix": "x"}}, ranks).config
    return cost(config, config.layout(ranks), hardware_of(config, ranks))


def measured(part: dict[str, object], ranks: int) -> float:
    """Return the median time of a step."""
    return statistics.median(line["step_seconds"] for line in train(part, ranks)[WARM:])


def rows(ranks: int, rounds: int, precision: str, only: str) -> Iterator[Row]:
    found = machine(ranks, precision)
    figures = {"tflops": found.tflops, "node_gbytes": found.gbytes, "net_gbytes": found.gbytes}
    print(
        f"a rank of {ranks}: {found.tflops * 1e3:.0f} GFLOP/s in matrix products, {found.gbytes:.2f} GB/s"
        f" in sums, {found.latency_ms:.2f} ms for the smallest",
        file=sys.stderr,
    )
    chosen = {name: part for name, part in layouts(ranks, precision, figures) if only in name}
    took = in_turn({name: partial(measured, part, ranks) for name, part in chosen.items()}, rounds)
    for name, part in chosen.items():
        step = predicted(part, ranks)
        parts = {key: value for key, value in asdict(step).items() if key != "tokens"}
        yield Row(name, step.seconds, min(took[name]), parts)


def main() -> int:
    arguments = read_options(
        __doc__,
        ranks=4,
        rounds=3,
        only="",
        precision=Option("fp32", "", ("fp32", "bf16")),
        json=False,
        rank=Option(str, argparse.SUPPRESS),
    )
    if arguments.rank:
        be_rank(arguments.rank)
    found = list(rows(arguments.ranks, arguments.rounds, arguments.precision, arguments.only))
    if arguments.json:
        for row in found:
            print(json.dumps(asdict(row)))
        return 0
    by_plan = sorted(found, key=lambda row: row.predicted)
    by_clock = sorted(found, key=lambda row: row.measured)
    for index, row in enumerate(by_clock):
        most = ", ".join(f"{name} {part:.2f}" for name, part in row.parts.items() if part >= 0.005)
        print(
            f"{row.layout:<20} measured {row.measured:6.2f} s, {index + 1}.   predicted {row.predicted:6.2f} s,"
            f" {by_plan.index(row) + 1}.   {most}"
        )
    return 0 if in_order(by_clock) else 1


def in_order(by_clock: list[Row]) -> bool:
    """Return whether no slower layout was predicted to be faster by more than the tolerance."""
    return all(
        slower.predicted > faster.predicted * (1 - ALIKE)
        for index, faster in enumerate(by_clock)
        for slower in by_clock[index + 1 :]
    )


if __name__ == "__main__":
    sys.exit(main())
