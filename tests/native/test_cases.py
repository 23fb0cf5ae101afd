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
    case: cases.Case, backend: str, our_products: None
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_a_norm_with_frozen_weights_has_the_same_gradient_and_sums_none_of_the_weight(
    op: str, dtype: torch.dtype, compiled: object
) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(70, 24, generator=generator).to(dtype) for _ in range(2 if "add" in op else 1)]
    weights = [torch.randn(24, generator=generator) for _ in range(2 if "layer" in op else 1)]
    gradients = []
    for learns in (True, False):
        leaves = [each.clone().requires_grad_() for each in tensors]
        own = [each.clone().requires_grad_(learns) for each in weights]
        results = function(op, "cpu")(*leaves, *own)
        results = [each.square() for each in (results if "add" in op else [results])]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.backward(results, [torch.ones_like(each) for each in results])
        gradients.append([leaf.grad for leaf in leaves])
        assert all((each.grad is not None) == learns for each in own)
        # The weights' sums over pieces are the only sum of the backward pass.
        assert sum(event.name == "aten::sum" for event in profile.events()) == int(learns)
    for learned, frozen in zip(*gradients, strict=True):
        torch.testing.assert_close(frozen, learned, rtol=0, atol=0)


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


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("op", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_an_activation_alone_is_that_of_its_graph(
    op: str, dtype: torch.dtype, backend: str
) -> None:
    module = reference if backend == "reference" else importlib.import_module(f"native.cpu.{op}")
    own, graph = cases.gradients_alone(module, op, dtype)
    assert torch.equal(own, graph)
