"""Measure how much faster each backend on this machine is than plain torch: forward and backward.

    python -m bench.train.ops [--repeat 15] [--threads 1] [--compile] [--only OP ...] [--json]
    python -m bench.train.ops --levels [--repeat 15] [--threads 1]    # attention by each kernel, in turn

All backends take turns in one process, with the buffers that every rank of a launch has: the allocator settings of the
launcher and the pool of `native.memory`. A row shows medians. If torch has no bf16 products for the processor, its time
for them is left out, because it takes minutes. The last column is our time over the time that it takes to read and
write the necessary bytes at this machine's rate of copying, measured before and after each case; products have no such
value. Copying the inputs is not measured. With one thread, which a rank among many has, the time is processor time,
which is reliable on a busy machine. With more threads it is wall time, which is not, because threads wait for each
other.

DeepSpeed's AdamW takes part if it is installed. `python -m bench.hardware` measures the ops on GPUs and NPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from bench.field import Option, aligned, in_turn, read_options, timed
from clusterctl.wire.contract import MALLOC_TUNING

# The number of tensors, each of 1,048,576 numbers.
WEIGHTS = 32
PRODUCTS = ("attention", "linear", "linear_cross_entropy", "grouped_linear")
# AdamW's learning rate.
RATE = 1e-4


@dataclass(frozen=True)
class Row:
    """One op, case and backend, with the milliseconds of plain torch, of torch.compile and of the backend."""

    op: str
    backend: str
    case: str
    dtype: str
    eager_ms: float | None
    native_ms: float
    ratio: float | None
    compiled_ms: float | None = None
    over_least: float | None = None
    """Our time over the time to read and write the necessary bytes; None for products."""
    others: Mapping[str, float] = field(default_factory=dict)
    """The milliseconds of other projects, by name."""


@dataclass(frozen=True)
class Request:
    """The options of a measurement."""

    repeat: int
    threads: int
    compiled: bool
    only: tuple[str, ...]
    """The ops that are measured; all of them if this is empty."""


def measure(request: Request) -> list[Row]:
    """Return a row for every backend that works here, except the reference."""
    import torch

    import native
    from native import products
    from tests.support import op_cases as cases

    if request.threads:
        torch.set_num_threads(request.threads)
    use_pool()
    clock = clock_of()
    reference = native.choose("cpu", "reference")
    rows = []
    for status in native.survey("cpu"):
        if (
            status.backend == "reference"
            or not status.available
            or (request.only and status.op not in request.only)
        ):
            continue
        chosen = native.choose("cpu", {status.op: status.backend})
        for case in (case for case in cases.large_cases() if case.op == status.op):
            plain, run = (partial(getattr(ops, case.op), **case.arguments) for ops in (reference, chosen))
            inputs = case.inputs()
            peers = [] if case.op in PRODUCTS and products.widens(inputs[0]) else [plain]
            if request.compiled and peers:
                # After eight versions of one function torch.compile runs the rest without compilation.
                torch.compiler.reset()
                peers.append(torch.compile(plain, dynamic=False))
            # Other virtual machines share the memory, so the rate may double within minutes.
            before = copy_rate(clock)
            own, *times = medians([run, *peers], inputs, request.repeat, clock)
            eager, compiled = (*times, None, None)[:2]
            rate = (before + copy_rate(clock)) / 2
            least = least_bytes(case.op, run, inputs) / rate * 1e3
            rows.append(
                Row(
                    case.op,
                    status.backend,
                    case.name,
                    str(case.dtype).removeprefix("torch."),
                    eager,
                    own,
                    eager / own if eager else None,
                    compiled,
                    own / least if least else None,
                )
            )
        rows += of_weights(status.op, status.backend, [reference, chosen], request, clock)
    return rows


def clock_of() -> Callable[[], float]:
    """Return the clock: processor time of one thread, else wall time."""
    import torch

    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def use_pool() -> None:
    """Take torch's buffers from the pool, as a rank of a launch does."""
    from native.memory.torch_pool import serve_torch

    if why := serve_torch():
        print(f"buffers from glibc's heap: {why}", file=sys.stderr)


