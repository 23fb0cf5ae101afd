"""The rows about CANN's kernels: complete, each with its document, and read by the ops, the plan and the stand-in."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from native.npu import facts, library
from native.registry import BACKENDS
from tests.support.npu_node import documented_kernels as documented
from trainer.config.chips import CHIPS

OPS = next(backend.modules for backend in BACKENDS if backend.name == "npu")


def test_every_kernel_that_an_op_calls_has_a_row_and_every_row_is_a_kernel() -> None:
    needed = {
        name for module in OPS.values() for name in vars(importlib.import_module(module)).get("NEEDS", ())
    }
    derivatives = {row.backward for row in facts.KERNELS.values()} - {""}
    beside = {"layer_norm", "_fused_adamw_", "npu_fast_gelu"}
    assert facts.KERNELS.keys() == needed | derivatives | beside
    for name, row in facts.KERNELS.items():
        assert row.source.endswith((".md", ".cpp", "op_api")), name
        assert set(row.chips) <= facts.GENERATIONS.keys() and set(row.types) <= set(facts.ALL), name


@pytest.mark.parametrize("name", sorted(name for name in facts.KERNELS if hasattr(documented, name)))
def test_the_stand_in_of_torch_npu_reads_the_same_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = facts.KERNELS[name]
    for chip, chips in (
        ("Ascend910A", "910"),
        ("Ascend910B3", "A2"),
        ("Ascend910_9362", "A3"),
        ("950DT", "950"),
    ):
        monkeypatch.setattr(documented, "CHIP", chip)
        for dtype, type_name in library.NAMES.items():
            x = torch.ones(1, 4, dtype=dtype)
            if type_name in facts.types(name, chips):
                documented._types(name, x)
                assert chips in row.chips and type_name in row.types
            else:
                with pytest.raises(RuntimeError, match=f"{chip} has no {name}|{name} takes"):
                    documented._types(name, x)
    # A row that changes changes the stand-in.
    monkeypatch.setitem(facts.KERNELS, name, facts.Kernel((), (), ""))
    with pytest.raises(RuntimeError, match=f"CANN: the 950DT has no {name}"):
        called(name)


def called(name: str) -> Any:
    """Call a kernel with arguments that its documents allow."""
    x, cube = torch.ones(2, 4), torch.ones(1, 2, 4)
    weight = torch.ones(4)
    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "layer_norm": ((x, (4,), weight, None, 1e-5), {}),
        "npu_rms_norm": ((x, weight), {}),
        "npu_rms_norm_backward": ((x, x, weight, torch.ones(2, 1)), {}),
        "npu_add_rms_norm": ((x, x, weight), {}),
        "npu_add_layer_norm": ((x, x, weight, weight), {}),
        "npu_swiglu_backward": ((x[:, :2], x), {}),
        "npu_gelu_backward": ((x, x), {}),
        "npu_cross_entropy_loss": ((x, torch.zeros(2, dtype=torch.int64)), {}),
        "npu_rotary_mul": ((cube[None], cube[None], cube[None]), {}),
        "npu_grouped_matmul": (([x], [torch.ones(1, 4, 3)]), {"group_list": torch.tensor([2]), "split_item": 3,
                                                              "group_type": 0}),
        "npu_fusion_attention": ((cube[None], cube[None], cube[None], 1, "BNSD"), {}),
        "npu_fused_infer_attention_score": ((cube, cube, cube), {}),
        "npu_apply_adam_w": ((0.9, 0.9, 1e-3, 0.0, 0.9, 0.9, 1e-8, x, None, False, False), {"out": (x, x, x)}),
    }  # fmt: skip
    positional, named = given.get(name, ((x,), {}))
    return getattr(documented, name)(*positional, **named)


@pytest.mark.parametrize(
    ("name", "chips"),
    [
        ("Ascend910A", "910"), ("Ascend910B", "910"), ("Ascend910ProB", "910"), ("Ascend910B2C", "A2"),
        ("Ascend910B4-1", "A2"), ("Ascend910_9362", "A3"), ("Ascend910C", "A3"), ("Ascend950PR_9599", "950"),
        ("Ascend310P3", ""), ("Ascend910", ""),
    ],
)  # fmt: skip
def test_the_generation_of_a_chip_by_the_name_that_torch_npu_reports(name: str, chips: str) -> None:
    assert facts.generation(name) == chips


def test_the_chips_of_the_plan_have_the_types_of_their_generation() -> None:
    found = {chip.name: (chip.types, chip.kernels) for chip in CHIPS if chip.kind == "npu"}
    assert found["910A"] == (("fp32", "fp16"), ()) and found["910B"] == (facts.ALL, facts.ALL)
    for name, (types, kernels) in found.items():
        # The plan's 910B is one with a digit.
        chips = facts.generation(f"{name}1") or "910"
        assert types == facts.GENERATIONS[chips] and kernels == facts.types("npu_fusion_attention", chips)


def test_bf16_on_the_first_generation_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "chips", lambda: "910")
    x = torch.ones(2, 4)
    assert library.computes("gelu", x)
    with pytest.warns(RuntimeWarning, match="has no kernel for torch.bfloat16"):
        assert not library.computes("gelu", x.bfloat16())
