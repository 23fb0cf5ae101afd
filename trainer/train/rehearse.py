"""One rank of a layout of any size, built and stepped here without memory or other ranks: tensors have shapes alone.

What breaks when ranks meet minutes after a start (a shape that does not divide, a group of the wrong ranks) breaks here
in seconds. Of a pipeline it is a rank of the stage that needs most memory, with as many micro-batches as fill it.
DeepSpeed reads values while it is set up, so its layouts are rehearsed on torch's engine.
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
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import native
from trainer.config.layout import Layout, accumulation
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.engine.torch_engine import TorchEngine
from trainer.parallel.group import Group, Groups
from trainer.parallel.tensor import column_linear
from trainer.plan.memory import PIECE, stages
from trainer.train.assemble import build_model


@dataclass
class Counts:
    """What a step did."""

    peak_bytes: int = 0
    operations: int = 0
    exchanges: dict[str, int] = field(default_factory=dict)
    """Of each collective, how often."""
    exchanged_bytes: int = 0


class Watching(TorchDispatchMode):
    """Counts what lives and what is said to other ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self.said: Counter[str] = Counter()
        self._live: dict[int, int] = {}
        self._now = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.counts.operations += 1
        if op.namespace == "c10d":
            name = op.name().removeprefix("c10d::").rstrip("_")
            self.said[name] += 1
            tensors = {id(one): one for one in tree_leaves(args[0]) if isinstance(one, Tensor)}
            self.counts.exchanged_bytes += sum(one.numel() * one.element_size() for one in tensors.values())
        for one in tree_leaves(out):
            # A DTensor is as large as what it stands for.
            if isinstance(one, FakeTensor):
                self._see(one)
        return out

    def _see(self, tensor: Tensor) -> None:
        place = tensor.untyped_storage()
        key = place._cdata
        if key in self._live:
            return
        self._live[key] = place.nbytes()
        self._now += place.nbytes()
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._now)
        weakref.finalize(place, self._gone, key)

    def _gone(self, key: int) -> None:
        self._now -= self._live.pop(key, 0)

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """See storages that are emptied and filled again, as fully_shard does it: no operation tells of that."""
        resize = torch.UntypedStorage.resize_

        def seen(place: torch.UntypedStorage, size: int) -> Any:
            result = resize(place, size)
            if place._cdata in self._live:
                self._now += size - self._live[place._cdata]
                self._live[place._cdata] = size
                self.counts.peak_bytes = max(self.counts.peak_bytes, self._now)
            return result

        with patch.object(torch.UntypedStorage, "resize_", seen):
            yield


def rehearse(config: TrainConfig, world: int) -> dict[str, Any]:
    """Build and step the rank that needs most; says what it took and what the plan counts for the same."""
    began = time.monotonic()
    layout = config.layout(world)
    # On a CPU's kernels, which can be built here; the plan is asked for the same.
    one = replace(config, engine="torch", hardware=replace(config.hardware, kind="cpu"))
    one = replace(one, global_batch=_samples(config, layout))
    planned = max(stages(one, layout), key=lambda stage: stage.memory.total)
    rank = layout.rank(planned.stage, 0, 0)
    _join(rank, world)
    with FakeTensorMode(), Watching() as watching, watching.resizing():
        built = _stepped(one, layout, rank)
    dist.destroy_process_group()
    watching.counts.exchanges = dict(watching.said)
    return {
        **asdict(watching.counts),
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


def _samples(config: TrainConfig, layout: Layout) -> int:
    """A global batch with no more micro-batches than fill the pipeline, or show whether gradients are added up."""
    micros = accumulation(config.global_batch or 1, config.micro_batch, layout.data)
    filling = layout.pipeline * (1 if config.parallel.interleave == 1 else 2)
    if layout.pipeline == 1 and layout.data == 1:
        filling = 2
    return min(micros, filling) * config.micro_batch * layout.data


def _stepped(config: TrainConfig, layout: Layout, rank: int) -> int:
    """How many numbers the rank has that was built and took a step."""
    device, parallel = Device("cpu"), config.parallel
    groups = Groups.of(Group(rank, layout.world, device), layout, parallel.sequence, parallel.interleave)
    model = build_model(config, native.choose("cpu"), groups)
    built = sum(parameter.numel() for parameter in model.parameters())
    if model.pieces[-1].last:
        model.tokens.loss = _Shapes(model.tokens)  # type: ignore[method-assign]
    with _real_meshes(config.zero >= 2):
        engine = TorchEngine(model, config, groups, device, {})
    state, micro = engine.rank_state, _micro(config)
    state.optimizer.ops = _NoUpdate()  # type: ignore[assignment]
    micros = accumulation(config.global_batch or 1, config.micro_batch, layout.data)
    if micros > 1 or layout.data > 1:
        # From the second step on there from the beginning.
        _ = state.gradients.flat  # type: ignore[attr-defined]
    state.clear()
    engine.runner.step([micro] * micros, [1.0] * micros, device.stopwatch(), state.last_backward)
    state.wait()
    state.update(config.optimizer.lr)
    return built


@contextmanager
def _real_meshes(needed: bool) -> Iterator[None]:
    """fully_shard reads the values of its mesh, a tensor: those are made with values."""
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


class _NoUpdate:
    """The update in shapes alone: the kernel reads its tensors' addresses, and here there are none."""

    def adamw(self, *_: object) -> None:
        pass


class _Shapes:
    """The loss in shapes alone: the true one looks for each target's score, and here there are no values."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __call__(self, x: Tensor, targets: Tensor) -> Tensor:
        table = self.table
        if table.parallel.size == 1:
            loss: Tensor = _AtOnce.apply(x.flatten(0, 1), table.weight)  # type: ignore[no-untyped-call]
            return loss
        own = column_linear(x, table.weight, None, table.parallel)[..., : table.real].flatten(0, 1)
        loss = _Cut.apply(own)  # type: ignore[no-untyped-call]
        return loss


class _AtOnce(torch.autograd.Function):
    """As native.cpu.linear_cross_entropy: both gradients with the loss, some tokens at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            x, weight = (each.to(torch.get_autocast_dtype("cpu")) for each in (x, weight))
        with torch.autocast("cpu", enabled=False):
            ctx.gradients = torch.empty_like(x), torch.empty_like(weight)
            rows = max(1, min(len(x), PIECE // (len(weight) * x.element_size())))
            if rows < len(x) and x.dtype != torch.float32:
                torch.zeros_like(weight, dtype=torch.float32).add_((x[:rows] @ weight.t()).t() @ x[:rows])
            else:
                x[:rows] @ weight.t()
        return x.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        gradients, ctx.gradients = ctx.gradients, None
        return gradients  # type: ignore[no-any-return]


class _Cut(torch.autograd.Function):
    """As trainer.parallel.cross_entropy: probabilities in fp32 are kept."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.gradient, ctx.type = scores.float(), scores.dtype
        return scores.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        gradient: Tensor = ctx.gradient
        ctx.gradient = None
        return gradient.to(ctx.type)


def _join(rank: int, world: int) -> None:
    """Other ranks that say nothing: every exchange is over at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def _micro(config: TrainConfig) -> tuple[Tensor, ...]:
    """A micro-batch as the model takes it apart."""
    batch, length = config.micro_batch, config.model.sequence
    if config.model.kind == "gpt":
        return (torch.zeros(batch, length + 1, dtype=torch.int64),)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    positions = torch.zeros(batch, 2, length, dtype=torch.int64)
    return ids, ids, torch.ones(batch, length), positions, torch.zeros(batch, dtype=torch.int64)