def copy_rate(clock: Callable[[], float]) -> float:
    """Return the bytes per second that this machine reads and writes while it copies 256 MB."""
    import torch

    source, target = torch.ones(2, 1 << 26)
    times = [timed(lambda: target.copy_(source), clock) for _ in range(7)]
    return 2 * source.nbytes / statistics.median(times[2:])


def least_bytes(op: str, run: Callable, inputs: tuple) -> int:
    """Return the bytes that both passes must read and write; 0 for products, which are not bound by memory.

    Forward: inputs and results. Backward: inputs, the results' gradients, and the inputs' gradients.
    """
    if op in PRODUCTS:
        return 0
    value = run(*(x.clone() for x in inputs))
    results = sum(each.nbytes for each in (value if isinstance(value, tuple) else (value,)))
    if op == "embedding":
        # Rows are read and written, also their gradients, and a whole table of gradients is written.
        return 3 * results + inputs[1].nbytes
    floats = [x.nbytes for x in inputs if x.is_floating_point()]
    # These only pass gradients on: they do not read the input again, and the residual's gradient is the result's.
    again = () if op in ("dropout_add", "rotary") else floats
    gradients = floats[:1] if op == "dropout_add" else floats
    return sum((*floats, *again, *gradients)) + 2 * results


def print_levels(repeat: int, threads: int) -> None:
    """Print the milliseconds of attention, forward and backward, by each kernel of this processor."""
    import torch

    from native.compiled import library
    from native.cpu import attention
    from tests.support import op_cases as cases

    if threads:
        torch.set_num_threads(threads)
    clock = clock_of()
    loaded = library.load()
    levels = {library.LEVELS[level]: level for level in range(loaded.level, -1, -1)}
    if library.attention_level() == 3:
        # The numbers of the kernels in attention/plain.cpp.
        levels = {"AMX": 2, "AVX512-BF16": 3, "AVX-512, widened": 4, **levels}
        del levels[library.LEVELS[2]]

    def at(level: int) -> Callable:
        def run(*inputs: torch.Tensor) -> torch.Tensor:
            object.__setattr__(loaded, "level", level)
            return attention.attention(*inputs)

        return run

    for case in (case for case in cases.large_cases() if case.op == "attention"):
        times = medians([at(level) for level in levels.values()], case.inputs(), repeat, clock)
        named = (f"{name} {ms:.2f}" for name, ms in zip(levels, times, strict=True))
        print(f"{case.name:<22}{str(case.dtype).removeprefix('torch.'):<10}{', '.join(named)} ms")


def of_weights(op: str, backend: str, both: list, request: Request, clock: Callable[[], float]) -> list[Row]:
    """Return rows for the ops that process all weights once per step and have no backward pass."""
    import torch

    from native.update import AdamWStep

    if op not in ("adamw", "square_sum"):
        return []
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        held, averages, squares = ([torch.rand(1 << 20) for _ in range(WEIGHTS)] for _ in range(3))
        gradients = [torch.rand(1 << 20).to(dtype) for _ in held]
        lowered = [None if dtype == torch.float32 else tensor.to(dtype) for tensor in held]
        numbers = ([0.1] * WEIGHTS, 10, RATE, (0.9, 0.95), 1e-8)
        given: tuple[Any, ...] = (gradients,)
        if op == "adamw":
            given = (AdamWStep(held, gradients, averages, squares, lowered, *numbers),)
        runs: dict[str, Callable] = {
            name: partial(getattr(choice, op), *given)
            for name, choice in zip(("eager", "ours"), both, strict=True)
        }
        if op == "adamw" and (other := other_adamw(held)):
            runs[other[0]] = partial(
                other[1].step, gradients, [None if x is None else x.clone() for x in lowered]
            )
        before = copy_rate(clock)
        times = in_turn(
            {name: partial(timed, run, clock) for name, run in runs.items()}, request.repeat, warm=2
        )
        ms = {name: statistics.median(own) * 1e3 for name, own in times.items()}
        eager, ours = ms.pop("eager"), ms.pop("ours")
        rate = (before + copy_rate(clock)) / 2
        # AdamW reads weight, gradient and two averages; it writes all but the gradient, and a bf16 copy.
        each = 12 + gradients[0].element_size() + 12 + (2 if dtype == torch.bfloat16 else 0)
        each = gradients[0].element_size() if op == "square_sum" else each
        least = each * WEIGHTS * (1 << 20) / rate * 1e3
        case, kind = f"{WEIGHTS} x 1,048,576", str(dtype).removeprefix("torch.")
        rows.append(Row(op, backend, case, kind, eager, ours, eager / ours, None, ours / least, ms))
    return rows


