"""Ascend's ops hand CANN's kernels what these document: held to the cases through kernels that mean the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from native import reference
from native.fallback import report_fallback
from native.masks import Dropout, Mask
from native.npu import adamw as npu_adamw
from native.npu import attention as npu_attention
from native.npu import layer_norm as npu_layer_norm
from native.npu import library
from native.npu import library as npu_library
from native.npu import rotary as npu_rotary
from native.update import AdamWStep
from tests.support import op_cases as cases
from tests.support.npu_node import documented_kernels as documented


@pytest.fixture(autouse=True)
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    kernels = {name: getattr(documented, name) for name in dir(documented) if name.startswith("npu_")}
    library = SimpleNamespace(**kernels)
    # torch_npu has these only among torch's ops.
    for name in [name for name in kernels if name.endswith("_backward")]:
        monkeypatch.setattr(torch.ops.npu, name, kernels[name], raising=False)
        delattr(library, name)
    monkeypatch.setitem(sys.modules, "torch_npu", library)
    # On an NPU this is CANN's, with sums in fp32; the CPU's own sums the weight's gradient in bf16.
    monkeypatch.setattr(npu_layer_norm, "F", SimpleNamespace(layer_norm=documented.layer_norm))
    npu_library.chips.cache_clear()
    yield library
    npu_library.chips.cache_clear()


OWN = (
    "layer_norm",
    "rms_norm",
    "add_layer_norm",
    "add_rms_norm",
    "gelu",
    "bias_gelu",
    "swiglu",
    "rotary",
    "cross_entropy",
    "linear_cross_entropy",
    "grouped_linear",
    "attention",
)
CASES = [case for op in OWN for case in cases.cases(op)]


def function(op: str) -> Callable[..., Tensor]:
    return getattr(importlib.import_module(f"native.npu.{op}"), op)


def holds(case: cases.Case, inputs: tuple[Tensor, ...]) -> None:
    expected = cases.meaning(case, getattr(reference, case.op), inputs)
    actual = cases.run(case, function(case.op), inputs)
    # The stand-ins compute with torch's kernels.
    value_error, gradient_error = case.allowed("reference")
    assert actual.value.dtype == case.value_type
    assert cases.error(actual.value, expected.value) <= value_error
    assert len(actual.gradients) == len(expected.gradients) > 0
    for ours, theirs in zip(actual.gradients, expected.gradients, strict=True):
        assert ours.dtype == case.dtype and ours.shape == theirs.shape
        assert cases.error(ours, theirs) <= gradient_error


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_through_kernels_that_check_their_arguments(case: cases.Case) -> None:
    holds(case, case.inputs())


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("odd", "exact", "padded")], ids=str)
def test_inputs_in_other_orders_and_weights_in_fp32(
    case: cases.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = case.inputs()
    holds(case, tuple(x.t().contiguous().t() if x.dim() == 2 else x for x in inputs))
    if case.op in ("layer_norm", "rms_norm") and case.dtype == torch.bfloat16:
        wide = tuple(x.float().requires_grad_() for x in inputs[1:])
        expected = getattr(reference, case.op)(inputs[0], *wide, **case.arguments)
        assert torch.equal(function(case.op)(inputs[0], *wide, **case.arguments), expected)
        if case.op == "rms_norm":
            # CANN's kernel with the addition takes no fp32 weight, and the reference makes fp32 copies.
            monkeypatch.setattr("native.npu.add_rms_norm.plain", None)
            total, out = function("add_rms_norm")(inputs[0], inputs[0], *wide, **case.arguments)
            given = total.detach(), *wide
            assert torch.equal(out, reference.rms_norm(*given, **case.arguments))


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "gelu", "swiglu"])
def test_no_empty_tensor_reaches_a_kernel(op: str) -> None:
    x = torch.empty(0, 8, requires_grad=True)
    weights = {"layer_norm": 2, "rms_norm": 1}.get(op, 0)
    out = function(op)(x, *(torch.ones(8) for _ in range(weights)))
    out.sum().backward()
    assert out.numel() == 0 and x.grad.shape == (0, 8)


def test_more_rows_than_the_kernel_takes_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("native.npu.cross_entropy.MOST_ROWS", 2)
    for case in (case for case in CASES if case.name == "some ignored"):
        holds(case, case.inputs())


def test_a_type_without_a_kernel_is_computed_by_the_reference_and_reported_once() -> None:
    report_fallback.cache_clear()
    x = torch.randn(2, 8, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="backend 'npu' has no kernel for torch.float64") as seen:
        for _ in range(2):
            assert torch.equal(function("swiglu")(x), reference.swiglu(x))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda cann, x: cann.npu_rms_norm(x[0], torch.ones(8), 1e-5),
        lambda cann, x: cann.npu_rms_norm(x.bfloat16(), torch.ones(8, dtype=torch.float16), 1e-5),
        lambda cann, x: cann.npu_add_rms_norm(x, x, torch.ones(8, dtype=torch.bfloat16)),
        lambda cann, x: cann.npu_swiglu(x.t()),
        lambda cann, x: cann.npu_rotary_mul(x.view(1, 1, 3, 8), *[x.view(1, 3, 1, 8)] * 2),
        lambda cann, x: cann.npu_rotary_mul(x.view(1, 3, 1, 8), *[x[:1].view(1, 1, 1, 8)] * 2, "quarter"),
        lambda cann, x: cann.npu_rotary_mul(x.view(3, 1, 1, 8), *[x.view(3, 1, 1, 8)] * 2, "interleave"),
        lambda cann, x: cann.npu_rotary_mul(x.view(1, 3, 1, 8), *[2 + x[:1].view(1, 1, 1, 8)] * 2),
        lambda cann, x: cann.npu_swiglu(x[:0]),
        lambda cann, x: cann.npu_gelu(x, approximate="fast"),
        lambda cann, x: cann.npu_cross_entropy_loss(x, torch.tensor([0, -100, 1])),
        lambda cann, x: cann.npu_cross_entropy_loss(
            x.requires_grad_(), torch.tensor([0, 1, 1]), ignore_index=1
        ),
        lambda cann, x: cann.npu_fusion_attention(*[x.view(1, 1, 3, 8)] * 3, 2, "BNSD"),
        lambda cann, x: cann.npu_fusion_attention(
            *[x.view(1, 1, 3, 8)] * 3, 1, "BNSD", atten_mask=torch.ones(3, 3, dtype=torch.bool), sparse_mode=3
        ),
        lambda cann, x: cann.npu_apply_adam_w(*range(7), x, None, False, False, out=(x.bfloat16(), x, x)),
    ],
)
def test_the_stand_ins_refuse_what_the_documentation_refuses(torch_npu: Any, call: Any) -> None:
    with pytest.raises(RuntimeError, match="CANN"):
        call(torch_npu, torch.rand(3, 8))


def test_a_machine_without_torch_npu_or_without_an_npu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"torch_npu": None}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found.get(name))
    assert library.why_not("npu_gelu") == "torch_npu is not installed"
    found["torch_npu"] = True
    # A broken CANN: torch_npu is there, but torch could not load it.
    assert library.why_not("npu_gelu") == "torch sees no NPU"
    seen = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "Ascend910B2")
    monkeypatch.setattr(torch, "npu", seen, raising=False)
    assert library.why_not("npu_gelu", "npu_swiglu") == ""
    assert library.why_not("npu_gelu", "npu_none") == "this torch_npu has no npu_none"
    # An Ascend910B without a digit is of the first generation.
    for name in ("Ascend910A", "Ascend910ProB", "Ascend910PremiumA", "Ascend910B"):
        library.chips.cache_clear()
        seen.get_device_name = lambda name=name: name
        assert (
            library.why_not("npu_gelu", "npu_swiglu") == "chips of the first generation have no such kernel"
        )
        assert library.why_not("npu_gelu", "npu_gelu_backward") == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_of_a_sum_has_a_gradient_with_fp32_weights(dtype: torch.dtype) -> None:
    def ran(op: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x, residual = (torch.randn(5, 16).to(dtype).requires_grad_() for _ in range(2))
        weight, bias = (torch.randn(16, requires_grad=True) for _ in range(2))
        total, out = op(x, residual, weight, bias)
        torch.autograd.backward([total, out], [torch.ones_like(total), torch.randn(5, 16).to(dtype)])
        return total, out, x.grad, residual.grad, weight.grad, bias.grad

    for ours, theirs in zip(ran(function("add_layer_norm")), ran(reference.add_layer_norm), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def form_of(
    torch_npu: Any, monkeypatch: pytest.MonkeyPatch, *tensors: Tensor, **named: Any
) -> dict[str, Any]:
    """Return the arguments by name of the kernel's one call."""
    seen: list[dict[str, Any]] = []

    def kernel(*given: Any, **form: Any) -> Any:
        seen.append(form)
        return documented.npu_fusion_attention(*given, **form)

    monkeypatch.setattr(torch_npu, "npu_fusion_attention", kernel)
    actual, expected = (op(*tensors, **named) for op in (npu_attention.attention, reference.attention))
    assert cases.error(actual, expected) < 1e-6
    (form,) = seen
    return form


