"""Record the calls of a device with a substitute of torch.cuda; NPUs have their own (test_npu.py)."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from clusterctl.wire.metrics import MemoryTaken, StepDone
from trainer.device import open_device, prepare_import
from trainer.errors import InputError
from trainer.plan.resolve import read_config
from trainer.train.rates import Rates, memory_line, planned_bytes


class Event:
    """A clock that advances by 0.25 s at each reading."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self) -> None:
        Event.now += 0.25
        self.at = Event.now

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1000


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two CUDA devices; what was set is kept."""
    told: list[Any] = []
    found = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device": lambda index: told.append(("set_device", index)),
        "synchronize": lambda: told.append("synchronize"),
        "Event": Event,
        "max_memory_allocated": lambda: 5_000_000_000,
        "get_device_name": lambda index: f"NVIDIA H200 NVL {index}",
    }
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return told


@pytest.mark.parametrize("asked", ["cuda", ""])
def test_a_rank_takes_its_device_and_asks_it_for_time_and_memory(asked: str, cuda: list[Any]) -> None:
    device = open_device(asked, local_rank=3, local_world_size=4, threads=None, deterministic=False)
    assert (device.name, device.collectives, cuda) == ("cuda:1", "nccl", [("set_device", 1)])
    watch = device.stopwatch()
    watch.stop()
    device.synchronize()
    assert watch.seconds() == 0.25 and cuda[-1] == "synchronize"
    assert (device.memory_peak(), device.memory_before()) == (5_000_000_000, 0)
    assert device.described() == "NVIDIA H200 NVL 1"
    assert device.profiler().__name__ == "torch.profiler"


@pytest.mark.parametrize(
    ("asked", "says"), [("cuda", "torch cannot use a GPU: "), ("npu", "torch_npu is not installed")]
)
def test_a_device_that_is_not_there_is_refused(
    asked: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=says):
        open_device(asked, 0, 1, 1, deterministic=False)


@pytest.mark.parametrize(
    ("error", "hidden", "says"),
    [
        (
            RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nmore"),
            None,
            r"11040\)\.$",
        ),
        (AssertionError("Torch not compiled with CUDA enabled"), "0", "not compiled with CUDA"),
        (None, "", "CUDA_VISIBLE_DEVICES is empty"),
    ],
)
def test_the_error_of_the_driver_is_quoted(
    error: Exception | None, hidden: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(InputError) as refused:
        open_device("cuda", 0, 1, 1, deterministic=False)
    assert re.search(says, str(refused.value).splitlines()[0])


def config(**changes: Any) -> Any:
    return read_config({"model": "gpt2-345M", "data": {"prefix": "x"}, "steps": 1, **changes}, 1)


def test_rates_are_told_by_their_conventions_and_of_a_peak_that_says_where_it_is_from() -> None:
    rates = Rates.of(config(precision="bf16", recompute="full"), 2, "cuda", "NVIDIA H200", 1)
    assert (rates.peak, rates.source) == (989.0, "the sheet of H200")
    step = StepDone(1, 1, 2.0, 1e-3, 1.0, 8192, 100_000.0, 0.5, False, samples=64)
    of = rates.of_step(step)
    assert of["samples_per_second"] == 128.0
    # C.2's figures of the model, half of them a device: 2.27 GFLOP a token, 2.93 with recomputation, 2.43 by nanoGPT's.
    assert of["tflops"] == {
        "model": pytest.approx(113.5, rel=0.01),
        "hardware": pytest.approx(146.3, rel=0.01),
        "palm": pytest.approx(121.5, rel=0.01),
    }
    assert of["of_peak"]["palm"] == pytest.approx(121.5 / 989, rel=0.01)
    assert rates.text(100_000.0) == "TFLOP/s per device: palm 122 (12.3%), hardware 146 (14.8%)"


def test_the_peak_is_the_jobs_own_figure_or_known_of_the_kind() -> None:
    told = config(hardware={"tflops": 5.0})
    assert (Rates.of(told, 1, "cpu", "", 2).peak, Rates.of(told, 1, "cuda", "NVIDIA H200", 1).peak) == (
        5.0,
        5.0,
    )
    two = Rates.of(config(precision="bf16"), 1, "cpu", "", 2)
    assert two.peak == 2 * Rates.of(config(precision="bf16"), 1, "cpu", "", 1).peak
    assert re.fullmatch("assumed: one core of a server.*, x 2 threads", two.source)
    # Its rate in fp32, and in bf16.
    rates = [Rates.of(config(precision=name), 1, "cuda", "NVIDIA H200", 1) for name in ("fp32", "bf16")]
    assert [(rate.source, rate.peak) for rate in rates] == [
        ("the sheet of H200", 67),
        ("the sheet of H200", 989),
    ]
    # A chip that the table lacks has a rate in bf16 alone.
    assert Rates.of(config(), 1, "cuda", "NVIDIA X100", 1).source == "assumed: an A100 of 80 GB"


def test_memory_is_told_of_the_rank_that_took_most_beside_its_plan() -> None:
    taken = MemoryTaken(3, (900_000_000, 1_250_000_000), (1_000_000_000, 1_200_000_000))
    assert memory_line(taken) == "memory at step 3: at most 1.25 GB, rank 1 (planned 1.20 GB)"
    assert memory_line(MemoryTaken(1, (24_000_000,), ())) == "memory at step 1: at most 24 MB"
    alone = config()
    cpu, npu = (planned_bytes(alone, alone.layout(1), kind) for kind in ("cpu", "npu"))
    assert len(cpu) == 1 and cpu[0] != npu[0]
    assert len(planned_bytes(alone, alone.layout(2), "cpu")) == 2


@pytest.mark.parametrize(("kind", "mode"), [("cuda", 2), ("cpu", 1)])
def test_a_gpu_takes_no_algorithm_that_differs_from_run_to_run(
    kind: str, mode: int, cuda: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mode 1 torch only warns, and its attention takes faster ones."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.get_deterministic_debug_mode()
    try:
        open_device(kind, 0, 1, torch.get_num_threads(), deterministic=True)
        assert torch.get_deterministic_debug_mode() == mode
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_compiled_kernels_stay_in_the_folder_that_the_runs_of_a_node_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLUSTERCTL_CACHE_DIR", "/shared/cache")
    for name, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        for own, expected in ((None, f"/shared/cache/{folder}"), ("/mine", "/mine")):
            monkeypatch.setenv(name, own or "")
            if own is None:
                monkeypatch.delenv(name)
            prepare_import()
            assert os.environ[name] == expected
