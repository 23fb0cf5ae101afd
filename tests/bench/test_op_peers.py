"""Other projects' ops in the benchmark: our calls of them, with stand-ins that take what their functions take."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import native.reference  # noqa: E402
from bench.hardware import ops as hardware_ops  # noqa: E402
from bench.train import op_peers, ops  # noqa: E402
from tests.support import op_cases as cases  # noqa: E402


def rms(x: Any, weight: Any, eps: float) -> Any:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def turned(x: Any, cosines: Any, sines: Any) -> Any:
    first, second = x.chunk(2, -1)
    return x * cosines.unsqueeze(1) + torch.cat((-second, first), -1) * sines.unsqueeze(1)


# The names and parameters of liger_kernel.transformers.functional 0.8 and of apex.normalization.
LIGER = SimpleNamespace(
    liger_layer_norm=lambda X, W, B, eps: F.layer_norm(X, (X.shape[-1],), W, B, eps),
    liger_rms_norm=lambda X, W, eps, offset=0.0, casting_mode="llama", in_place=True: rms(X, W, eps),
    liger_fused_add_rms_norm=lambda X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True: (
        rms(X + R, W, eps),
        X + R,
    ),
    liger_swiglu=lambda a, b: F.silu(a) * b,
    liger_rope=lambda q, k, cos, sin, position_ids=None, unsqueeze_dim=1: (
        turned(q, cos, sin),
        turned(k, cos, sin),
    ),
    liger_cross_entropy=lambda input, target: F.cross_entropy(input, target),
    liger_fused_linear_cross_entropy=lambda input, weight, target: F.cross_entropy(input @ weight.T, target),
)
APEX = SimpleNamespace(
    fused_layer_norm_affine=lambda input, weight, bias, normalized_shape, eps=1e-6: F.layer_norm(
        input, normalized_shape, weight, bias, eps
    ),
    fused_rms_norm_affine=lambda input, weight, normalized_shape, eps=1e-6: rms(input, weight, eps),
)
# The shapes of one case of each op that a project has, and its arguments.
SHAPES = {
    "layer_norm": (6, 64),
    "rms_norm": (6, 64),
    "add_rms_norm": (6, 64),
    "swiglu": (6, 64),
    "rotary": (2, 3, 3, 5, 8, 4),
    "cross_entropy": (9, 33),
    "linear_cross_entropy": (9, 16, 40, 33),
}


def case_of(op: str) -> cases.Case:
    arguments = {"vocabulary": 33} if op == "linear_cross_entropy" else {}
    return cases.Case(op, "small", torch.float32, SHAPES[op], 1e-5, 1e-5, arguments)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, op_peers.LIGER, LIGER)
    monkeypatch.setitem(sys.modules, op_peers.APEX, APEX)


@pytest.mark.parametrize("op", SHAPES)
def test_a_call_of_another_project_means_what_ours_does(installed: None, op: str) -> None:
    case = case_of(op)
    found = op_peers.peers_of(op, case.shape)
    assert list(found) == (["liger", "apex"] if op in ("layer_norm", "rms_norm") else ["liger"])
    inputs = case.inputs()
    expected = cases.meaning(case, getattr(native.reference, op), inputs)
    for peer in found.values():
        got = cases.run(case, peer, inputs)
        assert cases.error(got.value, expected.value) < 1e-5
        for one, other in zip(got.gradients, expected.gradients, strict=True):
            assert cases.error(one, other) < 1e-5


def test_a_wrong_function_is_named_and_not_measured(
    installed: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = next(work for work in hardware_ops.works("cpu") if work.op == "rms_norm")
    monkeypatch.setattr(hardware_ops, "works", lambda device: [work])
    monkeypatch.setattr(hardware_ops, "updates", lambda device: None)
    monkeypatch.setattr(torch, "compile", lambda run, dynamic: run)
    monkeypatch.setattr(sys, "argv", ["ops", "cpu"])
    monkeypatch.setattr(LIGER, "liger_rms_norm", lambda X, W, eps, in_place: 1.2 * rms(X, W, eps))
    hardware_ops.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    failed = {row["by"]: row.get("failed", "") for row in rows}
    assert list(failed) == ["ours", "plain torch", "liger", "apex", "torch.compile"]
    assert failed.pop("liger").startswith("ArithmeticError: off by 2.0e-01") and not any(failed.values())


def test_without_other_projects_there_are_no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (op_peers.LIGER, op_peers.APEX, "apex.optimizers", "deepspeed.ops.adam"):
        monkeypatch.setitem(sys.modules, name, None)
    assert op_peers.peers_of("rms_norm", (2, 64)) == {}
    assert op_peers.adamw_of() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_another_adamw_updates_masters_and_weights(dtype: Any) -> None:
    masters, gradients = torch.rand(2, 3, 50).unbind(0), torch.rand(2, 3, 50).to(dtype).unbind(0)
    lowered = [None if dtype == torch.float32 else each.to(dtype) for each in masters]
    other = op_peers.OtherAdamW(torch.optim.AdamW, masters, 0.01)
    expected = [torch.nn.Parameter(each.clone()) for each in masters]
    optimizer = torch.optim.AdamW(expected, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(2):
        other.step(gradients, lowered)
        for each, gradient in zip(expected, gradients, strict=True):
            each.grad = gradient.float()
        optimizer.step()
    for own, master, low in zip(expected, other.masters, lowered, strict=True):
        assert torch.equal(own, master)
        assert low is None or torch.equal(low, master.to(dtype))


def test_an_adamw_that_differs_from_torchs_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(op_peers, "adamw_of", lambda: ("right", torch.optim.AdamW))
    found = ops.other_adamw([torch.rand(5)])
    assert found is not None and found[0] == "right"
    monkeypatch.setattr(op_peers, "adamw_of", lambda: ("wrong", torch.optim.Adam))
    assert ops.other_adamw([torch.rand(5)]) is None
    assert "wrong adamw: differs from torch's" in capsys.readouterr().err
