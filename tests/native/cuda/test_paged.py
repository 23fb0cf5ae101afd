"""Attention over pages by Triton's kernel, on a GPU or in its interpreter."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from native import reference
from native.cuda.paged_attention import paged_attention, store_in_pages
from tests.support import op_cases as cases
from tests.support.paged import CASES, case, expected


@pytest.mark.parametrize(("heads", "lengths", "window"), CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_every_case(
    heads: tuple[int, int, int], lengths: tuple[int, ...], window: int, dtype: torch.dtype, allowed: float
) -> None:
    warnings.filterwarnings("error", message="native .*: the reference computes")
    q, keys, values, reach = case(heads, lengths, window, dtype)
    # As they come from one projection: rows with gaps.
    q = torch.cat((q, q), 1)[:, : heads[0]]
    right = expected(q, keys, values, reach)
    found = paged_attention(q, keys, values, reach)
    assert found.dtype == dtype
    assert cases.error(found, right) <= allowed
    # A wider table has ranges without keys; a graph is captured with such a table.
    wider = replace(reach, tables=F.pad(reach.tables, (0, 40)))
    assert cases.error(paged_attention(q, keys, values, wider), right) <= allowed


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_are_stored_in_their_slots_and_nowhere_else(kind: torch.dtype) -> None:
    mixed = torch.randn(5, 9, 20)
    mixed = mixed.to(kind)
    # Rotated keys have memory of their own, values are a part of the projection.
    k, v = mixed[:, 3:6].contiguous(), mixed[:, 6:]
    slots = torch.tensor([17, 3, 0, 63, 40])
    pages = [torch.full((4, 16, 3, 20), 7.0, dtype=torch.bfloat16) for _ in range(4)]
    store_in_pages(*pages[:2], k, v, slots)
    reference.store_in_pages(*pages[2:], k, v, slots)
    assert torch.equal(pages[0], pages[2]) and torch.equal(pages[1], pages[3])
    assert int((pages[0] == 7).sum()) == (64 - 5) * 60
