"""Triton's kernels are ops of torch: torch.compile keeps one graph, and fake tensors of a GPU have their shapes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from native.compiled.library import NAMESPACE
from native.registry import BACKENDS
from tests.native.test_compile import EXCHANGING, NAMES, Recorder
from tests.support import op_cases as cases

OURS = next(backend for backend in BACKENDS if backend.name == "cuda").modules
SMALL = list(
    {
        case.op: case
        for case in reversed(list(cases.cases()))
        if case.op in OURS
        and case.op != "attention"
        and case.dtype == torch.bfloat16
        and case.name == NAMES.get(case.op, case.name)
        # A part of a vocabulary needs another rank.
        and case.name not in ("no tokens", "padding alone")
    }.values()
)


def of_cuda(case: cases.Case) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(OURS[case.op]), case.op)
    return function


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("case", [case for case in SMALL if case.op != EXCHANGING], ids=str)
def test_a_compiled_model_has_one_graph_and_the_same_bits(case: cases.Case) -> None:
    op, inputs = of_cuda(case), case.inputs()
    expected = cases.run(case, op, inputs)
    found = cases.run(case, torch.compile(op, fullgraph=True, backend="aot_eager"), inputs)
    pairs = zip((found.value, *found.gradients), (expected.value, *expected.gradients), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("op", ["add_layer_norm", "gelu", "rotary"])
def test_plain_tensors_give_the_same_bits_without_torchs_dispatcher(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in SMALL if case.op == op)
    inputs = case.inputs()
    with Recorder() as recorder:
        found = cases.run(case, of_cuda(case), inputs)
    assert not recorder.calls
    monkeypatch.setattr("native.compiled.op.PLAIN", ())
    right = cases.run(case, of_cuda(case), inputs)
    pairs = zip((found.value, *found.gradients), (right.value, *right.gradients), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_op_of_forward_and_backward_passes_torchs_check_and_has_its_shapes_on_a_gpu(
    case: cases.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only torch.compile takes the op that leaves the logits as they are.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: case.op == "cross_entropy")
    monkeypatch.setattr("native.compiled.op.PLAIN", ())
    with Recorder() as recorder:
        cases.run(case, of_cuda(case), case.inputs())
    monkeypatch.undo()
    assert recorder.calls
    for op, arguments in recorder.calls.items():
        assert op.name().startswith(f"{NAMESPACE}::cuda_")
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_autograd_registration"))
        expected = tensors_of(op(*arguments))
        with FakeTensorMode():
            found = tensors_of(op(*(on_gpu(x) if isinstance(x, Tensor) else x for x in arguments)))
        assert {each.device.type for each in found} <= {"cuda"}
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]


def on_gpu(x: Tensor) -> Tensor:
    # A dropout's state stays with the CPU.
    device = "cpu" if x.shape == (2,) and x.dtype == torch.int64 else "cuda"
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def tensors_of(results: Any) -> list[Tensor]:
    return [each for each in (results if isinstance(results, tuple) else (results,)) if each is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_seed_drops_the_same_numbers_as_on_a_cpu(dtype: torch.dtype, compiled: object) -> None:
    x, residual, upstream = torch.randn(3, 9, 1003).to(dtype)
    state = torch.tensor([1, (1 << 32) - 40])
    results = []
    for backend in ("cpu", "cuda"):
        op = importlib.import_module(f"native.{backend}.dropout_add").dropout_add
        place = "cpu" if backend == "cpu" else x.device
        leaf = x.detach().clone().to(place).requires_grad_()
        value = op(leaf, residual.to(place), None, state.to(place), 0.4)
        value.backward(upstream.to(place))
        results.append((value.detach().cpu(), leaf.grad.cpu()))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-6, atol=1e-6)
    assert torch.equal(results[0][1], results[1][1])
