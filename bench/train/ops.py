"""Measure how much faster each backend is here than plain torch: forward and backward.

    python -m bench.train.ops [--repeat 15] [--threads 1] [--json]

Both run in turn in one process, with the allocator settings that the launcher gives every rank; a row shows
the ratio of the medians. Copying the inputs is not measured. With one thread, as a rank among many has, the
time is processor time, which is reliable on a busy machine. With more threads it is wall time, which is
not, because threads wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from clusterctl.contract import MALLOC_TUNING

# The number of tensors, of 1,048,576 numbers each.
WEIGHTS = 32


@dataclass(frozen=True)
class Row:
    """One op, case and backend, with the milliseconds of plain torch and of the backend."""

    op: str
    backend: str
    case: str
    dtype: str
    eager_ms: float
    native_ms: float
    ratio: float


def measure(repeat: int, threads: int) -> list[Row]:
    """Return a row for every backend that runs here, except the reference."""
    import torch

    import native
    from native import cases

    if threads:
        torch.set_num_threads(threads)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    reference = native.choose("cpu", "reference")
    rows = []
    for status in native.survey("cpu"):
        if status.backend == "reference" or not status.available:
            continue
        chosen = native.choose("cpu", {status.op: status.backend})
        for case in cases.large_cases():
            if case.op == status.op:
                both = [getattr(reference, case.op), getattr(chosen, case.op)]
                both = [partial(op, **case.arguments) for op in both]
                eager, own = medians(both, case.inputs(), repeat, clock)
                dtype = str(case.dtype).removeprefix("torch.")
                rows.append(Row(case.op, status.backend, case.name, dtype, eager, own, eager / own))
        rows += of_weights(status.op, status.backend, [reference, chosen], repeat, clock)
    return rows


def of_weights(op: str, backend: str, both: list, repeat: int, clock: Callable[[], float]) -> list[Row]:
    """Return rows for the ops that process all weights once per step and have no backward pass."""
    import torch

    if op not in ("adamw", "square_sum"):
        return []
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        held, averages, squares = ([torch.rand(1 << 20) for _ in range(WEIGHTS)] for _ in range(3))
        gradients = [torch.rand(1 << 20).to(dtype) for _ in held]
        lowered = [None if dtype == torch.float32 else tensor.to(dtype) for tensor in held]
        numbers = ([0.1] * WEIGHTS, 10, 1e-4, (0.9, 0.95), 1e-8)
        given = (
            (gradients,) if op == "square_sum" else (held, gradients, averages, squares, lowered, *numbers)
        )
        times: list[list[float]] = [[], []]
        for _ in range(repeat + 2):
            for choice, own in zip(both, times, strict=True):
                start = clock()
                getattr(choice, op)(*given)
                own.append(clock() - start)
        eager, ours = (statistics.median(own[2:]) * 1e3 for own in times)
        name = str(dtype).removeprefix("torch.")
        rows.append(Row(op, backend, f"{WEIGHTS} x 1,048,576", name, eager, ours, eager / ours))
    return rows


def medians(ops: list[Callable], inputs: tuple, repeat: int, clock: Callable[[], float]) -> list[float]:
    """Return the median milliseconds of each op; they run in turn, after two warm-up rounds."""
    times: list[list[float]] = [[] for _ in ops]
    for _ in range(repeat + 2):
        for op, own in zip(ops, times, strict=True):
            own.append(once(op, inputs, clock))
    return [statistics.median(own[2:]) * 1e3 for own in times]


def once(op: Callable, inputs: tuple, clock: Callable[[], float]) -> float:
    """Return the seconds by `clock` of one forward and backward pass on copies of the inputs."""
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    # In a model the inputs of an op are not leaves; a view costs nothing.
    given = [x.view_as(x) if x.requires_grad else x for x in leaves]
    start = clock()
    value = op(*given)
    value.backward(value.detach() if value.dim() else None)
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC_TUNING.items()):
        # glibc reads them before main(), so this process restarts itself with them.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC_TUNING})
    rows = measure(options.repeat, options.threads)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'op':<21}{'backend':<9}{'case':<22}{'type':<10}{'eager ms':>9}{'native ms':>11}{'ratio':>7}")
    for row in rows:
        print(
            f"{row.op:<21}{row.backend:<9}{row.case:<22}{row.dtype:<10}"
            f"{row.eager_ms:>9.2f}{row.native_ms:>11.2f}{row.ratio:>7.2f}"
        )


if __name__ == "__main__":
    main()
