"""Build one rank of a layout of any size and take a step on this machine, with tensors that have shapes but no memory.

Errors that ranks would meet minutes after a start (a shape that is not divisible, a group of the wrong ranks) appear in
seconds. With a pipeline, the rank belongs to the stage that needs most memory and has as many micro-batches as fill the
pipeline. DeepSpeed reads values during its setup, so its layouts are rehearsed with the torch engine.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import native
import native.reference
from native import products
from native.vocabulary import tokens_at_a_time
from trainer.config.layout import Layout, accumulation
from trainer.config.train_config import TrainConfig
from trainer.config.tune import TuneConfig
from trainer.device import Device
from trainer.engine.torch_engine import TorchEngine
from trainer.errors import InputError
from trainer.parallel.group import Group, Groups
from trainer.parallel.tensor import column_linear
from trainer.plan.memory import stages
from trainer.train.assemble import model_on_device


@dataclass
class Counts:
    """The memory, operations and messages of a step."""

    peak_bytes: int = 0
    operations: int = 0
    exchanges: dict[str, int] = field(default_factory=dict)
    """The number of calls of each collective."""
    exchanged_bytes: int = 0


class Counting(TorchDispatchMode):
    """Counts the bytes of live tensors and the messages to other ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self.calls: Counter[str] = Counter()
        self._live: dict[int, int] = {}
        self._now = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.counts.operations += 1
        if op.namespace == "c10d":
            name = op.name().removeprefix("c10d::").rstrip("_")
            self.calls[name] += 1
            tensors = {id(leaf): leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)}
            self.counts.exchanged_bytes += sum(x.numel() * x.element_size() for x in tensors.values())
        for leaf in tree_leaves(out):
            # A DTensor would be counted with the size of the whole tensor, and a meta tensor has no memory.
            if isinstance(leaf, FakeTensor) and leaf.device.type != "meta":
                self._count(leaf)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._now -= self._live.pop(key, 0)

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Count storages that fully_shard empties and fills again: no torch operation shows that."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._live:
                self._now += size - self._live[storage._cdata]
                self._live[storage._cdata] = size
                self.counts.peak_bytes = max(self.counts.peak_bytes, self._now)
            return result

        with patch.object(torch.UntypedStorage, "resize_", counted):
            yield


def rehearse(config: TrainConfig, world: int) -> dict[str, object]:
    """Build the rank that needs most memory and take a step; return its figures and the plan's."""
    began = time.monotonic()
    layout = config.layout(world)
    # Use the CPU kernels of this machine; the plan's figures are for these kernels too.
    rehearsed = replace(config, engine="torch", hardware=replace(config.hardware, kind="cpu"))
    if config.tune.lora.rank:
        problem = "a rehearsal learns all weights, and the job learns adapters alone"
        raise InputError(f"train.tune.lora: {problem}", "rehearse it without lora")
    # Leave out the task, whose rows vary in length.
    rehearsed = replace(rehearsed, tune=TuneConfig(), global_batch=_samples(config, layout))
    planned = max(stages(rehearsed, layout), key=lambda stage: stage.memory.total)
    rank = layout.rank(planned.stage, 0, 0)
    _join(rank, world)
    # Draw dropout as on other devices than a CPU, without the Philox words of the reference.
    drawn = patch.multiple(
        native.reference,
        factors=lambda _, probabilities: torch.empty_like(probabilities),
        dropout_add=_torchs_dropout,
    )
    with drawn, FakeTensorMode(), Counting() as counting, counting.resizing():
        built = _step(rehearsed, layout, rank)
    dist.destroy_process_group()
    counting.counts.exchanges = dict(counting.calls)
    return {
        **asdict(counting.counts),
        "parameters": built,
        "planned_parameters": planned.parameters,
        "planned_bytes": planned.memory.total,
        "layers": sum(end - start for start, end in planned.layers),
        "stage": planned.stage,
        "rank": rank,
        "ranks": world,
        "engine": config.engine,
        "seconds": time.monotonic() - began,
    }


