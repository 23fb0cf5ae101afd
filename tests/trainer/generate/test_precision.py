from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.config.model import ModelConfig
from trainer.device import Device
from trainer.errors import InputError
from trainer.generate.loading import plan_memory
from trainer.generate.network import Place, empty_model
from trainer.generate.on_device import weight_bytes
from trainer.generate.precision import weight_type
from trainer.parallel.tensor import Parallel

CPU, NPU, CUDA = Device("cpu"), Device("npu"), Device("cuda", 1)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The name and the compute capability that the device reports."""
    answers: dict[str, object] = {"name": "Ascend910B3", "capability": (9, 0)}
    monkeypatch.setattr(Device, "described", lambda self: answers["name"])
    monkeypatch.setattr(Device, "capability", lambda self: answers["capability"])
    return answers


@pytest.mark.parametrize(
    ("device", "name", "capability", "usual"),
    [
        (CPU, "", (0, 0), "fp32"),
        (NPU, "Ascend910B3", (0, 0), "bf16"),
        (NPU, "Ascend910ProB", (0, 0), "fp16"),
        (NPU, "Ascend1000", (0, 0), "bf16"),
        (CUDA, "NVIDIA H100 80GB HBM3", (9, 0), "bf16"),
        (CUDA, "Tesla V100-SXM2-32GB", (7, 0), "fp16"),
        (CUDA, "Quadro RTX 8000", (7, 5), "fp16"),
        (CUDA, "NVIDIA RTX 6000 Ada Generation", (8, 9), "bf16"),
    ],
)
def test_weights_have_by_default_the_type_that_the_chip_computes_with(
    device: Device, name: str, capability: tuple[int, int], usual: str, named: dict[str, object]
) -> None:
    named |= {"name": name, "capability": capability}
    assert weight_type("", device) == usual
    assert weight_type("fp32", device) == "fp32"


@pytest.mark.parametrize(
    ("wanted", "device", "name", "says", "try_"),
    [
        (
            "int8",
            NPU,
            "Ascend910B3",
            "8-bit weights need a CPU",
            "--weights bf16, or --device cpu",
        ),
        ("int8", CUDA, "Tesla V100-SXM2-32GB", "the device is cuda:1", "--weights fp16"),
        ("bf16", NPU, "Ascend910A", "Ascend910A does not support bf16", "--weights fp16"),
        ("fp16", CPU, "", "fp16 is not supported on a CPU", "--weights bf16"),
        ("fp64", CPU, "", "'fp64' is not a type", "fp32, bf16, int8"),
        ("fp64", NPU, "Ascend910B3", "'fp64' is not a type", "fp32, bf16, fp16"),
    ],
)
def test_a_type_that_is_not_computed_is_refused_with_another(
    wanted: str, device: Device, name: str, says: str, try_: str, named: dict[str, object]
) -> None:
    named["name"] = name
    with pytest.raises(InputError, match=says) as caught:
        weight_type(wanted, device)
    assert try_ in str(caught.value.hint)


def test_memory_on_a_device_counts_what_lies_there() -> None:
    config = ModelConfig(layers=4, hidden=64, heads=4, sequence=128, vocab=512, experts=4, top_k=1)
    exact = weight_bytes(empty_model(config), "bf16")
    wide = sum(
        parameter.numel()
        for name, parameter in empty_model(config).named_parameters()
        if any(part in name for part in ("norm", "router", "positions"))
    )
    assert exact == 2 * config.parameters() + 2 * wide
    free = 40 << 30
    half, whole = (plan_memory(config, kind, free, device=NPU) for kind in ("bf16", "fp32"))
    assert half.weights == exact and half.page * 2 == whole.page
    both = plan_memory(config, "bf16", free, Place(Parallel(1, 2)), NPU)
    assert both.page * 2 == half.page and both.weights < 0.6 * half.weights
    large = replace(config, layers=48, hidden=8192, heads=64)
    with pytest.raises(InputError, match="are missing") as caught:
        plan_memory(large, "bf16", free, device=NPU).pages(None)
    assert caught.value.hint == "use more devices"
