"""A device of kind cpu, cuda or npu, with the calls that differ between the kinds.

The cuda and npu code follows the vendors' documents. It has not run on hardware yet; tests run npu on a simulated
device.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from clusterctl.wire.contract import CACHE_DIR
from trainer import env
from trainer.errors import InputError

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
        """Return the backend of the process group."""
        return COLLECTIVES[self.kind]

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.kind != "cpu":
            _runtime(self.kind).synchronize()

    def stopwatch(self) -> Stopwatch:
        """Return a running stopwatch for this rank's own computation."""
        return Stopwatch(None if self.kind == "cpu" else _runtime(self.kind))

    def described(self) -> str:
        """Return the name that the device reports; empty for a CPU."""
        return "" if self.kind == "cpu" else str(_runtime(self.kind).get_device_name(self.index))

    def memory_peak(self) -> int:
        """Return the peak memory in bytes: of tensors on a device, of the whole process on a CPU."""
        if self.kind != "cpu":
            return int(_runtime(self.kind).max_memory_allocated())
        return _resident("VmHWM")

    def memory_free(self) -> int:
        """Return the bytes that are free on a device, for all processes together; not for a CPU."""
        return int(_runtime(self.kind).mem_get_info(self.index)[0])

    def capability(self) -> tuple[int, int]:
        """Return the compute capability of a CUDA device."""
        major, minor = _runtime(self.kind).get_device_capability(self.index)
        return int(major), int(minor)

    def memory_before(self) -> int:
        """Return the bytes of `memory_peak` that are in use before training: on a CPU, those of libraries."""
        return _resident("VmRSS") if self.kind == "cpu" else 0

    def pinned(self, tensor: Any) -> Any:
        """Return a CPU tensor in memory that a GPU reads while the host continues; for other kinds unchanged."""
        return tensor.pin_memory() if self.kind == "cuda" else tensor

    def ahead(self, micro: Sequence[Any]) -> Sequence[Any]:
        """Start to copy a micro-batch to a GPU beside its computation; other devices copy it when they need it."""
        if self.kind != "cuda":
            return micro
        runtime, stream = _runtime(self.kind), _side_stream(self.kind)
        found = CopiedAhead(self.pinned(part) for part in micro)
        with runtime.stream(stream):
            copies = [part.to(self.name, non_blocking=True) for part in found]
        copied = stream.record_event()

        def arrive() -> Sequence[Any]:
            current = runtime.current_stream()
            current.wait_event(copied)
            for copy in copies:
                # Their memory is of the other stream, which must not use it again before this one has read it.
                copy.record_stream(current)
            return copies

        found.arrive = arrive
        return found

    def fetch(self, values: Any) -> Callable[[], list[float]]:
        """Start to copy a tensor to this process's memory; return a function that waits for its numbers."""
        if self.kind != "cuda":
            found: Callable[[], list[float]] = values.tolist
            return found
        import torch

        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = _runtime(self.kind).Event()
        copied.record()

        def numbers() -> list[float]:
            copied.synchronize()
            return list(host.tolist())

        return numbers

    def graph_pool(self) -> Any:
        """Return a pool of memory that several graphs share, because only one of them runs at a time."""
        return _runtime(self.kind).graph_pool_handle()

    def graph(self, pool: Any) -> Graph:
        """Return an empty graph with memory from `pool`."""
        return Graph(_runtime(self.kind), "NPUGraph" if self.kind == "npu" else "CUDAGraph", pool)

    def restart_generator(self) -> None:
        """Give the device's generator a new state with the old seed and counter, after a capture that failed.

        Until then torch takes each draw as a part of that capture and refuses it.
        """
        import torch

        runtime = _runtime(self.kind)
        generator = runtime.default_generators[self.index]
        numbers = runtime.get_rng_state(self.index)
        generator.graphsafe_set_state(torch.Generator(self.name))
        generator.set_state(numbers)

    def profiler(self) -> Any:
        """Return the module with `profile` and `schedule`: torch's or torch_npu's, which have the same interface."""
        return importlib.import_module("torch_npu.profiler" if self.kind == "npu" else "torch.profiler")

    def autocast(self, precision: str) -> Any:
        """Return the context that a forward pass runs in: in bf16 and fp16, matrices are computed in that type."""
        import torch

        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return torch.autocast(self.kind, kinds.get(precision), enabled=precision in kinds)


