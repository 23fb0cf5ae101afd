"""Every backend of every op against the op's meaning, in values and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from native import reference
from native.registry import BACKENDS, OPS
from tests.support import op_cases as cases

# CUDA's attention is that of `torch`. Triton's kernels need its interpreter (tests/native/cuda), and Ascend's
# need those of CANN: test_npu.py runs these cases through stand-ins.
ELSEWHERE = {("npu", op) for op in OPS} | {("cuda", op) for op in OPS}
BACKENDS_OF = {
    op: [one.name for one in BACKENDS if op in one.modules and (one.name, op) not in ELSEWHERE] for op in OPS
}
ALL = [(case, name) for case in cases.cases() for name in BACKENDS_OF[case.op]]


def function(op: str, backend: str) -> Callable[..., Tensor]:
    module = next(one.modules[op] for one in BACKENDS if one.name == backend)
    return getattr(importlib.import_module(module), op)


@pytest.mark.parametrize(("case", "backend"), ALL, ids=[f"{case}-{name}" for case, name in ALL])
def test_every_backend_gives_the_meaning_of_every_case(
    case: cases.Case, backend: str, compiled: object
) -> None:
    inputs = case.inputs()
    expected = cases.meaning(case, getattr(reference, case.op), inputs)
    actual = cases.run(case, function(case.op, backend), inputs)
    assert actual.value.dtype == case.value_type
    value_error, gradient_error = case.allowed(backend)
    assert cases.error(actual.value, expected.value) <= value_error
    assert len(actual.gradients) == len(expected.gradients) > 0
    for ours, theirs in zip(actual.gradients, expected.gradients, strict=True):
        assert ours.dtype == case.dtype
        assert cases.error(ours, theirs) <= gradient_error


def test_every_op_has_cases_in_both_types() -> None:
    # These have no gradient: test_adamw.py, test_paged_attention.py.
    assert {(case.op, case.dtype) for case in cases.cases()} == {
        (op, dtype)
        for op in OPS
        for dtype in (torch.float32, torch.bfloat16)
        if op not in ("adamw", "square_sum", "paged_attention")
    }


@pytest.mark.parametrize("case", [case for case in cases.cases() if case.name == "odd"], ids=str)
def test_the_allowed_error_would_catch_a_thousandth_or_a_hundredth(case: cases.Case) -> None:
    inputs = case.inputs()
    expected = cases.meaning(case, getattr(reference, case.op), inputs)
    wrong = expected.gradients[0] * (1.001 if case.dtype == torch.float32 else 1.01)
    assert cases.error(wrong, expected.gradients[0]) > case.gradient_error


def test_an_error_sees_what_is_not_finite() -> None:
    nan, inf = float("nan"), float("inf")
    expected = torch.tensor([1.0, nan, inf])
    assert cases.error(expected.clone(), expected) == 0
    for wrong in ([1.0, 0.0, inf], [1.0, nan, -inf], [nan, nan, inf], [1.0, nan, 3e38]):
        assert cases.error(torch.tensor(wrong), expected) == inf
