"""Cases of attention over pages: texts of several lengths in pages that are not in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from native.paging import PAGE, Reach

# (heads, groups, size), lengths of the texts, window.
CASES: tuple[tuple[tuple[int, int, int], tuple[int, ...], int], ...] = (
    ((4, 4, 64), (1,), 0),
    ((4, 2, 64), (37, 1, 16, 300, 17), 0),
    ((6, 1, 24), (513, 40), 0),
    ((4, 2, 20), (290, 7, 31), 25),
    # The first stretches of the longest text have no key that is seen.
    ((2, 2, 128), (700, 256, 257), 100),
)


def case(
    heads: tuple[int, int, int], lengths: Sequence[int], window: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Reach]:
    """Return queries, pages of keys and values, and what is seen; numbers that nobody sees are large."""
    queries, groups, size = heads
    random = torch.Generator().manual_seed(sum(lengths))
    needed = [-(-length // PAGE) for length in lengths]
    free = torch.randperm(sum(needed) + 3, generator=random).tolist()
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    keys, values = torch.full((2, len(free), PAGE, groups, size), 1e4, dtype=dtype)
    first = [max(0, length - window) if window else 0 for length in lengths]
    for row, (length, begin) in enumerate(zip(lengths, first, strict=True)):
        own = [free.pop() for _ in range(needed[row])]
        tables[row, : len(own)] = torch.tensor(own)
        for at in range(begin, length):
            for pages in (keys, values):
                pages[own[at // PAGE], at % PAGE] = torch.randn(groups, size, generator=random).to(dtype)
    q = torch.randn(len(lengths), queries, size, generator=random).to(dtype)
    numbers = (torch.tensor(part, dtype=torch.int32) for part in (first, lengths))
    return q, keys, values, Reach(tables, *numbers, tuple(lengths), not any(first))


def expected(q: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> Tensor:
    """Return the attention in fp64, text by text."""
    rows = []
    for text, (begin, end) in enumerate(zip(reach.first.tolist(), reach.last.tolist(), strict=True)):
        slots = [int(reach.tables[text, at // PAGE]) * PAGE + at % PAGE for at in range(begin, end)]
        k, v = (pages.flatten(0, 1)[slots].double() for pages in (keys, values))
        share = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(share, 1) for part in (k, v))
        scores = torch.einsum("hd,khd->hk", q[text].double(), k) * q.shape[2] ** -0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(1), v))
    return torch.stack(rows)
