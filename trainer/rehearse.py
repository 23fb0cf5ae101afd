"""One rank of a layout of any size, built and stepped here without memory or other ranks: tensors have shapes alone.

What breaks when ranks meet minutes after a start (a shape that does not divide, a group of the wrong ranks) breaks here
in seconds. A pipeline's rank is rehearsed as a model of its stage's layers with both ends.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import native
from trainer.assemble import build_model
from trainer.config import TrainConfig
from trainer.device import Device
from trainer.engine import TorchEngine
from trainer.group import Group, Groups
from trainer.layout import Layout
from trainer.plan_memory import layer_ranges, stages


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
            if isinstance(one, Tensor):
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


def rehearse(config: TrainConfig, world: int) -> dict[str, Any]:
    """Build and step the rank that needs most; says what it took and what the plan counts for the same."""
    began = time.monotonic()
    whole = config.layout(world)
    layout = Layout(whole.data, whole.tensor, 1)
    layers = sum(end - start for start, end in layer_ranges(config, whole, 0))
    # On a CPU's kernels, which can be built here; the plan is asked for the same.
    ops = native.choose("cpu")
    alone = replace(config.parallel, pipeline=1, interleave=1, layers=())
    one = replace(config, model=replace(config.model, layers=layers), parallel=alone)
    one = replace(one, hardware=replace(config.hardware, kind="cpu"))
    _join(layout.world)
    device = Device("cpu")
    with FakeTensorMode(), Watching() as watching:
        groups = Groups.of(Group(0, layout.world, device), layout, config.parallel.sequence)
        model = build_model(one, ops, groups)
        model.tokens.loss = _Shapes(model.tokens)  # type: ignore[method-assign]
        engine = TorchEngine(model, one, groups, device)
        micro = _micro(one)
        holding = engine.holding
        holding.clear()
        engine.passes.step([micro], 1.0, device.stopwatch(), holding.last_backward)
        holding.wait()
        holding.update(config.optimizer.lr)
    dist.destroy_process_group()
    watching.counts.exchanges = dict(watching.said)
    built = sum(parameter.numel() for parameter in model.parameters())
    planned = stages(replace(one, global_batch=config.micro_batch * layout.data), layout)[0]
    return {
        **asdict(watching.counts),
        "parameters": built,
        "planned_parameters": planned.parameters,
        "planned_bytes": planned.memory.total,
        "layers": layers,
        "ranks": layout.world,
        "seconds": time.monotonic() - began,
    }


class _Shapes:
    """The loss in shapes alone: the true one looks for each target's score, and here there are no values."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __call__(self, x: Tensor, targets: Tensor) -> Tensor:
        table = self.table
        own = functional.linear(table.parallel.enter(x), table.weight)[..., : table.real].flatten(0, 1)
        loss: Tensor = _Loss.apply(own, table.parallel.size > 1)  # type: ignore[no-untyped-call]
        return loss


class _Loss(torch.autograd.Function):
    """Keeps what the kernels keep: the gradient in the scores' place, or where the vocabulary is cut in fp32."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, cut: bool) -> Tensor:
        ctx.gradient, ctx.type = scores.float() if cut else scores.detach(), scores.dtype
        return scores.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.to(ctx.type), None


def _join(world: int) -> None:
    """Other ranks that say nothing: every exchange is over at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def _micro(config: TrainConfig) -> tuple[Tensor, ...]:
    """A micro-batch as the model takes it apart."""
    batch, length = config.micro_batch, config.model.sequence
    if config.model.kind == "gpt":
        return (torch.zeros(batch, length + 1, dtype=torch.int64),)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    positions = torch.zeros(batch, 2, length, dtype=torch.int64)
    return ids, ids, torch.ones(batch, length), positions, torch.zeros(batch, dtype=torch.int64)
