"""What a device does while a program runs: its kernels and copies, and the calls of the host that start them.

This module runs under any interpreter with torch, and imports nothing of this repository.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Calls of CUDA's runtime and driver that put work into a queue, and those that wait for it.
STARTS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def runtime_of(device: str) -> Any:
    """Return torch.cuda or torch.npu, or None for a CPU; `device` is a kind, or a kind and an index."""
    import torch

    kind = device.split(":")[0]
    if kind == "npu":
        importlib.import_module("torch_npu")
    return None if kind == "cpu" else getattr(torch, kind)


def wait(device: str) -> None:
    """Wait until a device has finished all queued work."""
    if runtime := runtime_of(device):
        runtime.synchronize()


@dataclass(frozen=True)
class Activities:
    """The work of a device in a span of time; without figures if torch's profiler does not know the device."""

    wall: float = 0.0
    """Seconds, with the device's last work."""
    busy: float = 0.0
    """Seconds in which the device does at least one thing."""
    count: int = 0
    """Kernels and copies."""
    starts: int = 0
    """Calls of the host that start kernels, graphs or copies."""
    waits: int = 0
    """Calls of the host that wait for the device."""


class Recorder:
    """Records what a device does between its creation and `stop`."""

    def __init__(self, device: str) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.device = device
        wait(device)
        self.profile = None
        if not device.startswith("npu"):
            wanted = ProfilerActivity.CUDA if device.startswith("cuda") else ProfilerActivity.CPU
            self.profile = profile(activities=[wanted])
            self.profile.__enter__()
        self.began = time.perf_counter()

    def stop(self) -> Activities:
        """Wait for the device and return what it has done."""
        from torch.autograd import DeviceType

        waits_of_ours = 1
        wait(self.device)
        wall = time.perf_counter() - self.began
        if self.profile is None:
            return Activities(wall)
        self.profile.__exit__(None, None, None)
        events = list(self.profile.events() or ())
        own = [event.time_range for event in events if event.device_type == DeviceType.CUDA]
        busy, last = 0.0, float("-inf")
        for span in sorted(own, key=lambda span: float(span.start)):
            busy += max(0.0, span.end - max(span.start, last))
            last = max(last, span.end)
        names = [event.name for event in events if event.device_type == DeviceType.CPU]
        starts, waits = (sum(name.startswith(known) for name in names) for known in (STARTS, WAITS))
        return Activities(wall, busy / 1e6, len(own), starts, max(0, waits - waits_of_ours))


def seconds(device: str, run: Callable[[], object], rounds: int = 20, warm: int = 3) -> float:
    """Return the seconds of one call, with the device's work."""
    for _ in range(warm):
        run()
    wait(device)
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    wait(device)
    return (time.perf_counter() - began) / rounds


def spent(device: str, run: Callable[[], object], rounds: int) -> tuple[float, Activities]:
    """Return the host's seconds of one call of `run`, and the device's work in `rounds` calls, after a warm-up."""
    for _ in range(3):
        run()
    wait(device)
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    host = (time.perf_counter() - began) / rounds
    recorder = Recorder(device)
    for _ in range(rounds):
        run()
    return host, recorder.stop()