class CopiedAhead(tuple[Any, ...]):
    """A micro-batch in this process's memory whose copy is on its way to the device."""

    arrive: Callable[[], Sequence[Any]]
    """Lets the device wait for the copies; returns them."""


class Graph:
    """Work of a device that is captured once and then replayed by one call."""

    def __init__(self, runtime: Any, kind: str, pool: Any) -> None:
        """`runtime` is torch.cuda or torch.npu, whose class of graphs has the name `kind`."""
        self._runtime, self._graph, self._pool = runtime, getattr(runtime, kind)(), pool

    def capture(self) -> AbstractContextManager[Any]:
        """Return a context whose work on the device is captured and not run; other threads may go on using it."""
        context: AbstractContextManager[Any] = self._runtime.graph(
            self._graph, pool=self._pool, capture_error_mode="thread_local"
        )
        return context

    def replay(self) -> None:
        """Start the captured work."""
        self._graph.replay()


class Stopwatch:
    """Adds up the time between start or `resume` and `stop`; on a device with a queue, the device's own time."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._began: Any = self._mark()
        self._spans: list[tuple[Any, Any]] = []

    def _mark(self) -> Any:
        if self._runtime is None:
            return time.perf_counter()
        event = self._runtime.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        if self._began is not None:
            self._spans.append((self._began, self._mark()))
            self._began = None

    def resume(self) -> None:
        self._began = self._began or self._mark()

    def seconds(self) -> float:
        """Return the sum. Call it after the device is synchronized; otherwise it waits for the device."""
        if self._runtime is None:
            return float(sum(ended - began for began, ended in self._spans))
        if self._spans:
            self._spans[-1][1].synchronize()
        return sum(float(began.elapsed_time(ended)) for began, ended in self._spans) / 1000


def _resident(key: str) -> int:
    """Return a memory figure of this process from the kernel, in bytes; 0 if it is not available."""
    try:
        with open("/proc/self/status", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key.encode())), 0)


def npu_fault() -> str:
    """Return why Ascend devices cannot be used here, or ""; takes under 1 ms and does not import torch."""
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
    """Prepare the import of torch, before it; return npu_fault().

    torch loads an installed torch_npu automatically, and that breaks `import torch` where CANN is missing.
    """
    # Triton 3.9 warns in each rank's log where this is not set, and 3.10 has another default, which changes results.
    env.preset("TRITON_DEFAULT_FP_FUSION", "1")
    # Their own places are the home folder, which may be on another machine's disk, or end with a container, and /tmp.
    if shared := env.value_of(CACHE_DIR):
        env.preset("TRITON_CACHE_DIR", os.path.join(shared, "triton"))
        env.preset("TORCHINDUCTOR_CACHE_DIR", os.path.join(shared, "inductor"))
    # Each rank would start a process per core, which stay, to compile the few kernels of a block.
    env.preset("TORCHINDUCTOR_COMPILE_THREADS", "1")
    fault = npu_fault()
    if fault:
        env.preset("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    else:
        # As MindSpeed's scripts set them: memory that fragments less, and threads on the cores near their NPU.
        env.preset("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
        env.preset("CPU_AFFINITY_CONF", "1")
    return fault


def prepare_threads() -> None:
    """Let waiting threads sleep early, before torch is imported: generation has many short parallel loops.

    Threads that spin for the default of milliseconds took 10 times as long on cores that other programs use.
    """
    prepare_import()
    env.preset("GOMP_SPINCOUNT", "10000")


def open_device(
    requested: str, local_rank: int, local_world_size: int, threads: int | None, deterministic: bool
) -> Device:
    """Set up this rank's device and return it; `requested` is cpu, cuda, npu, or "" for the best available."""
    fault = prepare_import()
    import torch

    kind = requested or ("npu" if not fault else "cuda" if torch.cuda.is_available() else "cpu")
    if kind == "npu" and fault:
        raise InputError(
            f"the device kind is npu, but {fault}",
            "install what is missing, or use the kind cpu: in cluster.yaml, or by --device cpu",
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"the device kind is cuda, but torch cannot use a GPU: {_cuda_fault()}",
            "repair what this names; on a node without a GPU use the kind cpu: in cluster.yaml, or by --device cpu",
        )
    device = Device(kind, 0 if kind == "cpu" else _visible(kind, local_rank))
    if kind == "cpu":
        torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_world_size))
    else:
        _runtime(kind).set_device(device.index)
    if deterministic:
        _make_deterministic(torch, kind)
    return device


