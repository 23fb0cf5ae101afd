from __future__ import annotations

import itertools

import pytest
import torch

from native.decode import paged
from native.decode.paged import PAGE, Spans, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def batch(lengths: list[tuple[int, int]], window: int = 0, source: int = 0) -> Spans:
    """Sequences with [begin, end) new tokens each, in pages that are not in order."""
    free = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[free.pop() for _ in range(-(-end // PAGE))] for _, end in lengths]
    width = max(map(len, tables))
    begins, first, last, slots = [0], [], [], []
    for table, (begin, end) in zip(tables, lengths, strict=True):
        begins.append(begins[-1] + end - begin)
        for at in range(begin, end):
            last.append(max(at + 1, min(source, end)))
            first.append(max(0, at + 1 - window) if window else 0)
            slots.append(table[at // PAGE] * PAGE + at % PAGE)
    rows = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32)
    numbers = (torch.tensor(part, dtype=torch.int32) for part in (begins, first, last))
    return Spans(rows, *numbers, torch.tensor(slots), max(last))


@pytest.mark.parametrize("size", [64, 24, 20, 128, 3])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_attention_over_pages_is_that_of_torch(size: int, groups: int) -> None:
    torch.manual_seed(size)
    lengths = [(0, 37), (20, 21), (5, 50), (63, 64), (0, 1)]
    for window, source in ((0, 0), (10, 0), (0, 30)):
        spans = batch(lengths, window, source)
        tokens = len(spans.slots)
        # Pages of others hold numbers that must not matter.
        keys, values = (torch.full_like(part, float("nan")) for part in paged.pages(64, groups, size))
        for table, (_, end) in zip(spans.tables, lengths, strict=True):
            for at in range(end):
                keys[table[at // PAGE], :, :, at % PAGE] = torch.randn(groups, size)
                values[table[at // PAGE], :, at % PAGE] = torch.randn(groups, size)
        mixed = torch.randn(tokens, 4 + 2 * groups, size)
        q, k, v = mixed.split((4, groups, groups), 1)
        paged.store(k, v, keys, values, spans.slots)
        out = paged.attend(q, keys, values, spans, size**-0.5)
        clean = (part.nan_to_num(0.0) for part in (keys, values))
        assert torch.allclose(out, paged.reference(q, *clean, spans, size**-0.5), atol=2e-5)
        begins = spans.begins.tolist()
        for number, (begin, end) in enumerate(itertools.pairwise(begins)):
            alone = Spans(
                spans.tables[number : number + 1],
                torch.tensor([0, 1], dtype=torch.int32),
                spans.first[end - 1 : end],
                spans.last[end - 1 : end],
                spans.slots[end - 1 : end],
                int(spans.last[end - 1]),
            )
            last = paged.attend(q[end - 1 : end], keys, values, alone, size**-0.5)
            assert torch.equal(last[0], out[end - 1]), (begin, end)
