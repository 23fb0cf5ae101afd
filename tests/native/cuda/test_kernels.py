"""Triton's kernels, on a GPU or in its interpreter, against the meaning of every case."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import native
from native import reference
from native.cuda import blocks, language, norms
from native.fallback import report_fallback
from native.registry import BACKENDS, OPS
from tests.support import op_cases as cases

OURS = next(backend for backend in BACKENDS if backend.name == "cuda").modules
# Attention is torch's own: test_cases.py has it.
CASES = [case for case in cases.cases() if case.op in OURS and case.op != "attention"]
# Those for a CPU's threads take seconds in the interpreter, and a kernel has no other code for them.
IN_TURN = [case for case in CASES if case.name != "threads" or not language.interpreted()]
# The widest of the list takes seconds in the interpreter; the others have the same code.
WITH_ROWS = ("layer_norm", "rms_norm", "gelu", "swiglu")


def function(op: str) -> Callable[..., Tensor]:
    return getattr(importlib.import_module(OURS[op]), op)


def holds(case: cases.Case, inputs: tuple[Tensor, ...]) -> None:
    expected = cases.meaning(case, getattr(reference, case.op), inputs)
    actual = cases.run(case, function(case.op), inputs)
    assert actual.value.dtype == case.value_type
    assert actual.value.shape == expected.value.shape
    assert cases.error(actual.value, expected.value) <= case.value_error
    assert len(actual.gradients) == len(expected.gradients) > 0
    for ours, theirs in zip(actual.gradients, expected.gradients, strict=True):
        assert ours.dtype == case.dtype and ours.shape == theirs.shape
        assert cases.error(ours, theirs) <= case.gradient_error


@pytest.fixture(autouse=True)
def no_fallback() -> None:
    """A case that the reference computes would prove nothing."""
    warnings.filterwarnings("error", message="native .*: the reference computes")


@pytest.mark.parametrize("case", IN_TURN, ids=str)
def test_every_case(case: cases.Case) -> None:
    holds(case, case.inputs())


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("odd", "exact", "padded")], ids=str)
def test_inputs_with_gaps_between_rows_and_in_other_orders(case: cases.Case) -> None:
    def spread(x: Tensor) -> Tensor:
        if x.dim() != 2 or not x.is_floating_point():
            return x
        return torch.stack((x, x), 1)[:, 0]

    inputs = case.inputs()
    holds(case, tuple(map(spread, inputs)))
    holds(case, tuple(x.t().contiguous().t() if x.dim() == 2 else x for x in inputs))


@pytest.mark.parametrize("op", WITH_ROWS)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_spoils_its_row_alone(op: str, special: float) -> None:
    case = next(case for case in CASES if case.op == op and case.name in ("small", "exact"))
    x, *rest = case.inputs()
    x.view(-1, x.shape[-1])[1, 2] = special
    with torch.no_grad():
        actual, expected = (f(x, *rest, **case.arguments) for f in (function(op), getattr(reference, op)))
    if op == "gelu" and special == float("inf"):
        # torch's vectors say NaN on a CPU.
        expected[1, 2] = special
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("op", WITH_ROWS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (2, 0)])
def test_empty_tensors(op: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    parameters = [torch.ones(shape[-1], requires_grad=True) for _ in range(2)]
    given = {"layer_norm": parameters, "rms_norm": parameters[:1]}.get(op, [])
    out = function(op)(x, *given)
    out.sum().backward()
    assert out.numel() == 0 and x.grad.shape == x.shape
    assert all(torch.equal(each.grad, torch.zeros(shape[-1])) for each in given)


def test_no_tokens_have_no_mean() -> None:
    targets, weight = torch.empty(0, dtype=torch.int64), torch.ones(5, 4, requires_grad=True)
    logits = torch.empty(0, 5, requires_grad=True)
    assert function("cross_entropy")(logits, targets).isnan()
    loss = function("linear_cross_entropy")(torch.empty(0, 4, requires_grad=True), weight, targets, 5)
    loss.backward()
    assert loss.isnan() and torch.equal(weight.grad, torch.zeros(5, 4))


def test_a_target_outside_the_vocabulary_makes_the_loss_nan_and_reads_nothing() -> None:
    for target in (5, -1, 2**40, -(2**40)):
        assert function("cross_entropy")(torch.randn(2, 5), torch.tensor([1, target])).isnan()


@pytest.mark.parametrize("op", [op for op in OURS if any(case.op == op for case in CASES)])
def test_fp16_of_every_op(op: str) -> None:
    """The allowed errors are those of bf16."""
    own = [
        case for case in CASES if case.op == op and case.dtype == torch.bfloat16 and "huge" not in case.name
    ]
    for case in own[:2]:
        half = replace(case, dtype=torch.float16)
        holds(half, half.inputs())


@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy", "vocabulary_cross_entropy"])
def test_a_loss_scale_keeps_small_gradients_of_fp16(op: str) -> None:
    """A small probability over the number of tokens is below the smallest number of fp16, until it is scaled."""
    tokens, width, scale = 20, 40, 65536.0
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(tokens, width, generator=generator) * 3).half()
    targets = torch.randint(0, width, (tokens,), generator=generator)
    leaf, exact = (each.requires_grad_() for each in (x.clone(), x.double()))
    if op == "linear_cross_entropy":
        loss = function(op)(leaf, torch.eye(width).half(), targets, width)
    elif op == "cross_entropy":
        loss = function(op)(leaf * 1.0, targets)
    else:
        loss = function(op)(leaf * 1.0, targets, native.VocabularyPart(width))
    (loss * scale).backward()
    reference.cross_entropy(exact, targets).backward()
    assert leaf.grad is not None and exact.grad is not None
    wrong = (leaf.grad.double() / scale - exact.grad).abs() / exact.grad.abs()
    assert float(wrong.max()) < 1e-2 and float(exact.grad.abs().min()) < 2.0**-24


def test_two_runs_give_the_same_bytes() -> None:
    summed = (("add_layer_norm", "rows"), ("bias_gelu", "threads"), ("linear_cross_entropy", "padded"))
    for case in (case for case in CASES if (case.op, case.name) in summed and case.dtype == torch.float32):
        first, second = (cases.run(case, function(case.op), case.inputs()) for _ in range(2))
        for one, other in zip(
            (first.value, *first.gradients), (second.value, *second.gradients), strict=True
        ):
            assert torch.equal(one, other)


def test_offsets_of_more_than_two_billion_numbers() -> None:
    # 6 GB of addresses; only the pages of 192 numbers are touched.
    x = torch.empty(3, 2**30 + 64, dtype=torch.bfloat16)[:, :64].normal_()
    weight = torch.randn(64)
    expected = reference.layer_norm(x.contiguous(), weight, None)
    assert torch.equal(function("layer_norm")(x, weight, None), expected)
    logits, targets = x.clone(), torch.tensor([1, 63, 5])
    wanted = reference.cross_entropy(logits, targets)
    from native.cuda.cross_entropy import count_of, losses_of, mean_of

    count = count_of(targets, -100)
    losses = losses_of(x, targets, -100, count, 64, gradient=True)
    assert torch.allclose(mean_of(losses, count), wanted, rtol=1e-6)
    slopes = torch.softmax(logits.float(), 1)
    slopes[torch.arange(3), targets] -= 1
    assert cases.error(x, slopes / 3) < 6e-3


def test_what_has_no_kernel_is_computed_by_the_reference_and_reported_once() -> None:
    x = torch.randn(2, 4, dtype=torch.float64)
    report_fallback.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(function("gelu")(x), reference.gelu(x))
    assert [str(warning.message) for warning in seen] == [
        "native gelu: the reference computes this, because backend 'cuda' has no kernel for torch.float64"
    ]


def test_a_row_wider_than_a_program_holds_is_left_to_the_reference() -> None:
    wide = torch.randn(1, language.WIDEST + 1)
    report_fallback.cache_clear()
    with pytest.warns(RuntimeWarning, match="rows of at most 16,384 numbers, not 16,385"):
        function("rms_norm")(wide, torch.ones(language.WIDEST + 1))


@pytest.mark.skipif(not language.interpreted(), reason="a GPU runs the kernels here")
def test_in_the_interpreter_every_op_is_chosen_and_says_so() -> None:
    report = native.choose("cuda", {op: "cuda" for op in OURS if op != "attention"}).report()
    assert [chosen.op for chosen in report] == list(OPS)
    interpreted = {chosen.op for chosen in report if "interpreter" in chosen.reason}
    assert interpreted == OURS.keys() - {"attention"}


def test_a_device_without_a_row_in_the_table_takes_that_of_the_next_older_one() -> None:
    assert [blocks.nearest(own) for own in ((8, 0), (8, 7), (9, 5), (13, 0))] == ["8.0", "8.6", "9.0", "12.0"]
    for sizes in blocks.TABLE.values():
        assert all(n & (n - 1) == 0 for n in (sizes.flat, sizes.tile, sizes.columns))


@pytest.mark.parametrize("op", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_an_activation_alone_is_that_of_its_graph(op: str, dtype: torch.dtype) -> None:
    own, graph = cases.gradients_alone(importlib.import_module(f"native.cuda.{op}"), op, dtype)
    assert torch.equal(own, graph)


@pytest.mark.parametrize("centre", [True, False])
def test_without_gradient_a_narrow_tensor_is_added_to_a_wide_residual(centre: bool) -> None:
    x, residual = torch.randn(5, 96).bfloat16(), torch.randn(5, 96)
    weight, bias = torch.randn(2, 96)
    with torch.no_grad():
        if centre:
            total, normal = norms.add_layer_norm(x, residual, weight, bias)
            right = F.layer_norm(x + residual, (96,), weight, bias)
        else:
            total, normal = norms.add_rms_norm(x, residual, weight)
            right = F.rms_norm(x + residual, (96,), weight, 1e-5)
    assert torch.equal(total, x + residual) and normal.dtype == x.dtype
    assert torch.allclose(normal.float(), right, rtol=8e-3, atol=1e-6)
