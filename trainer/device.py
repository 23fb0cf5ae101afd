"""cpu | cuda | npu as one value with the few calls that differ.

The cuda and npu paths are written to the vendors' documents; npu's runs in tests on a stand-in, no hardware has seen
either so far.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer import env
from trainer.errors import InputError

if TYPE_CHECKING:
    pass

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


@dataclass(frozen=True)
class Device:
    """Where a rank computes: `kind` is cpu, cuda or npu; `index` the local device."""

    kind: str
    index: int = 0

    @property
    def name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def collectives(self) -> str:
        """The process group's backend."""
        return COLLECTIVES[self.kind]

    def synchronize(self) -> None:
        """Wait for what was queued, so that a clock read after it tells the truth."""
        if self.kind != "cpu":
            _runtime(self.kind).synchronize()

    def stopwatch(self) -> Stopwatch:
        """A clock of what this rank computes, started now."""
        return Stopwatch(None if self.kind == "cpu" else _runtime(self.kind))

    def described(self) -> str:
        """The device's own name; empty of a CPU."""
        return "" if self.kind == "cpu" else str(_runtime(self.kind).get_device_name(self.index))

    def memory_peak(self) -> int:
        """Bytes held at most so far: a device's by tensors, a CPU's by the whole process."""
        if self.kind != "cpu":
            return int(_runtime(self.kind).max_memory_allocated())
        return _resident("VmHWM")

    def memory_before(self) -> int:
        """What of `memory_peak` was there before any tensor: a CPU's libraries."""
        return _resident("VmRSS") if self.kind == "cpu" else 0

    def profiler(self) -> Any:
        """The module with `profile` and `schedule`: torch's own or torch_npu's, which are called alike."""
        return importlib.import_module("torch_npu.profiler" if self.kind == "npu" else "torch.profiler")

    def autocast(self, precision: str) -> Any:
        """Return the context that a forward pass runs in: in bf16 and fp16, matrices are computed in that type."""
        import torch

        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return torch.autocast(self.kind, kinds.get(precision), enabled=precision in kinds)


class Stopwatch:
    """Seconds from its making, or from `go_on`, to `stop`; where work is queued, the device's and not the queuer's."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._began = self._mark()
        self._spans: list[tuple[Any, Any]] = []

    def _mark(self) -> Any:
        if self._runtime is None:
            return time.perf_counter()
        event = self._runtime.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        self._spans.append((self._began, self._mark()))

    def go_on(self) -> None:
        self._began = self._mark()

    def seconds(self) -> float:
        """Asked after the step's own synchronization: it waits for the device else."""
        if self._runtime is None:
            return float(sum(ended - began for began, ended in self._spans))
        if self._spans:
            self._spans[-1][1].synchronize()
        return sum(float(began.elapsed_time(ended)) for began, ended in self._spans) / 1000


def _resident(key: str) -> int:
    """Bytes of this process by the kernel's own count; 0 where it does not say."""
    try:
        with open("/proc/self/status", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key.encode())), 0)


def npu_fault() -> str:
    """Why Ascend devices cannot be used here, or nothing; asked before torch is imported, in under 1 ms."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    if not glob.glob("/dev/davinci[0-9]*"):
        return "there is no /dev/davinci* device"
    for library in ("libascendcl.so", "libhccl.so"):
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"{library} is not on the library path (source CANN's set_env.sh)"
    return ""


def prepare_import() -> str:
    """Call once before torch is imported; returns npu_fault().

    An installed torch_npu breaks `import torch` where CANN is missing, since torch loads it by itself.
    """
    fault = npu_fault()
    if fault:
        env.preset("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    return fault


def open_device(
    asked: str, local_rank: int, local_world_size: int, threads: int | None, deterministic: bool
) -> Device:
    """Choose and set up this rank's device; `asked` is cpu, cuda, npu, or empty for the best that is here."""
    fault = prepare_import()
    import torch

    kind = asked or ("npu" if not fault else "cuda" if torch.cuda.is_available() else "cpu")
    if kind == "npu" and fault:
        raise InputError(
            f"an npu was asked for, but {fault}", "use device kind cpu, or install what is missing"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("cuda was asked for, but torch sees no CUDA device", "use device kind cpu")
    device = Device(kind, 0 if kind == "cpu" else _visible(kind, local_rank))
    if kind == "cpu":
        torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_world_size))
    else:
        _runtime(kind).set_device(device.index)
    if deterministic:
        _make_deterministic(torch)
    return device


def _visible(kind: str, local_rank: int) -> int:
    """Local rank n uses the n-th visible device; number 0 where a rank is shown only its own."""
    return local_rank % max(1, int(_runtime(kind).device_count()))


def _make_deterministic(torch: Any) -> None:
    env.preset("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # use_deterministic_algorithms would do, but it loads torch's compiler: 1.5 s of each rank's start.
    torch.set_deterministic_debug_mode("warn")
    # Costs a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False


def _runtime(kind: str) -> Any:
    """torch.cuda or torch.npu."""
    import torch

    if kind == "npu":
        importlib.import_module("torch_npu")
    return getattr(torch, kind)


def keep_freed_memory() -> None:
    """Have glibc keep large freed buffers: worth 1.2 to 1.5 times on CPU. Call before torch is imported."""
    if env.glibc_is_tuned():
        return
    # MMAP_MAX, TRIM_THRESHOLD, TOP_PAD.
    _tune_malloc({-4: 0, -1: 2**31 - 1, -2: 256 << 20})


def give_back_freed_memory() -> None:
    """Have glibc return large freed buffers at once, where memory is dearer than the time to fault them in again.

    Kept, the holes that gathered weights leave do not fit the next ones: of 42M parameters, 64 tokens a step, ZeRO 3
    took 1.9 GB a rank where ZeRO 0 took 1.0; given back, 0.9, and 0.5 s of a processor more a step.
    """
    # And MMAP_THRESHOLD.
    _tune_malloc({-4: 1 << 16, -3: 1 << 20, -1: 64 << 20, -2: 16 << 20})
    if libc := _glibc():
        libc.malloc_trim(0)


def _tune_malloc(options: Mapping[int, int]) -> None:
    if libc := _glibc():
        for option, value in options.items():
            libc.mallopt(option, value)


def _glibc() -> ctypes.CDLL | None:
    """None where there is another C library."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return libc if hasattr(libc, "mallopt") else None
