"""Products of bf16 on a CPU that has none: computed in fp32 by blocks, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from native import products
from native.compiled import library
from native.cpu import linear, product  # noqa: F401  (`linear` offers the products with a gradient)
from native.cpu.add_wide import add_wide_

SHAPES = [(5, 7, 3), (130, 201, 75), (64, 1, 33), (1, 129, 1), (0, 8, 4), (6, 0, 5), (3, 9, 0)]


@pytest.fixture(autouse=True)
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(products, "SIDE", 64)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def is_rounded_once(actual: Tensor, exact: Tensor) -> bool:
    """Return whether each number is at most a little more than half a unit of bf16 off."""
    room = 0.51 * 2.0**-7 * exact.abs() + 1e-5
    return actual.dtype == torch.bfloat16 and bool(((actual.double() - exact).abs() <= room).all())


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_a_product_is_rounded_once(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    for a, b in ((drawn(m, k), drawn(k, n)), (drawn(k, m).t(), drawn(n, k).t())):
        exact = a.double() @ b.double()
        assert is_rounded_once(products.mm(a, b), exact)
        out = torch.full((m, n + 2), float("nan"), dtype=torch.bfloat16)
        products.mm(a, b, out[:, 1 : n + 1])
        assert is_rounded_once(out[:, 1 : n + 1], exact) and bool(out[:, [0, -1]].isnan().all())


def test_a_product_is_added() -> None:
    out, a, b = drawn(70, 66), drawn(70, 8), drawn(8, 66)
    exact = out.double() + 0.5 * (a.double() @ b.double())
    products.addmm_(out, a, b, 0.5)
    assert (out.double() - exact).abs().max() < 2.0**-7 * exact.abs().max()


@pytest.mark.parametrize("way", ["torch", "widened", "kernel"])
def test_a_product_is_added_to_an_fp32_tensor_or_is_its_first(
    way: str, monkeypatch: pytest.MonkeyPatch, our_products: None
) -> None:
    if way == "kernel" and torch.bfloat16 not in product.types():
        pytest.skip("the kernel has no products of bf16 on this processor")
    monkeypatch.setattr(products, "_wanted", [way == "kernel"])
    monkeypatch.setattr(products, "multiplies_bf16", lambda: way != "widened")
    a, b = drawn(130, 200), drawn(200, 66)
    exact = a.double() @ b.double()
    total = torch.full((130, 66), float("nan"))
    products.add_product_(total, a, b, add_wide_, True)
    assert (total.double() - exact).abs().max() < 4e-3 * exact.abs().max()
    products.add_product_(total, a, b, add_wide_, False)
    assert (total.double() - 2 * exact).abs().max() < 8e-3 * exact.abs().max()


def test_a_device_adds_a_product_to_an_fp32_tensor_in_one_call_without_rounding_it(
    monkeypatch: pytest.MonkeyPatch, our_products: None
) -> None:
    """The calls are those that torch has for CUDA alone; a CPU stands in for them."""
    calls = list[str]()
    plain = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype, out: torch.Tensor) -> torch.Tensor:
        calls.append("mm")
        return plain(a.to(out_dtype), b.to(out_dtype), out=out)

    def addmm(
        total: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        out: torch.Tensor,
    ) -> None:
        calls.append("addmm")
        assert out is total
        out.add_(plain(a.to(out_dtype), b.to(out_dtype)))

    a, b = drawn(130, 200), drawn(200, 66)
    exact = a.double() @ b.double()
    monkeypatch.setattr(products, "_wanted", [False])
    monkeypatch.setattr(products, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(products, "_adds_in_fp32", lambda x: True)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    total = torch.full((130, 66), float("nan"))
    for first in (True, False):
        products.add_product_(total, a, b, torch.Tensor.add_, first)
    assert calls == ["mm", "addmm"]
    assert (total.double() - 2 * exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
def test_a_bf16_tensor_is_added_to_an_fp32_tensor(
    compiled: library.Library, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level > compiled.level:
        pytest.skip(f"this processor's level is {library.LEVELS[compiled.level]}")
    monkeypatch.setattr("native.cpu.add_wide.load", lambda: replace(compiled, level=level))
    for count in (0, 1, 15, 33, (1 << 15) - 1, (1 << 15) + 17, 100_003):
        total, x = torch.randn(count), torch.randn(count).bfloat16()
        x[3:6] = torch.tensor([float("nan"), float("inf"), -0.0])[: len(x[3:6])]
        wanted = total + x.float()
        add_wide_(total, x)
        assert torch.equal(total.nan_to_num(7.0), wanted.nan_to_num(7.0)), count
        assert torch.equal(total.isnan(), wanted.isnan())
    with pytest.raises(AssertionError):
        add_wide_(torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.bfloat16).t())


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_and_its_gradients(has_bias: bool) -> None:
    x, weight = (drawn(*shape).requires_grad_() for shape in ((3, 50, 70), (131, 70)))
    bias = drawn(131).requires_grad_() if has_bias else None
    leaves = [x, weight, *([bias] if bias is not None else [])]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    upstream = drawn(3, 50, 131)
    result = products.linear(x, weight, bias)
    wanted = torch.nn.functional.linear(*exact)
    assert is_rounded_once(result, wanted.detach())
    result.backward(upstream)
    wanted.backward(upstream.double())
    for leaf, other in zip(leaves[:2], exact[:2], strict=True):
        assert leaf.grad is not None and other.grad is not None and is_rounded_once(leaf.grad, other.grad)
    if bias is not None:
        assert torch.allclose(bias.grad.double(), exact[2].grad, rtol=8e-3)  # type: ignore[union-attr, arg-type]


def test_autocast_rounds_the_operands() -> None:
    x, weight = drawn(9, 70).float().requires_grad_(), drawn(5, 70).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        result = products.linear(x, weight)
    assert is_rounded_once(result, x.detach().double() @ weight.detach().double().t())
    result.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_other_types_are_torchs() -> None:
    a, b = torch.randn(9, 70), torch.randn(70, 5)
    assert torch.equal(products.mm(a, b), a @ b)
    assert torch.equal(products.linear(a, b.t()), torch.nn.functional.linear(a, b.t()))
    assert torch.equal(products.addmm_(torch.ones(9, 5), a, b, 2.0), torch.ones(9, 5).addmm_(a, b, alpha=2.0))


@pytest.mark.parametrize("k", [1, 33, 34, 75])
def test_torch_gets_no_matrix_with_gaps_whose_lines_end_within_a_step(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beside a matrix is not part of it: torch's products by AMX read up to 31 numbers further."""
    monkeypatch.setattr(products, "multiplies_bf16", lambda: True)
    given: list[Tensor] = []

    def note(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda a, b, *rest, **named: (given.extend((a, b)), function(a, b, *rest, **named))[1]

    monkeypatch.setattr(torch, "mm", note(torch.mm))
    monkeypatch.setattr(products.F, "linear", note(products.F.linear))
    products.use_kernel(False)
    try:
        a, b = drawn(40, k + 5)[:, 3 : k + 3], drawn(k + 2, 40)[1 : k + 1, :39]
        assert is_rounded_once(products.mm(a, b), a.double() @ b.double())
        assert is_rounded_once(products.mm(b.t(), a.t()), b.t().double() @ a.t().double())
        assert is_rounded_once(products.linear(a, b.t()), a.double() @ b.double())
        products.add_product_(torch.zeros(40, 39), a, b, add_wide_, True)
    finally:
        products.use_kernel(True)
    assert len(given) >= 8
    assert all(x.is_contiguous() or x.t().is_contiguous() for x in given), [x.stride() for x in given]
