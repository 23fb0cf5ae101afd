"""Attention over pages: the reference, and what Ascend's op hands CANN's kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from native import reference
from native.fallback import report_fallback
from native.npu import attention, library
from native.npu import paged_attention as npu
from tests.support import op_cases as cases
from tests.support.npu_node import documented_kernels as documented
from tests.support.paged import CASES, case, expected

TYPES = ((torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3))


@pytest.mark.parametrize(("heads", "lengths", "window"), CASES, ids=str)
@pytest.mark.parametrize(("dtype", "allowed"), TYPES, ids=str)
def test_the_reference_is_the_attention_of_each_text(
    heads: tuple[int, int, int],
    lengths: tuple[int, ...],
    window: int,
    dtype: torch.dtype,
    allowed: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = case(heads, lengths, window, dtype)
    found = reference.paged_attention(*made)
    assert found.dtype == dtype
    assert cases.error(found, expected(*made)) <= allowed
    # Copied out of the pages text by text.
    monkeypatch.setattr(reference, "GATHERED", 1)
    assert cases.error(reference.paged_attention(*made), expected(*made)) <= allowed


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernel = documented.npu_fused_infer_attention_score
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_fused_infer_attention_score=kernel))
    library.chips.cache_clear()
    yield
    library.chips.cache_clear()


@pytest.mark.parametrize(("heads", "lengths", "window"), [one for one in CASES if not one[2]], ids=str)
@pytest.mark.parametrize(("dtype", "allowed"), TYPES[1:], ids=str)
def test_cann_gets_what_its_page_describes(
    heads: tuple[int, int, int],
    lengths: tuple[int, ...],
    window: int,
    dtype: torch.dtype,
    allowed: float,
    torch_npu: None,
    recwarn: pytest.WarningsRecorder,
) -> None:
    made = case(heads, lengths, window, dtype)
    assert cases.error(npu.paged_attention(*made), expected(*made)) <= allowed
    assert not recwarn.list


@pytest.mark.parametrize(
    ("which", "dtype", "says"),
    [(3, torch.bfloat16, "does not support a window"), (1, torch.float32, "has no kernel for torch.float32")],
)
def test_what_cann_does_not_compute_is_computed_by_the_reference_and_reported(
    which: int, dtype: torch.dtype, says: str, torch_npu: None
) -> None:
    report_fallback.cache_clear()
    made = case(*CASES[which], dtype)
    with pytest.warns(RuntimeWarning, match=says):
        found = npu.paged_attention(*made)
    assert torch.equal(found, reference.paged_attention(*made))


def test_the_stand_in_refuses_what_the_page_refuses(torch_npu: None) -> None:
    q, keys, values, reach = case(*CASES[1], torch.bfloat16)
    given = {
        "actual_seq_lengths_kv": list(reach.lengths), "block_table": reach.tables, "block_size": 16,
        "num_heads": 4, "num_key_value_heads": 2, "scale": 0.125, "input_layout": "BSH",
    }  # fmt: skip
    rows = (q.flatten(1).unsqueeze(1), keys.flatten(2), values.flatten(2))
    documented.npu_fused_infer_attention_score(*rows, **given)
    for wrong in (
        {"block_table": reach.tables.long()},
        {"block_table": reach.tables[:, :-1]},
        {"actual_seq_lengths_kv": reach.last},
        {"block_size": 24},
        {"num_key_value_heads": 3},
    ):
        with pytest.raises(RuntimeError, match="CANN"):
            documented.npu_fused_infer_attention_score(*rows, **(given | wrong))


def test_a_chip_of_the_first_generation_leaves_attention_to_the_reference(
    torch_npu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("native.npu.library._found", lambda name: name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    absent = "chips of the first generation have no such kernel"
    for name, reason in (("Ascend910B3", ""), ("Ascend910ProB", absent)):
        runtime = SimpleNamespace(is_available=lambda: True, get_device_name=lambda name=name: name)
        monkeypatch.setattr(torch, "npu", runtime, raising=False)
        library.chips.cache_clear()
        assert library.why_not(*npu.NEEDS) == library.why_not(*attention.NEEDS) == reason
