"""The choice of a backend for each op."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import native
from native import registry
from native.compiled import library
from native.registry import OPS


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("native.cpu.cross_entropy.why_not", lambda: "it was not compiled here", raising=False)


def chosen(choice: native.Choice) -> dict[str, str]:
    return {one.op: one.backend for one in choice.report()}


def test_auto_takes_the_compiled_op_where_it_is_there(compiled: library.Library) -> None:
    choice = native.choose("cpu")
    assert chosen(choice)["cross_entropy"] == "cpu"
    assert compiled.describe() in next(one.reason for one in choice.report() if one.op == "cross_entropy")


def test_auto_says_why_a_better_backend_was_passed_over(no_library: None) -> None:
    one = next(one for one in native.choose("cpu").report() if one.op == "cross_entropy")
    assert one.backend == "reference"
    assert "not cpu: it was not compiled here" in one.reason


@pytest.mark.parametrize("requested", ["cpu", {"cross_entropy": "cpu"}])
def test_a_backend_asked_for_by_name_that_cannot_run_is_an_error(no_library: None, requested: str) -> None:
    with pytest.raises(
        native.BackendUnavailable, match=r"cross_entropy: .*'cpu'.* not compiled here"
    ) as caught:
        native.choose("cpu", requested)
    assert (caught.value.op, caught.value.backend) == ("cross_entropy", "cpu")


@pytest.fixture
def without_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the cpu backend had no GELU."""
    cpu = registry.BACKENDS[0]
    rest = {op: module for op, module in cpu.modules.items() if op != "gelu"}
    monkeypatch.setattr(registry, "BACKENDS", (replace(cpu, modules=rest), *registry.BACKENDS[1:]))


def test_a_name_for_all_ops_serves_those_it_has_and_says_so_of_the_others(
    compiled: object, without_gelu: None
) -> None:
    report = {one.op: one for one in native.choose("cpu", "cpu").report()}
    assert report["cross_entropy"].backend == "cpu"
    assert (report["gelu"].backend, report["gelu"].reason) == ("reference", "cpu has no gelu")


def test_an_op_that_a_backend_does_not_have_cannot_be_asked_of_it(without_gelu: None) -> None:
    with pytest.raises(native.BackendUnavailable, match="it has no gelu for cpu"):
        native.choose("cpu", {"gelu": "cpu"})


def test_a_backend_of_another_device_is_refused() -> None:
    with pytest.raises(native.BackendUnavailable, match="it has no layer_norm for cpu"):
        native.choose("cpu", "cuda")


def test_every_device_that_torch_has_is_served_by_the_reference() -> None:
    assert set(chosen(native.choose("npu")).values()) == {"reference"}


def test_unknown_names_are_refused_all_at_once_with_the_near_miss() -> None:
    with pytest.raises(native.BadRequest) as caught:
        native.choose("cpu", {"gelux": "reference", "attention": "refrence"})
    assert "no op 'gelux'; did you mean 'gelu'?" in str(caught.value)
    assert "no backend 'refrence'; did you mean 'reference'?" in str(caught.value)


def test_the_report_names_every_op_once_in_order() -> None:
    assert tuple(one.op for one in native.choose("cpu", "reference").report()) == OPS


def test_without_torch_the_survey_says_so_and_a_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_torch_fault", lambda: "torch cannot be imported: No module named 'torch'")
    assert all(not status.available and "torch" in status.reason for status in native.survey("cpu"))
    with pytest.raises(native.BackendUnavailable, match="No module named 'torch'"):
        native.choose("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_every_op_alone_can_be_torchs_and_the_others_stay_as_they_are(device: str) -> None:
    usual = {choice.op: choice.backend for choice in native.choose(device).report()}
    for op in OPS:
        found = {choice.op: choice.backend for choice in native.choose(device, {op: "torch"}).report()}
        assert found.pop(op) == ("torch" if op == "attention" else "reference")
        assert found == {other: backend for other, backend in usual.items() if other != op}


def test_importing_native_loads_neither_torch_nor_a_library() -> None:
    code = "import sys, native, native.__main__; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_ops_of_a_choice_run() -> None:
    ops = native.choose("cpu", "reference")
    x = torch.randn(1, 2, 4, 8)
    assert ops.attention(ops.gelu(x, "tanh"), x, x).shape == x.shape
    assert ops.layer_norm(x, torch.ones(8), None).shape == x.shape
    assert ops.cross_entropy(x.view(8, 8), torch.zeros(8, dtype=torch.int64)).shape == ()


def test_torch_is_its_own_attention_and_plain_torch_for_the_rest() -> None:
    for requested in ("torch", dict.fromkeys(OPS, "torch")):
        backends = chosen(native.choose("cpu", requested))
        assert backends == {op: "torch" if op == "attention" else "reference" for op in OPS}
    mixed = chosen(native.choose("npu", {"attention": "torch"}))
    assert set(mixed.values()) == {"torch", "reference"} and mixed["attention"] == "torch"
    assert chosen(native.choose("cpu"))["attention"] != "torch"