def other_adamw(held: list) -> tuple[str, Any] | None:
    """Return another project's AdamW over copies of `held`, and its name, if a step of it equals one of torch's."""
    import torch

    from bench.train.op_peers import OtherAdamW, adamw_of

    found = adamw_of()
    if not found:
        return None
    name, make = found
    start, gradient = torch.rand(2, 1000)
    theirs = OtherAdamW(make, [start], RATE)
    theirs.step([gradient], [None])
    expected = torch.nn.Parameter(start.clone())
    expected.grad = gradient.clone()
    torch.optim.AdamW([expected], lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    if (theirs.masters[0] - expected).abs().max() > 1e-3 * RATE:
        print(f"{name} adamw: differs from torch's, not measured", file=sys.stderr)
        return None
    return name, OtherAdamW(make, held, RATE)


def medians(ops: list[Callable], inputs: tuple, repeat: int, clock: Callable[[], float]) -> list[float]:
    """Return the median milliseconds of each op; they run in turn, after two warm-up rounds."""
    ways = {str(number): partial(run_once, op, inputs, clock) for number, op in enumerate(ops)}
    return [statistics.median(own) * 1e3 for own in in_turn(ways, repeat, warm=2).values()]


def run_once(op: Callable, inputs: tuple, clock: Callable[[], float]) -> float:
    """Return the seconds by `clock` of one forward and backward pass on copies of the inputs."""
    import torch

    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    # In a model an op's inputs are not leaves; a view costs nothing.
    given = [x.view_as(x) if x.requires_grad else x for x in leaves]
    start = clock()
    value = op(*given)
    # The numbers of rows per expert have no gradient.
    values = [each for each in (value if isinstance(value, tuple) else (value,)) if each.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    # Not `backward`, which copies a gradient that two leaves share.
    slopes = [each.detach() if each.dim() else None for each in values]
    torch.autograd.grad(values, wanted, slopes, allow_unused=True)
    return clock() - start


def main() -> None:
    options = read_options(
        __doc__,
        repeat=15,
        threads=Option(0, "0: torch's default"),
        json=False,
        compile=Option(False, "also measure torch.compile, which takes minutes"),
        only=Option((), "measure only these ops"),
        levels=Option(False, "measure attention at each instruction set"),
    )
    if any(os.environ.get(name) != value for name, value in MALLOC_TUNING.items()):
        # glibc reads these variables before main(), so the process restarts itself with them.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC_TUNING})
    if options.levels:
        print_levels(options.repeat, options.threads)
        return
    request = Request(options.repeat, options.threads, options.compile, tuple(options.only))
    rows = measure(request)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    lines: list[tuple[object, ...]] = [
        ("op", "backend", "case", "type", "eager ms", "compiled", "native ms", "ratio", "over least", "")
    ]
    for row in rows:
        values = (row.eager_ms, row.compiled_ms, row.native_ms, row.ratio, row.over_least)
        columns = ("-" if value is None else f"{value:.2f}" for value in values)
        others = ", ".join(f"{name} {ms:.2f} ms" for name, ms in row.others.items())
        lines.append((row.op, row.backend, row.case, row.dtype, *columns, others))
    print(aligned(lines))


if __name__ == "__main__":
    main()
