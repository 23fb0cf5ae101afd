from __future__ import annotations

import pytest
import torch

from native.compiled.library import load
from native.decode.packed import KINDS, Packed, level, quantized, why_not

needs_library = pytest.mark.skipif(bool(why_not()), reason=why_not())
SHAPES = [(48, 32), (300, 64), (17, 5), (1, 1), (129, 700)]


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x` as a product reads it: in bf16, or in 8 bits with a scale for each 64 numbers."""
    if dtype != torch.int8:
        return x.to(dtype).float()
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % 64)).unflatten(1, (-1, 64))
    steps = blocks.abs().amax(2, keepdim=True) / 127
    return ((blocks / steps.clamp_min(1e-30)).round() * steps).flatten(1)[:, : x.shape[1]]


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("number", range(4), ids=("baseline", "AVX2", "AVX-512", "narrow"))
def test_a_product_is_that_of_torch_and_a_row_is_the_same_in_every_batch(
    kind: str, shape: tuple[int, int], number: int
) -> None:
    if number > level():
        pytest.skip("this processor lacks the instructions")
    torch.manual_seed(1)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    for own in (bias, None):
        packed, plain = (Packed.of(weight, own, kind, native) for native in (True, False))
        packed.structure.level = number
        for rows in (1, 2, 3, 5, 8, 11, 12, 13, 250):
            x = torch.randn(rows, shape[1])
            out = packed(x)
            # A quotient at half a step may be rounded to either side: one step of one number.
            allowed = 0.1 if packed.reads == torch.int8 else 1e-4
            assert torch.allclose(out, plain(narrowed(x, packed.reads)), rtol=1e-4, atol=allowed)
            # A kernel that adds in another order for another number of rows fails here.
            assert torch.equal(out, torch.cat([packed(x[i : i + 1]) for i in range(rows)]))


@needs_library
def test_this_processor_reads_in_the_type_of_the_weights_where_it_has_the_instructions() -> None:
    assert level() in (load().level, 3)
    reads = [Packed.of(torch.randn(16, 64), None, kind).reads for kind in KINDS]
    bf16 = torch.bfloat16 if level() == 3 else torch.float32
    assert reads == [torch.float32, bf16, torch.int8 if level() else torch.float32]


@needs_library
def test_eight_bits_give_the_same_numbers_with_every_instruction_set() -> None:
    packed, found = Packed.of(torch.randn(304, 700), torch.randn(304), "int8"), []
    # The largest numbers of either sign, side by side: no sum may be cut off at 16 bits.
    x = torch.cat([torch.randn(12, 700), torch.ones(1, 700), torch.tensor([1.0, -1.0]).repeat(350)[None]])
    extreme = Packed.of(torch.tensor([1.0, -1.0]).repeat(16, 350), None, "int8")
    for number in range(1, level() + 1):
        packed.structure.level = extreme.structure.level = number
        found.append(torch.cat([packed(x).flatten(), extreme(x).flatten()]))
        assert extreme(x)[-1, 0].item() == pytest.approx(700, rel=1e-5)
    for own in found[1:]:
        assert torch.equal(own, found[0])


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
