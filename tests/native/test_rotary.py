"""Rotary positions in place: the values and gradients of `rotary`, in the memory of the queries and keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import native
from native.cpu.rotary import _OVERWRITE, rotary, rotary_

pytestmark = pytest.mark.usefixtures("compiled")
DIM, ROWS = 32, 21


def projected(dtype: torch.dtype, groups: int = 2) -> Tensor:
    """Return a projection of four heads of queries, and as many keys and values as there are groups."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(3, ROWS, (4 + 2 * groups) * DIM, generator=generator).to(dtype).requires_grad_()


def parts(mixed: Tensor, groups: int = 2) -> list[Tensor]:
    widths = [4 * DIM, groups * DIM, groups * DIM]
    return [part.unflatten(-1, (-1, DIM)).transpose(1, 2) for part in (mixed * 1.0).split(widths, -1)]


def angles(pairs: int = DIM // 2) -> tuple[Tensor, Tensor]:
    turn = torch.arange(ROWS).view(1, 1, -1, 1) / 10 ** torch.linspace(0, 2, pairs)
    return turn.cos(), turn.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [DIM // 2, 5])
def test_values_and_gradients_are_those_of_new_tensors(
    dtype: torch.dtype, groups: int, interleaved: bool, pairs: int
) -> None:
    results = []
    for turn in (rotary, rotary_):
        mixed = projected(dtype, groups)
        q, k, v = parts(mixed, groups)
        q, k = turn(q, k, *angles(pairs), interleaved)
        loss = (q.float().square() * torch.arange(DIM)).sum() + (k.float() * v.float()).sum()
        loss.backward()
        results.append((q.detach(), k.detach(), v.detach(), mixed.grad))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("learned", [False, True])
def test_the_results_are_where_the_queries_and_keys_were(learned: bool) -> None:
    q, k, _ = parts(projected(torch.float32).requires_grad_(learned))
    turned = rotary_(q, k, *angles())
    assert [x.data_ptr() for x in turned] == [q.data_ptr(), k.data_ptr()]
    assert [x.stride() for x in turned] == [q.stride(), k.stride()]


def test_queries_whose_numbers_are_apart_are_not_overwritten() -> None:
    q, k, _ = parts(projected(torch.float32))
    apart = q.detach().repeat_interleave(2, -1)[..., ::2]
    before = apart.clone()
    turned, _ = rotary_(apart, k.detach().clone(), *angles())
    assert torch.equal(apart, before)
    assert torch.equal(turned, rotary(before, before, *angles())[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_other_types_have_the_reference() -> None:
    q = torch.randn(1, 2, ROWS, DIM, dtype=torch.float64)
    before = q.clone()
    turned, _ = rotary_(q, q, *angles())
    assert torch.equal(q, before) and not torch.equal(turned, before)


def test_nothing_is_done_without_rows() -> None:
    q = torch.empty(1, 2, 0, DIM)
    cosines, sines = (x[:, :, :0] for x in angles())
    assert rotary_(q, q.clone(), cosines, sines)[0].shape == q.shape


def test_the_reference_returns_new_tensors() -> None:
    q, k, _ = (x.detach() for x in parts(projected(torch.float32)))
    before = q.clone()
    turned, _ = native.choose("cpu", "reference").rotary_(q, k, *angles())
    assert torch.equal(q, before)
    assert torch.allclose(turned, rotary_(q, k, *angles())[0], atol=1e-6)


def test_torch_compiles_it_without_a_break() -> None:
    def run(mixed: Tensor) -> Tensor:
        q, k, v = parts(mixed)
        q, k = rotary_(q, k, *angles())
        return q.square().sum() + (k * v).sum()

    gradients = []
    for call in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        mixed = projected(torch.float32)
        call(mixed).backward()
        gradients.append(mixed.grad)
    assert torch.allclose(*gradients, atol=1e-5)


def test_the_op_passes_torchs_check() -> None:
    q, k = torch.randn(2, 3, ROWS, DIM), torch.randn(2, 1, ROWS, DIM)
    torch.library.opcheck(_OVERWRITE, (q, k, *angles(), False))


def test_it_has_shapes_without_values() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(1, 2, ROWS, DIM, requires_grad=True) for _ in range(2))
        cosines = torch.empty(1, 1, ROWS, DIM // 2)
        turned, _ = rotary_(q * 1.0, k * 1.0, cosines, cosines)
        turned.sum().backward()
        assert q.grad.shape == q.shape