NUMBERS = torch.tensor([[0, 0, 1, 1, 1, 4], [2, 2, 2, 2, 3, 3]])


@pytest.mark.parametrize(
    ("named", "form"),
    [
        ({}, {"sparse_mode": 3}),
        ({"causal": False}, {"sparse_mode": 0}),
        ({"mask": Mask(3)}, {"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 0}),
        ({"mask": Mask(source=torch.tensor([0, 4]))}, {"sparse_mode": 6, "prefix": [0, 4]}),
        (
            {"mask": Mask(documents=NUMBERS)},
            {"sparse_mode": 3, "input_layout": "TND", "actual_seq_qlen": [2, 5, 6, 10, 12]},
        ),
        # A number that comes back, and a window inside documents, need the whole mask.
        ({"mask": Mask(documents=torch.tensor([[0, 1, 0, 0, 0, 0]] * 2))}, {"sparse_mode": 1}),
        ({"mask": Mask(2, NUMBERS)}, {"sparse_mode": 1}),
    ],
)
def test_each_mask_takes_the_form_that_the_kernel_has_for_it(
    named: dict[str, Any], form: dict[str, Any], torch_npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2))
    called = form_of(torch_npu, monkeypatch, q, k, v, **named)
    assert {"input_layout": "BNSD", "sparse_mode": 0, **called} == {**called, "keep_prob": 1.0, **form}
    assert called["scale"] == 8**-0.5


@pytest.mark.parametrize(
    "mask", [Mask(), Mask(3), Mask(source=torch.tensor([0, 4])), Mask(2, NUMBERS)], ids=str
)
def test_heads_that_lie_row_by_row_are_given_as_they_lie(
    mask: Mask, torch_npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(2, 6, heads, 8).transpose(1, 2) for heads in (4, 2, 2))
    assert form_of(torch_npu, monkeypatch, q, k, v, mask=mask)["input_layout"] == "BSND"


@pytest.mark.parametrize(("samples", "interleaved"), [(1, False), (2, False), (1, True)])
def test_rotary_turns_heads_that_lie_row_by_row(samples: int, interleaved: bool) -> None:
    report_fallback.cache_clear()
    q, k = (torch.randn(2, 1200, heads, 8).transpose(1, 2).requires_grad_() for heads in (4, 1))
    angles = torch.rand(samples, 1, 1200, 4)
    results = [
        op(q, k, angles.cos(), angles.sin(), interleaved) for op in (npu_rotary.rotary, reference.rotary)
    ]
    for ours, theirs in zip(*results, strict=True):
        assert cases.error(ours, theirs) < 1e-6
    slopes = [torch.autograd.grad([part.square().sum() for part in made], (q, k)) for made in results]
    for ours, theirs in zip(*slopes, strict=True):
        assert cases.error(ours, theirs) < 1e-6
    assert results[0][0].transpose(1, 2).is_contiguous()


def test_prefixes_shorter_than_the_cache_and_too_many_of_them(
    torch_npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 7, 8)
    form = form_of(torch_npu, monkeypatch, q, k, k, mask=Mask(source=torch.tensor([1, 6])))
    assert form["prefix"] == [4, 6]
    many = torch.randn(33, 1, 2, 4)
    form = form_of(
        torch_npu, monkeypatch, many, many, many, mask=Mask(source=torch.ones(33, dtype=torch.int64))
    )
    assert form["sparse_mode"] == 1


def test_rotary_keeps_the_angles_alone_and_leaves_to_the_reference_what_the_kernel_refuses() -> None:
    report_fallback.cache_clear()
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 1, 5, 8)
    angles = torch.rand(2, 1, 5, 4)
    with pytest.warns(RuntimeWarning, match="the same angles for all samples if pairs are interleaved"):
        actual = npu_rotary.rotary(q, k, angles.cos(), angles.sin(), True)
    for ours, theirs in zip(actual, reference.rotary(q, k, angles.cos(), angles.sin(), True), strict=True):
        assert torch.equal(ours, theirs)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        npu_rotary.rotary(q.requires_grad_(), k, angles.cos(), angles.sin())
    assert {x.shape for x in kept} == {angles.shape}


