"""The CPU's attention: autocast, what is not finite, threads, and where it hands over to the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import native
from native import philox, reference
from native.compiled import library
from native.cpu import attention as cpu
from native.cuda import attention as cuda_attention
from tests.support import op_cases as cases

pytestmark = pytest.mark.usefixtures("compiled")


def test_under_autocast_it_is_what_the_reference_is() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 200, 8, generator=generator).requires_grad_() for _ in range(3))
    found = []
    for op in (cpu.attention, reference.attention):
        q.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = op(q, k, v)
        out.float().square().sum().backward()
        found.append((out.detach(), q.grad))
    assert found[0][0].dtype == found[1][0].dtype == torch.bfloat16
    assert cases.error(found[0][0], found[1][0]) < 2e-2
    assert cases.error(found[0][1], found[1][1]) < 3e-2


def test_queries_that_see_no_key_are_as_the_reference_has_them() -> None:
    q, k = torch.randn(1, 1, 140, 4), torch.randn(1, 1, 130, 4)
    assert cases.error(cpu.attention(q, k, k), reference.attention(q, k, k)) == 0


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    q = torch.randn(1, 1, 130, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(cpu.attention(q, q, q).square().sum(), q, create_graph=True)


def test_the_random_words_are_those_of_the_published_generator() -> None:
    found = philox.words(0, torch.zeros((), dtype=torch.int64))
    assert found.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    # Counters and seeds of more than 32 bits.
    one, other = philox.words(2**40 + 1, torch.tensor([2**35, 0]))
    assert not torch.equal(one, other) and not torch.equal(other, philox.words(1, torch.tensor(0)))


def all_of() -> tuple[Tensor, ...]:
    """Return value and gradients of a call with groups, a mask and dropout."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, heads, 150, 16, generator=generator) for heads in (4, 2, 2))
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    mask = native.Mask(90, torch.arange(150).expand(2, -1) // 60)
    dropout = native.Dropout(0.2, torch.tensor(7))
    out = cpu.attention(*leaves, mask=mask, dropout=dropout)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    return out.detach(), *(x.grad for x in leaves if x.grad is not None)


def test_ten_runs_give_the_same_bytes_for_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    first = all_of()
    try:
        for threads in (1, 2, 3, 8, 1, 2, 3, 8, 1):
            torch.set_num_threads(threads)
            assert all(torch.equal(one, other) for one, other in zip(first, all_of(), strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_what_is_not_finite_stays_in_the_rows_that_see_it(which: int, value: float) -> None:
    given = list(torch.randn(3, 1, 1, 100, 8, generator=torch.Generator().manual_seed(0)))
    given[which][0, 0, 70, 3] = value
    mask = native.Mask(documents=(torch.arange(100) >= 65).view(1, -1))
    out, expected = (op(*given, mask=mask) for op in (cpu.attention, reference.attention))
    assert out[:, :, :64].isfinite().all() and not out[:, :, 70].isfinite().all()
    # Infinity less infinity is no number, and so is a hidden key's weight of 0 times such a value; the reference
    # multiplies all keys, the kernel those of blocks that a query sees.
    ours, theirs = out.isnan().any(-1), expected.isnan().any(-1)
    assert torch.equal(ours, theirs) if which < 2 else not (ours & ~theirs).any()


@pytest.fixture(params=[3, 4], ids=["products of AVX512-BF16", "widened"])
def kernel_of_avx512(request: pytest.FixtureRequest, compiled: library.Library) -> Iterator[None]:
    """Use a kernel in place of the best one of a processor with AVX-512."""
    if compiled.level < 2:
        pytest.skip("this processor has no AVX-512")
    object.__setattr__(compiled, "level", request.param)
    yield
    object.__setattr__(compiled, "level", 2)


@pytest.mark.usefixtures("kernel_of_avx512")
def test_every_kernel_for_bf16_gives_the_meaning_of_every_case() -> None:
    for case in (case for case in cases.cases("attention") if case.dtype == torch.bfloat16):
        expected = cases.meaning(case, reference.attention, case.inputs())
        actual = cases.run(case, cpu.attention, case.inputs())
        assert cases.error(actual.value, expected.value) <= case.value_error, str(case)
        for ours, theirs in zip(actual.gradients, expected.gradients, strict=True):
            assert cases.error(ours, theirs) <= case.gradient_error, str(case)


def test_all_kernels_for_bf16_round_the_same_numbers(compiled: library.Library) -> None:
    """They differ in the order of additions alone: far less than by one rounding of the probabilities to bf16."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(3, 1, 2, 200, 32, generator=generator).bfloat16()
    best, found = compiled.level, []
    try:
        for level in range(5 if best == 2 else best + 1):
            object.__setattr__(compiled, "level", level)
            leaves = [x.clone().requires_grad_() for x in given]
            out = cpu.attention(*leaves)
            out.float().square().sum().backward()
            found.append([out.detach(), *(x.grad for x in leaves if x.grad is not None)])
    finally:
        object.__setattr__(compiled, "level", best)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            # What is rounded last may fall to the other side.
            assert (one != two).float().mean() < 0.02


def test_torchs_products_find_the_tiles_as_they_left_them() -> None:
    generator = torch.Generator().manual_seed(1)
    a, q = torch.randn(256, 256, generator=generator).bfloat16(), torch.randn(1, 2, 100, 16).bfloat16()
    expected, attended = a @ a, cpu.attention(q, q, q)
    for _ in range(3):
        assert torch.equal(cpu.attention(q, q, q), attended)
        assert torch.equal(a @ a, expected)


def test_empty_inputs_and_shapes_without_data() -> None:
    assert cpu.attention(*(torch.zeros(0, 2, 5, 4) for _ in range(3))).shape == (0, 2, 5, 4)
    q, k, v = (torch.zeros(1, 2, 5, 4, device="meta", requires_grad=True) for _ in range(3))
    cpu.attention(q, k, v).sum().backward()
    assert q.grad is not None and q.grad.shape == (1, 2, 5, 4)


def test_dropout_of_the_fused_kernel_repeats_with_the_generator_and_differs_between_ranks() -> None:
    """torch's kernel for CUDA runs on a CPU too; what decides its mask is the same."""
    q, k, v = torch.randn(3, 2, 4, 48, 16)

    def run(state: int | None, first_head: int = 0) -> Tensor:
        torch.manual_seed(3)
        own = None if state is None else torch.tensor(state)
        result = cuda_attention.attention(q, k, v, dropout=native.Dropout(0.25, own, first_head, 8))
        # A state of its own leaves the generator as it was.
        assert torch.equal(torch.rand(3), after) is (state is not None)
        return result

    torch.manual_seed(3)
    after = torch.rand(3)
    for state in (None, 5, -(2**62)):
        assert torch.equal(run(state), run(state))
    assert not torch.equal(run(5), run(6)) and not torch.equal(run(5), run(5, first_head=4))
    many = [x[:1].expand(3000, -1, -1, -1) for x in (q, k, v)]
    draws = cuda_attention.attention(*many, dropout=native.Dropout(0.25))
    whole = cuda_attention.attention(q[:1], k[:1], v[:1])[0]
    assert ((draws.mean(0) - whole).abs() <= 6 * draws.std(0) / 3000**0.5 + 1e-5).all()


def test_a_mask_that_was_made_is_kept_for_its_device() -> None:
    mask = native.Mask(window=3)
    first = reference.hidden(mask, 5, 5, torch.device("cpu"))
    assert reference.hidden(mask, 5, 5, torch.device("cpu")) is first
    assert reference.hidden(mask, 5, 5, torch.device("meta")).device.type == "meta"
