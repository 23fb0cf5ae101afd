"""What the CPU's cross-entropy does beyond its value: memory, threads, instruction sets, refusals."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch.profiler import profile

from native import chunked, products, reference, vocabulary
from native.compiled.library import LEVELS, Library
from native.cpu import cross_entropy as cpu
from native.cpu.linear_cross_entropy import linear_cross_entropy
from tests.support import op_cases as cases

pytestmark = pytest.mark.usefixtures("compiled")


def some(
    tokens: int = 6, vocabulary: int = 40, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, vocabulary, generator=generator).to(dtype)
    return logits, torch.randint(0, vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize("level", range(len(LEVELS)), ids=LEVELS)
@pytest.mark.parametrize("case", list(cases.cases("cross_entropy")), ids=str)
def test_every_instruction_set_gives_the_meaning(case: cases.Case, level: int, compiled: Library) -> None:
    if level > compiled.level:
        pytest.skip(f"this processor has no {LEVELS[level]}")
    logits, targets = case.inputs()
    wide = logits.double().requires_grad_()
    expected = reference.cross_entropy(wide, targets, **case.arguments)
    expected.backward()
    loss = cpu.run(logits, targets, case.arguments.get("ignore_index", -100), True, level)
    assert cases.error(loss, expected.detach()) <= case.value_error
    assert cases.error(logits, wide.grad) <= case.gradient_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_takes_the_place_of_the_logits(dtype: torch.dtype) -> None:
    leaf, targets = some(dtype=dtype)
    leaf.requires_grad_()
    logits = leaf * 1
    seen = []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    cpu.cross_entropy(logits, targets).backward()
    assert seen == [logits.data_ptr()]


def test_logits_that_need_no_gradient_stay_as_they_are() -> None:
    logits, targets = some()
    before = logits.clone()
    cpu.cross_entropy(logits, targets)
    with torch.no_grad():
        cpu.cross_entropy(logits.requires_grad_(), targets)
    assert torch.equal(logits.detach(), before)


def test_a_leaf_is_not_overwritten() -> None:
    logits, targets = some()
    before = logits.clone()
    logits.requires_grad_()
    cpu.cross_entropy(logits, targets).backward()
    assert torch.equal(logits.detach(), before)
    assert logits.grad is not None and logits.grad.abs().sum() > 0


def test_a_graph_that_still_needs_the_logits_is_refused_and_not_wrong() -> None:
    leaf, targets = some()
    # tanh keeps its result for its own backward.
    logits = leaf.requires_grad_().tanh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cpu.cross_entropy(logits, targets).backward()


def test_the_gradient_can_be_taken_once() -> None:
    leaf, targets = some()
    loss = cpu.cross_entropy(leaf.requires_grad_() * 1, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="was already used"):
        loss.backward()


def test_logits_in_pieces_of_memory_are_read_right() -> None:
    logits, targets = some(6, 80)
    pieces = logits[:, ::2]
    expected = reference.cross_entropy(pieces, targets % 40)
    assert torch.allclose(cpu.cross_entropy(pieces, targets % 40), expected)
    leaf = logits.clone().requires_grad_()
    cpu.cross_entropy(leaf[:, ::2], targets % 40).backward()
    assert leaf.grad is not None and leaf.grad[:, 1::2].abs().sum() == 0 and leaf.grad.abs().sum() > 0


@pytest.mark.parametrize("bad", [40, -1, 1 << 40])
def test_a_target_outside_the_vocabulary_names_its_token(bad: int) -> None:
    logits, targets = some()
    targets[4] = bad
    before = logits.clone()
    with pytest.raises(IndexError, match=rf"target {bad} of token 4 is outside the vocabulary \[0,40\)"):
        cpu.cross_entropy(logits.requires_grad_() * 1, targets)
    assert torch.equal(logits.detach(), before)


def test_types_and_shapes_that_it_does_not_take_are_refused_in_words() -> None:
    logits, targets = some()
    with pytest.raises(TypeError, match=r"float32 or bfloat16 .* not torch.float64"):
        cpu.cross_entropy(logits.double(), targets)
    with pytest.raises(ValueError, match=r"\(tokens, vocabulary\)"):
        cpu.cross_entropy(logits, targets[:-1])
    with pytest.raises(ValueError, match=r"\(tokens, vocabulary\)"):
        cpu.cross_entropy(logits.view(2, 3, 40), targets)


def test_the_number_of_threads_changes_no_bit() -> None:
    logits, targets = some(64, 3000)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            mine = logits.clone()
            results.append((cpu.run(mine, targets, -100, True, cpu.load().level), mine))
    finally:
        torch.set_num_threads(threads)
    for loss, gradient in results[1:]:
        assert torch.equal(loss, results[0][0]) and torch.equal(gradient, results[0][1])


def test_no_tokens_at_all_are_as_the_reference_has_them() -> None:
    logits, targets = torch.empty(0, 5), torch.empty(0, dtype=torch.int64)
    assert cpu.cross_entropy(logits, targets).isnan() and reference.cross_entropy(logits, targets).isnan()


def test_under_autocast_it_is_what_the_reference_is() -> None:
    hidden, targets = some(6, 16)
    weight = torch.randn(40, 16, generator=torch.Generator().manual_seed(5)).requires_grad_()
    found = []
    for op in (cpu.cross_entropy, reference.cross_entropy):
        weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = op(torch.nn.functional.linear(hidden, weight), targets)
        loss.backward()
        found.append((loss.detach(), weight.grad))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-6)
    assert cases.error(found[0][1], found[1][1]) < 1e-2


def test_a_profiler_sees_it_by_name() -> None:
    logits, targets = some()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cpu.cross_entropy(logits, targets)
    assert "clusterctl_native::cross_entropy_" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_matrix_is_added_over_pieces_of_tokens(
    dtype: torch.dtype, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((41, 24), (384, 24)))
    targets = torch.randint(301, (41,), generator=generator)
    leaves = [each.double().requires_grad_() for each in (x, weight)]
    reference.linear_cross_entropy(*leaves, targets, 301).backward()
    monkeypatch.setattr(vocabulary, "CPU_PIECE", 10 * 384 * x.element_size())
    monkeypatch.setattr(products, "multiplies_bf16", lambda: multiplies)
    assert vocabulary.tokens_at_a_time(41, 384, 24, x.element_size(), 0) == 11
    given = [each.clone().requires_grad_() for each in (x, weight)]
    linear_cross_entropy(*given, targets, 301).backward()
    for own, exact in zip(given, leaves, strict=True):
        assert own.grad is not None and exact.grad is not None
        assert own.grad.dtype == dtype and own.grad.untyped_storage().nbytes() == own.nbytes
        error = (own.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
        assert error < (4e-6 if dtype == torch.float32 else 2e-2)


def test_a_gradient_summed_over_pieces_is_added_to_in_place() -> None:
    """Autograd adds in place to a tensor that owns its memory alone; this one was once a wider tensor."""
    x = torch.randn(64, 128).bfloat16().requires_grad_()
    weight = torch.randn(4096, 128).bfloat16().requires_grad_()
    targets = torch.randint(0, 4096, (64,))
    with patch.object(chunked, "tokens_at_a_time", lambda *_: 16):
        # The other use of the weight is computed first, so its gradient comes last.
        other = (weight[:2] * 2).sum()
        loss = linear_cross_entropy(x, weight, targets, 4096) + other * 0
        with profile() as profiled:
            loss.backward()
    calls = {event.key: event.count for event in profiled.key_averages()}
    assert calls.get("aten::add_", 0) == 1 and "aten::add" not in calls
    assert weight.grad.untyped_storage().nbytes() == weight.numel() * 2