def test_dropped_probabilities_are_those_of_every_device() -> None:
    report_fallback.cache_clear()
    q = torch.randn(1, 2, 8, 4)
    dropout = Dropout(0.3, torch.tensor(5))
    with pytest.warns(RuntimeWarning, match="has no dropout that recomputation can repeat"):
        actual = npu_attention.attention(q, q, q, dropout=dropout)
    assert torch.equal(actual, reference.attention(q, q, q, dropout=dropout))


@pytest.mark.parametrize("registered", [False, True])
def test_an_update_is_the_reference_with_its_copy_in_bf16(
    registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`registered`: whether torch_npu has torch's fused AdamW; without it, one call of CANN updates each tensor."""
    shapes, decays = ((3, 5), (7,)), (0.1, 0.0)
    given = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    results, calls = [], list[str]()
    monkeypatch.setattr(npu_adamw, "fuses_adamw", lambda kind: registered)
    kernel = npu_adamw.library.kernel

    def noted(name: str) -> Any:
        calls.append(name)
        return kernel(name)

    monkeypatch.setattr(npu_adamw.library, "kernel", noted)
    for update in (reference.adamw, npu_adamw.adamw):
        held, gradients, means = ([one.clone() for one in part] for part in given)
        squares = [one.square() + 0.1 for one in means]
        lowered = [torch.empty(3, 5, dtype=torch.bfloat16), None]
        tensors = (held, gradients, means, squares, lowered, decays)
        update(AdamWStep(*tensors, step=3, rate=0.01, betas=(0.9, 0.95), eps=1e-8, factor=0.5))
        results.append([*held, *means, *squares, lowered[0].float()])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert calls == ([] if registered else ["npu_apply_adam_w"])


def test_torch_npus_own_fused_adamw_is_found_by_torchs_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reference.fuses_adamw("npu")
    asked = list[tuple[str, str]]()

    def registered(*what: str) -> bool:
        asked.append(what)  # type: ignore[arg-type]
        return True

    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", registered)
    assert reference.fuses_adamw("npu")
    assert asked == [("aten::_fused_adamw_", "PrivateUse1")]
    assert not reference.fuses_adamw("meta")


@pytest.mark.parametrize("op", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_an_activation_alone_is_that_of_its_graph(op: str, dtype: torch.dtype) -> None:
    own, graph = cases.gradients_alone(importlib.import_module(f"native.npu.{op}"), op, dtype)
    assert torch.equal(own, graph)