def _torchs_dropout(
    x: Tensor, residual: Tensor, bias: Tensor | None, state: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias) with a stored mask, as on a device without a kernel for it."""
    return residual + F.dropout(x if bias is None else x + bias, probability)


def _samples(config: TrainConfig, layout: Layout) -> int:
    """Return a global batch with as many micro-batches as fill the pipeline, or 2 so that gradients are added."""
    micros = accumulation(config.global_batch or 1, config.micro_batch, layout.readers)
    filling = layout.pipeline * (1 if config.parallel.interleave == 1 else 2)
    if layout.pipeline == 1 and layout.data == 1:
        filling = 2
    return min(micros, filling) * config.micro_batch * layout.readers


def _step(config: TrainConfig, layout: Layout, rank: int) -> int:
    """Build the rank and take a step; return the number of parameters that it has."""
    device, parallel = Device("cpu"), config.parallel
    groups = Groups.of(Group(rank, layout.world, device), layout, parallel.sequence, parallel.interleave)
    model = model_on_device(config, native.choose("cpu"), groups, device)
    built = sum(parameter.numel() for parameter in model.parameters())
    # Fake ids have no values.
    model.check_ids = _unchecked  # type: ignore[assignment, method-assign]
    if model.pieces[-1].last:
        model.tokens.loss = _Shapes(model.tokens)  # type: ignore[method-assign]
    with _real_meshes(config.zero >= 2):
        engine = TorchEngine(model, config, groups, device, {})
    state, micro = engine.rank_state, _micro(config)
    state.optimizer.ops = _NoUpdate()  # type: ignore[assignment]
    micros = accumulation(config.global_batch or 1, config.micro_batch, layout.readers)
    if micros > 1 or layout.data > 1:
        # It exists from the beginning of the second step on.
        _ = state.gradients.flat  # type: ignore[attr-defined]
    state.clear()
    engine.runner.step([micro] * micros, [1.0] * micros, device.stopwatch(), state.last_backward)
    state.wait()
    state.update(config.optimizer.lr)
    return built


@contextmanager
def _real_meshes(needed: bool) -> Iterator[None]:
    """Create meshes with real values, because fully_shard reads them."""
    if not needed:
        yield
        return
    from torch.distributed.device_mesh import DeviceMesh

    make = DeviceMesh.from_group

    def with_values(*arguments: Any, **named: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return make(*arguments, **named)

    with patch.object(DeviceMesh, "from_group", staticmethod(with_values)):
        yield


def _unchecked(_: object) -> None:
    """Check nothing."""


class _NoUpdate:
    """Replaces the update, whose kernel reads addresses of memory that fake tensors do not have."""

    def adamw(self, *_: object) -> None:
        pass


class _Shapes:
    """Replaces the loss, which reads values of the targets that fake tensors do not have."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __call__(self, x: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        table = self.table
        if table.parallel.size == 1:
            x = x.flatten(0, 1)
            loss: Tensor = _AtOnce.apply(x, table.weight)  # type: ignore[no-untyped-call]
            return loss + smoothing * table.above_mean(x, targets.flatten()) if smoothing else loss
        own = column_linear(x, table.weight, None, table.parallel).flatten(0, 1)
        loss = _Cut.apply(own)  # type: ignore[no-untyped-call]
        return loss


class _AtOnce(torch.autograd.Function):
    """Allocates as native.cpu.linear_cross_entropy: both gradients with the loss, some tokens at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            x, weight = (each.to(torch.get_autocast_dtype("cpu")) for each in (x, weight))
        with torch.autocast("cpu", enabled=False):
            of_x = torch.empty_like(x)
            rows = tokens_at_a_time(len(x), len(weight), x.shape[1], x.element_size(), 0)
            if rows < len(x) and x.dtype != torch.float32:
                sums = torch.empty_like(weight, dtype=torch.float32)
                products.add_product_(
                    sums, products.mm(x[:rows], weight.t()).t(), x[:rows], Tensor.add_, True
                )
                of_weight = torch.empty_like(weight)
            else:
                of_weight = torch.empty_like(weight)
                products.mm(x[:rows], weight.t())
            ctx.gradients = of_x, of_weight
        return x.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        gradients, ctx.gradients = ctx.gradients, None
        return gradients  # type: ignore[no-any-return]


class _Cut(torch.autograd.Function):
    """Allocates as native.cpu.vocabulary_cross_entropy: the gradient is in place of the logits."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.gradient = scores
        return scores.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        gradient: Tensor = ctx.gradient
        ctx.gradient = None
        return gradient


def _join(rank: int, world: int) -> None:
    """Create a fake process group, in which every exchange ends immediately."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def _micro(config: TrainConfig) -> tuple[Tensor, ...]:
    """Return a micro-batch of zeros with the shapes that the model expects."""
    batch, length = config.micro_batch, config.model.sequence
    if config.model.kind == "gpt":
        return (torch.zeros(batch, length + 1, dtype=torch.int64),)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    positions = torch.zeros(batch, 2, length, dtype=torch.int64)
    return ids, ids, torch.ones(batch, length), positions, torch.zeros(batch, dtype=torch.int64)
