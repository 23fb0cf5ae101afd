"""A table that is embedding and output matrix: its gradient exists once, and has both parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import native
from native.cpu.embedding import _ADD, tied_embedding

pytestmark = pytest.mark.usefixtures("compiled")
TYPES = [torch.float32, torch.bfloat16]


def table(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return a table, and upstream gradients for 60 of its rows, some of them several times, and for all of it."""
    generator = torch.Generator().manual_seed(7)
    whole, upstream, other = (torch.randn(n, width, generator=generator).to(dtype) for n in (rows, 60, rows))
    return whole.requires_grad_(), upstream, other


def some_ids(rows: int, count: int = 60) -> Tensor:
    return torch.randint(0, min(rows, 20), (count,), generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(300, 96), (1, 5), (20, 1), (5000, 300)])
def test_the_gradient_is_the_sum_of_both(rows: int, width: int, dtype: torch.dtype) -> None:
    weight, upstream, of_other = table(rows, width, dtype)
    ids = some_ids(rows)
    found, other = tied_embedding(ids, weight)
    assert torch.equal(found, weight[ids]) and torch.equal(other, weight)
    ((found * upstream).sum() + (other * of_other).sum()).backward()
    expected = of_other.double().index_add(0, ids, upstream.double())
    # One rounding of a sum in fp32.
    allowed = 1e-6 if dtype == torch.float32 else 2**-8
    assert torch.allclose(weight.grad.double(), expected, rtol=allowed, atol=allowed)
    untouched = torch.ones(rows, dtype=torch.bool).index_fill(0, ids, False)
    assert torch.equal(weight.grad[untouched], of_other[untouched])


@pytest.mark.parametrize("dtype", TYPES)
def test_the_rows_are_added_in_place(dtype: torch.dtype) -> None:
    weight, upstream, of_other = table(300, 96, dtype)
    found, other = tied_embedding(some_ids(300), weight)
    seen = []
    other.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    ((found * upstream).sum() + (other * of_other).sum()).backward()
    assert seen == [weight.grad.data_ptr()]


def test_each_use_alone_has_its_gradient() -> None:
    ids = some_ids(300)
    weight, upstream, of_other = table(300, 96, torch.float32)
    (tied_embedding(ids, weight)[0] * upstream).sum().backward()
    assert torch.allclose(weight.grad, torch.zeros(300, 96).index_add(0, ids, upstream), atol=1e-5)
    weight.grad = None
    (tied_embedding(ids, weight)[1] * of_other).sum().backward()
    assert torch.equal(weight.grad, of_other)


def test_a_gradient_without_memory_of_its_own_is_not_written() -> None:
    weight, upstream, _ = table(300, 96, torch.float32)
    ids = some_ids(300)
    found, other = tied_embedding(ids, weight)
    # The gradient of a sum is one number for the whole table.
    ((found * upstream).sum() + other.sum()).backward()
    assert torch.allclose(weight.grad, torch.ones(300, 96).index_add(0, ids, upstream), atol=1e-5)


def test_without_tokens_only_the_other_gradient_is_left() -> None:
    weight, _, of_other = table(300, 96, torch.float32)
    found, other = tied_embedding(torch.empty(2, 0, dtype=torch.int64), weight)
    assert found.shape == (2, 0, 96)
    (found.sum() + (other * of_other).sum()).backward()
    assert torch.equal(weight.grad, of_other)


def test_what_is_not_finite_stays_in_its_row() -> None:
    weight, upstream, of_other = table(300, 96, torch.float32)
    ids = some_ids(300)
    upstream[0] = float("nan")
    found, other = tied_embedding(ids, weight)
    ((found * upstream).sum() + (other * of_other).sum()).backward()
    assert weight.grad[ids[0]].isnan().all()
    assert weight.grad.isnan().sum() == 96


def test_the_number_of_threads_does_not_change_the_bytes() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            weight, upstream, of_other = table(5000, 300, torch.bfloat16)
            found, other = tied_embedding(some_ids(5000), weight)
            ((found * upstream).sum() + (other * of_other).sum()).backward()
            results.append(weight.grad)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], each) for each in results)


def test_a_table_without_gradient_is_returned_itself() -> None:
    weight, _, _ = table(300, 96, torch.float32)
    with torch.no_grad():
        assert tied_embedding(some_ids(300), weight)[1] is weight
    frozen = weight.detach()
    assert tied_embedding(some_ids(300), frozen)[1] is frozen


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_every_backend_has_it(backend: str) -> None:
    weight, upstream, of_other = table(300, 96, torch.float32)
    ids = some_ids(300)
    found, other = native.choose("cpu", backend).tied_embedding(ids, weight)
    ((found * upstream).sum() + (other * of_other).sum()).backward()
    assert torch.allclose(weight.grad, of_other.index_add(0, ids, upstream), atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_other_types_have_the_reference() -> None:
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    found, other = tied_embedding(torch.tensor([1, 1]), weight)
    (found.sum() + 2 * other.sum()).backward()
    assert weight.grad.sum(1).tolist() == [8.0, 16.0, *[8.0] * 7]


def test_torch_compiles_it_without_a_break() -> None:
    weight, upstream, of_other = table(300, 96, torch.float32)
    ids = some_ids(300)

    def run(ids: Tensor, weight: Tensor) -> Tensor:
        found, other = tied_embedding(ids, weight)
        return (found * upstream).sum() + (other * of_other).sum()

    torch.compile(run, backend="aot_eager", fullgraph=True)(ids, weight).backward()
    assert torch.allclose(weight.grad, of_other.index_add(0, ids, upstream), atol=1e-5)


def test_the_op_that_adds_passes_torchs_check() -> None:
    torch.library.opcheck(_ADD, (torch.randn(9, 4), torch.randn(3, 4), torch.tensor([1, 1, 8])))


def test_it_has_shapes_without_values() -> None:
    with FakeTensorMode():
        weight = torch.empty(300, 96, requires_grad=True)
        found, other = tied_embedding(torch.empty(60, dtype=torch.int64), weight)
        (found.sum() + (other * 2).sum()).backward()
        assert weight.grad.shape == (300, 96)
