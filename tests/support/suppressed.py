"""Run the program of a GPU on any machine, without its launches: to count them, and to time the host alone.

Nothing is computed, and results are undefined. On the device `meta`, tensors have shapes and no memory, so that a mode
sees each operation of the device, each copy to it, and each value that the host asks it for. On the device `cpu`, small
tensors take about as long as the host takes to start an operation.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import compiler
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver as triton_driver
from triton.runtime.jit import JITFunction

from native import chunked, philox, products
from native.compiled.library import NAMESPACE
from native.cuda import attention, blocks, language
from trainer.device import Device, Stopwatch
from trainer.model.attention import heads

# Our kernels are registered for tensors of a CPU too.
KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique", "_unique2")
# They take memory, or change what is known of a tensor.
FREE = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "set_",
)


@dataclass
class Calls:
    """What the host has started on the device, and where it waited, by the name of the operation."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)


class Counting(TorchDispatchMode):
    """Counts launches of operations and of Triton's kernels, and waits, of tensors on the device `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = torch.device(kwargs.get("device") or "cpu").type
        if to != "meta" and not any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func.namespace == NAMESPACE:
            with self:
                return func.redispatch(KERNEL, *args, **kwargs)
        if torch.is_inference_mode_enabled():
            # There torch leaves it to modes to divide an operation into those of a device.
            with self:
                divided = func.decompose(*args, **kwargs)
            if divided is not NotImplemented:
                return divided
        name = func._schema.name.partition("::")[2]
        leaves = name == "copy_" and not args[0].is_meta
        if name in READS or leaves or (to == "cpu" and kwargs.get("device") is not None):
            self.calls.waits[name] += 1
            return self._read(name, args, kwargs)
        if not func.is_view and name not in FREE:
            self.calls.launches[name] += 1
        return func(*args, **kwargs)

    @staticmethod
    def _read(name: str, args: Any, kwargs: Any) -> Any:
        """Return made-up values of a tensor."""
        if name == "_local_scalar_dense":
            return 1.0 if args[0].is_floating_point() else 1
        if name == "copy_":
            return args[0]
        if kwargs.get("device") is None:
            raise NotImplementedError(f"the size of the result of {name} is only known on the device")
        return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)

    def launched(self, kernel: str) -> None:
        self.calls.launches[kernel] += 1

    def taken(self) -> Calls:
        """Return the calls since the last time."""
        found, self.calls = self.calls, Calls()
        return found


@dataclass
class CountedGraph:
    """A graph of a device whose replay is one launch; what is captured does not count."""

    counting: Counting

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        before = self.counting.taken()
        try:
            yield
            assert not self.counting.calls.waits, self.counting.calls.waits
        finally:
            self.counting.calls = before

    def replay(self) -> None:
        self.counting.launched("graph")


@dataclass(frozen=True)
class Suppressed(Device):
    """A GPU whose tensors are on the device `place`, `meta` or `cpu`."""

    place: str = "cpu"
    counting: Counting | None = None

    @property
    def name(self) -> str:
        return self.place

    def pinned(self, tensor: Any) -> Any:
        return tensor

    def stopwatch(self) -> Stopwatch:
        return Stopwatch(None)

    def fetch(self, values: Any) -> Callable[[], list[float]]:
        return lambda: list(values.tolist())

    def graph_pool(self) -> None:
        return None

    def graph(self, pool: Any) -> Any:
        return CountedGraph(self.counting or Counting())

    def autocast(self, precision: str) -> Any:
        wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        return torch.autocast("cpu", wanted, enabled=wanted is not None and self.place == "cpu")


def _flash(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
    """Return what torch's flash attention returns; on `meta` torch itself would choose the scores in full."""
    given = named.get("dropout_p", 0.0), named.get("is_causal", False)
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, *given)[0]
    return found


class Driver:
    """What Triton asks of a driver before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Kernel:
    """A compiled kernel that does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        return None


@contextlib.contextmanager
def without_launches(place: str, counting: Counting | None = None) -> Iterator[None]:
    """Let the ops of `cuda` be chosen, and run without a GPU; with `counting`, Triton prepares nothing."""
    tensor, cast = torch.tensor, torch.autocast

    def unpinned(*given: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        return tensor(*given, **named)

    def launched(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        assert counting is not None
        counting.launched(kernel.fn.__name__)

    def on_device(kind: str, *given: Any, **named: Any) -> Any:
        return contextlib.nullcontext() if kind == "meta" else cast(kind, *given, **named)

    replaced: list[tuple[Any, str, Any]] = [
        (language, "_device_fault", lambda: ""),
        (attention, "why_not", lambda: ""),
        (blocks, "key_of", lambda x: "9.0"),
        (chunked, "_memory_of", lambda device: 0 if device.type == "cpu" else 80 << 30),
        (triton_driver, "_active", Driver()),
        (compiler, "compile", lambda *_, **__: Kernel()),
        (torch, "tensor", unpinned),
        (philox, "draws_itself", lambda device: True),
        # Products of other devices than a CPU are torch's.
        (products, "_offered", []),
        (products, "widens", lambda x: False),
        (products, "_dense", lambda x: x),
        (heads, "draws_itself", lambda device: True),
    ]
    if counting is not None:
        replaced += [
            (JITFunction, "run", launched),
            (torch, "autocast", on_device),
            (torch, "is_autocast_enabled", lambda kind=None: False),
            (Tensor, "data_ptr", lambda x: 0),
            (F, "scaled_dot_product_attention", _flash),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
