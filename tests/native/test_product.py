"""The kernel for products against fp64: every order of both matrices in memory, every edge, every way to write."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from native import products
from native.cpu import product
from tests.native.test_products import drawn

FP32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.usefixtures("our_products")


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    products.use_kernel(True)


@pytest.fixture(params=[FP32, BF16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if request.param not in product.types():
        pytest.skip(f"the kernel has no products of {request.param} on this processor")
    return request.param  # type: ignore[no-any-return]


def matrix(rows: int, columns: int, dtype: torch.dtype, order: str) -> Tensor:
    """Return random numbers in a larger tensor, whose rows or columns are contiguous."""
    height, width = (rows, columns) if order == "rows" else (columns, rows)
    x = torch.randn(height + 2, width + 5)[1 : height + 1, 3 : width + 3].to(dtype)
    apart = torch.full((height + 2, width + 5), float("nan"), dtype=dtype)[1 : height + 1, 3 : width + 3]
    apart.copy_(x)
    return apart if order == "rows" else apart.t()


def worst(actual: Tensor, exact: Tensor, least: float = 0.0) -> float:
    """Return the largest error over the largest number, or over `least` if all numbers are smaller."""
    return float((actual.double() - exact).abs().max() / max(float(exact.abs().max()), least))


def bound(dtype: torch.dtype) -> float:
    return 4e-3 if dtype == BF16 else 3e-6


SIZES = [
    *((m, n, k) for m in (1, 6, 7, 64) for n in (1, 63, 64, 65) for k in (2, 16, 34)),
    (200, 130, 98),
    # More than one chunk of the inner dimension, and a last chunk of few steps.
    (13, 70, 1540),
    (13, 70, 3100),
    # Few rows of the first matrix fill a cache.
    (50, 200, 40_000),
    # More than one group of panels is copied for the columns of the first matrix.
    (50, 3000, 3000),
]


@pytest.mark.parametrize(
    "orders", [(a, b) for a in ("rows", "columns") for b in ("rows", "columns")], ids=str
)
def test_sizes_and_orders(orders: tuple[str, str], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for m, n, k in SIZES:
        a, b = matrix(m, k, dtype, orders[0]), matrix(k, n, dtype, orders[1])
        exact = a.double() @ b.double()
        around = torch.full((m + 2, n + 2), 7.0, dtype=dtype)
        out = around[1:-1, 1:-1]
        assert product.serves(a, b, out), (m, n, k)
        product.product_(out, a, b)
        # The few numbers of a small result may all be close to 0, unlike the products that they sum.
        assert worst(out, exact, k**0.5) < bound(dtype), (m, n, k)
        out.fill_(7.0)
        assert bool((around == 7.0).all()), f"{m, n, k}: wrote beside the result"


def test_ways_to_write(dtype: torch.dtype) -> None:
    choose = random.Random(1)
    torch.manual_seed(1)
    for _ in range(120):
        m, n = choose.choice([5, 18, 67]), choose.choice([31, 64, 150, 192])
        k = choose.choice([8, 100, 1700, 3400])
        a = matrix(m, k, dtype, choose.choice(["rows", "columns"]))
        b = matrix(k, n, dtype, choose.choice(["rows", "columns"]))
        kind = choose.choice([FP32, BF16])
        bias = torch.randn(2 * n, dtype=choose.choice([FP32, BF16]))[::2] if choose.random() < 0.6 else None
        adds, scale = choose.random() < 0.5, choose.choice([1.0, 1.0, -0.25])
        out = 10 * torch.randn(m, n).to(kind)
        exact = scale * (a.double() @ b.double())
        exact = exact if bias is None else exact + bias.double()
        exact = exact + out.double() if adds else exact
        product.product_(out, a, b, bias, adds, scale)
        assert worst(out, exact) < bound(kind), (m, n, k, kind, bias is None, adds, scale)


def test_odd_inner_numbers_of_bf16() -> None:
    if BF16 not in product.types():
        pytest.skip("the kernel has no products of bf16 on this processor")
    for k in (1, 33, 1537, 3075):
        for order in ("rows", "columns"):
            a, b = matrix(70, k, BF16, "columns"), matrix(k, 70, BF16, order)
            assert product.serves(a, b) == (a.stride(1) != 1)
            if product.serves(a, b):
                assert worst(products.mm(a, b), a.double() @ b.double()) < bound(BF16)
            rows = matrix(70, k, BF16, "rows")
            assert not product.serves(rows, b)
            assert worst(products.mm(rows, b), rows.double() @ b.double()) < bound(BF16)


def test_any_number_of_threads_gives_the_same_bytes(dtype: torch.dtype) -> None:
    for m, n, k in [(300, 200, 64), (97, 65, 1700), (40, 150, 40_000), (500, 70, 2000)]:
        for order in ("rows", "columns"):
            a, b = matrix(m, k, dtype, order), matrix(k, n, dtype, "rows")
            results = []
            for threads in (1, 2, 3, 8):
                torch.set_num_threads(threads)
                results.append(products.mm(a, b))
            assert all(torch.equal(result, results[0]) for result in results[1:]), (m, n, k, order)


def test_what_is_not_finite_stays_in_its_row_and_column(dtype: torch.dtype) -> None:
    for order in ("rows", "columns"):
        a, b = matrix(20, 40, dtype, order), matrix(40, 70, dtype, order)
        a[3, 39], b[0, 69] = float("nan"), float("inf")
        found = products.mm(a, b)
        assert bool(found[3].isnan().all()) and bool(found[:3, 69].isinf().all())
        found[3], found[:, 69] = 0, 0
        assert bool(found.isfinite().all())


def test_what_the_kernel_does_not_serve_is_torchs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = torch.randn(8, 8).to(dtype), torch.randn(8, 8).to(dtype)
    assert product.serves(a, b)
    assert not product.serves(a, b.double()) and not product.serves(a.double(), b.double())
    assert not product.serves(a[:, ::2], b[::2]) and not product.serves(a, b[::2, ::2])
    assert not product.serves(a[0].expand(8, 8).t()[::2], b)
    assert not product.serves(a, b, torch.empty(8, 8, dtype=torch.float16))
    assert not product.serves(a, b, torch.empty(8, 8, dtype=dtype).t())
    empty = torch.empty(8, 0, dtype=dtype)
    assert torch.equal(products.mm(empty, empty.t()), torch.zeros(8, 8, dtype=dtype))
    products.use_kernel(False)
    assert torch.equal(products.mm(a, b), a @ b)
    assert torch.equal(products.linear(a, b), torch.nn.functional.linear(a, b))
    products.use_kernel(True)
    # Another make of processor.
    monkeypatch.setattr(product, "faster_types", lambda: ())
    assert not product.serves(a, b) and torch.equal(products.mm(a, b), a @ b)


@pytest.mark.parametrize("frozen", ["", "x", "weight"])
def test_a_linear_layer_keeps_only_what_its_gradients_need(frozen: str, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 10, 34).to(dtype), torch.randn(70, 34).to(dtype)
    x.requires_grad_(frozen != "x")
    weight.requires_grad_(frozen != "weight")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        result = products.linear(x, weight)
    assert [each.shape for each in kept] == [
        *([x.shape] if frozen != "weight" else []),
        *([weight.shape] if frozen != "x" else []),
    ]
    result.backward(torch.ones_like(result))
    exact = [each.detach().double().requires_grad_(each.requires_grad) for each in (x, weight)]
    wanted = torch.nn.functional.linear(*exact)
    wanted.backward(torch.ones_like(wanted))
    for ours, theirs in zip((x, weight), exact, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or worst(ours.grad, theirs.grad) < bound(dtype)  # type: ignore[arg-type]


def test_an_upstream_gradient_that_is_one_number(dtype: torch.dtype) -> None:
    x, weight = (drawn(9, 34).to(dtype).requires_grad_(), drawn(70, 34).to(dtype).requires_grad_())
    products.linear(x, weight).sum().backward()
    assert worst(x.grad, weight.detach().double().sum(0).expand(9, -1)) < bound(dtype)  # type: ignore[arg-type]
