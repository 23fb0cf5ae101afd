"""A stand-in of a device's graph on a CPU: it records the operations of torch, and runs them again on the same tensors.

As on a device, what is captured has not happened, and an operation that gives a value to the host is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from native import reference
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.model import gpt
from trainer.model.layers import TokenTable

READS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
)


def storage_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def tensors_in(values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


class Recorder(TorchDispatchMode):
    """Records each operation; keeps the values that it overwrites and that existed before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name in READS:
            raise RuntimeError(f"{schema.name} reads a value of the device while a graph is captured")
        written = [
            x for a, x in zip(schema.arguments, args, strict=False) if a.alias_info and a.alias_info.is_write
        ]
        for x in tensors_in(written):
            # The whole memory: other views of it may be overwritten too.
            if storage_of(x) not in self.made and storage_of(x) not in self.before:
                self.before[storage_of(x)] = x.untyped_storage(), x.untyped_storage().clone()
        out = func(*args, **kwargs)
        given = {storage_of(x) for x in tensors_in((args, kwargs))}
        self.made |= {storage_of(x) for x in tensors_in(out)} - given
        self.calls.append((func, args, kwargs, out))
        return out


@dataclass
class RecordedGraph:
    """What `trainer.device.Graph` is on a device."""

    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)
    replays: int = 0

    @contextmanager
    def capture(self) -> Iterator[None]:
        random, recorder = torch.random.get_rng_state(), Recorder()
        try:
            with recorder:
                yield
        finally:
            torch.random.set_rng_state(random)
            for storage, values in recorder.before.values():
                storage.copy_(values)
        self.calls = recorder.calls

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for own, new in zip(tensors_in(out), tensors_in(again), strict=True):
                if storage_of(own) != storage_of(new):
                    own.copy_(new)


@dataclass(frozen=True)
class RecordingDevice(Device):
    """A CPU with graphs."""

    graphs: list[RecordedGraph] = field(default_factory=list)

    def graph_pool(self) -> None:
        return None

    def graph(self, pool: object) -> Any:
        self.graphs.append(RecordedGraph())
        return self.graphs[-1]

    def restart_generator(self) -> None:
        """Do nothing: the CPU's generator knows nothing of graphs."""


@contextmanager
def captured_steps() -> Iterator[None]:
    """Let `compile: graph` capture on a CPU too."""
    with (
        mock.patch.object(TrainConfig, "captures", lambda self, kind: self.compile == "graph"),
        # The tokens' dropout draws from the generator of the seeds on a CPU.
        mock.patch.object(gpt.F, "dropout", lambda x, *_: x),
        # The loss of a CPU reads the weight of its gradient; on a device a kernel does that.
        mock.patch.object(gpt.GPT, "_loss_of", lambda self, x: partial(_loss_of, self.head, x)),
    ):
        yield


def _loss_of(head: TokenTable, x: Tensor, targets: Tensor) -> Tensor:
    return reference.linear_cross_entropy(
        x.flatten(0, 1), head.output_matrix(), targets.flatten(), head.vocab
    )
