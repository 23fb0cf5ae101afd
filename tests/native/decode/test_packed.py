from __future__ import annotations

import pytest
import torch

from native.decode.packed import KINDS, Packed, quantized, why_not

needs_library = pytest.mark.skipif(bool(why_not()), reason=why_not())
SHAPES = [(48, 32), (300, 64), (17, 5), (1, 1), (129, 700)]


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_torch_and_a_row_is_the_same_in_every_batch(
    kind: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    for own in (bias, None):
        packed, plain = (Packed.of(weight, own, kind, native) for native in (True, False))
        for rows in (1, 2, 3, 5, 8, 11, 12, 13, 250):
            x = torch.randn(rows, shape[1])
            out = packed(x)
            assert torch.allclose(out, plain(x), rtol=1e-4, atol=1e-4)
            # A kernel that adds in another order for another number of rows fails here.
            assert torch.equal(out, torch.cat([packed(x[i : i + 1]) for i in range(rows)]))


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_come_from_the_packed_matrix(kind: str) -> None:
    weight = torch.randn(50, 24)
    packed, plain = (Packed.of(weight, None, kind, native) for native in (True, False))
    ids = torch.tensor([0, 15, 16, 49, 8, 9])
    assert torch.equal(packed.rows(ids), plain.rows(ids))
    if kind == "fp32":
        assert torch.equal(packed.rows(ids), weight[ids])


def test_eight_bits_are_within_half_a_step_of_each_row() -> None:
    weight = torch.randn(20, 100) * torch.logspace(-6, 3, 20).unsqueeze(1)
    numbers, scales = quantized(weight)
    assert ((numbers * scales.unsqueeze(1) - weight).abs() <= scales.unsqueeze(1) * 0.501).all()
    assert quantized(torch.zeros(2, 3))[0].abs().max() == 0


@needs_library
def test_the_threads_change_nothing() -> None:
    packed, x, before = (
        Packed.of(torch.randn(400, 300), None, "bf16"),
        torch.randn(20, 300),
        torch.get_num_threads(),
    )
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(packed(x))
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(before)
