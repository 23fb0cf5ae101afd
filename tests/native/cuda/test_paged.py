"""Attention over pages by Triton's kernel, run by its interpreter."""

from __future__ import annotations

import warnings

import pytest
import torch

from native.cuda.paged_attention import paged_attention
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
    found = paged_attention(q, keys, values, reach)
    assert found.dtype == dtype
    assert cases.error(found, expected(q, keys, values, reach)) <= allowed
