"""The step `cases`: every case of every op on the device, in three types and both directions, twice.

The expected results are those of the reference in fp64 on the same device. The cases of attention with dropout are left
out on a GPU, because a GPU's own generator decides there; `captured` trains with it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

import torch

import native
from bench.hardware.step import emit, part
from bench.train.activities import runtime_of
from native import reference
from native.bounds import BF16
from tests.support import op_cases as cases
from tests.support.on_device import moved, tensors_on

TABLE = "cases of ops"
FP16 = torch.float16
# Numbers above the largest of fp16.
HUGE = ("huge", "huge rows")
# Three times 2^30.
LARGE = 3, 1 << 30


@dataclass
class Verdict:
    """The results of an op's cases by one backend."""

    op: str
    backend: str
    reason: str = ""
    cases: int = 0
    worst: float = 0.0
    """The largest error as a share of the allowed one."""
    differ: int = 0
    """Results that a second run gave with other bits."""
    refused: int = 0
    """Cases in a type that the backend refuses."""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def of_three_types(op: str) -> list[cases.Case]:
    """Return the cases of an op in fp32, bf16 and fp16; the last one has the allowed errors of bf16."""
    own = list(cases.cases(op))
    return own + [replace(case, dtype=FP16) for case in own if case.dtype == BF16 and case.name not in HUGE]


def check(op: str, device: str) -> list[Verdict]:
    """Run the cases of one op by each of its backends."""
    torch.set_num_threads(1)
    verdicts = []
    for status in native.survey(device):
        if status.op == op and status.backend != "reference":
            verdict = Verdict(op, status.backend, "" if status.available else status.reason)
            verdicts.append(verdict)
            began = time.monotonic()
            if status.available:
                run = getattr(native.choose(device, {op: status.backend}), op)
                for case in of_three_types(op):
                    compare(case, run, device, verdict)
            verdict.seconds = time.monotonic() - began
    return verdicts


def compare(case: cases.Case, run: object, device: str, verdict: Verdict) -> None:
    """Run one case twice and compare it with the reference."""
    if device != "cpu" and case.op == "attention" and "dropout" in case.arguments:
        return
    case = replace(case, arguments=moved(case.arguments, device))
    verdict.cases += 1
    try:
        with tensors_on(device):
            inputs = case.inputs()
        results = [cases.run(case, run, inputs) for _ in range(2)]  # type: ignore[arg-type]
        right = cases.meaning(case, getattr(reference, case.op), inputs)
    except TypeError as error:
        # A backend without this type says so.
        verdict.refused += 1
        print(error, file=sys.stderr)
        return
    except Exception as error:
        verdict.wrong.append(f"{case}: {type(error).__name__}: {str(error)[:120]}")
        return
    first, second = ([result.value, *result.gradients] for result in results)
    allowed = [case.value_error, *[case.gradient_error] * len(right.gradients)]
    for name, own, again, expected, most in zip(
        ("value", *["gradient"] * len(first)),
        first,
        second,
        (right.value, *right.gradients),
        allowed,
        strict=False,
    ):
        found = cases.error(own, expected)
        verdict.differ += not torch.equal(own.nan_to_num(), again.nan_to_num())
        verdict.worst = max(verdict.worst, found / most if most else float(found > 0))
        if not found <= most:
            verdict.wrong.append(f"{case} {name}: {found:.1e} over {most:.1e}")


def past_two_billion(device: str) -> None:
    """Run GELU and a norm, both ways, on more than 2^31 numbers; their last rows must be right."""
    table = "more than 2^31 numbers"
    free = runtime_of(device).mem_get_info()[0] if device != "cpu" else 0
    if free < 40e9:
        emit(table, op="gelu, layer_norm", right=f"left out: 40 GB are needed, {free / 1e9:.0f} are free")
        return
    ops = native.choose(device)
    x = torch.randn(LARGE[0] * LARGE[1] // 4096, 4096, device=device, dtype=BF16, requires_grad=True)
    weight, bias = torch.ones(4096, device=device), torch.zeros(4096, device=device)
    for name, run, plain in (
        ("gelu", lambda each: ops.gelu(each, "tanh"), lambda each: reference.gelu(each, "tanh")),
        (
            "layer_norm",
            lambda each: ops.layer_norm(each, weight, bias),
            lambda each: reference.layer_norm(each, weight.double(), bias.double()),
        ),
    ):
        with part(table, op=name):
            value = run(x)
            (slope,) = torch.autograd.grad(value, x, value.detach())
            few = x.detach()[-3:].double().requires_grad_()
            right = plain(few)
            (expected,) = torch.autograd.grad(right, few, value.detach()[-3:].double())
            errors = [cases.error(value.detach()[-3:], right.detach()), cases.error(slope[-3:], expected)]
            emit(table, op=name, right=max(errors) < 1e-2, value=errors[0], gradient=errors[1])
            del value, slope


def main() -> None:
    device = sys.argv[1]
    ops = dict.fromkeys(status.op for status in native.survey(device))
    tested = [op for op in ops if any(True for _ in cases.cases(op))]
    # The ops whose cases take longest begin first.
    tested.sort(key=lambda op: op not in ("attention", "linear_cross_entropy", "vocabulary_cross_entropy"))
    workers = max(1, min(8, len(os.sched_getaffinity(0))))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(check, op, device) for op in tested]):
            with part(TABLE):
                for verdict in future.result():
                    show(verdict)
    past_two_billion(device)


def show(verdict: Verdict) -> None:
    for line in verdict.wrong:
        print(line, file=sys.stderr)
    emit(
        TABLE,
        op=verdict.op,
        backend=verdict.backend,
        cases=verdict.cases,
        right=f"not available: {verdict.reason}" if verdict.reason else not verdict.wrong,
        wrong=len(verdict.wrong) or None,
        refused=verdict.refused or None,
        **{"of allowed error": verdict.worst, "other bits in run 2": verdict.differ, "s": verdict.seconds},
        first="; ".join(verdict.wrong[:2]),
    )


if __name__ == "__main__":
    main()