def _cuda_fault() -> str:
    """Return what torch or the driver says of its GPUs, such as a driver that is too old."""
    import torch

    if env.value_of("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return "it sees none"


def _visible(kind: str, local_rank: int) -> int:
    """Return the device of a local rank: the n-th visible one; 0 where a rank sees its own device alone."""
    return local_rank % max(1, int(_runtime(kind).device_count()))


def _make_deterministic(torch: Any, kind: str) -> None:
    env.preset("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # use_deterministic_algorithms does the same, but loads torch's compiler: 1.5 s of each rank's start. Where torch
    # may only warn, CUDA's attention takes algorithms whose gradient differs from run to run.
    torch.set_deterministic_debug_mode("error" if kind == "cuda" else "warn")
    # Filling costs a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False


@functools.cache
def _side_stream(kind: str) -> Any:
    """Return the stream for copies of this process's device."""
    return _runtime(kind).Stream()


def _runtime(kind: str) -> Any:
    """Return torch.cuda or torch.npu."""
    import torch

    if kind == "npu":
        importlib.import_module("torch_npu")
    return getattr(torch, kind)


def keep_freed_memory() -> None:
    """Make glibc keep large freed buffers, before torch is imported: 1.2 to 1.5 times as fast on a CPU."""
    if env.glibc_is_tuned():
        return
    # MMAP_MAX, TRIM_THRESHOLD, TOP_PAD.
    _tune_malloc({-4: 0, -1: 2**31 - 1, -2: 256 << 20})


def pool_buffers() -> str:
    """Let torch take large CPU buffers from the native pool; return why it cannot, or "". See native/memory."""
    from native.memory.torch_pool import serve_torch

    return serve_torch()


def give_back_freed_memory() -> None:
    """Make glibc return large freed buffers to the kernel immediately: less memory, but more page faults.

    Without the pool, kept buffers of gathered weights do not fit the next ones. With 42M parameters and 64 tokens per
    step, ZeRO 3 took 1.9 GB per rank where ZeRO 0 took 1.0 GB; with returned buffers 0.9 GB, and 0.5 s more processor
    time per step.
    """
    # MMAP_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD.
    _tune_malloc({-4: 1 << 16, -3: 1 << 20, -1: 64 << 20, -2: 16 << 20})
    return_unused_memory()


def return_unused_memory() -> None:
    """Make glibc return unused pages once; it fills a gap only with blocks that fit."""
    if libc := _glibc():
        libc.malloc_trim(0)


def _tune_malloc(options: Mapping[int, int]) -> None:
    if libc := _glibc():
        for option, value in options.items():
            libc.mallopt(option, value)


def _glibc() -> ctypes.CDLL | None:
    """Return glibc, or None with another C library."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return libc if hasattr(libc, "mallopt") else None
