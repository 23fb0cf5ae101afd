"""A model divided among ranks: rank 0 runs the batcher and sends the other ranks what to compute.

Each rank holds its part of every layer (tensor parallel), some of the layers (pipeline stages), or both, and its part
of the cache. Pages have the same numbers on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from native.decode.paged import Spans
from trainer.config.layout import Layout
from trainer.config.model import ModelConfig
from trainer.device import Device
from trainer.env import Env
from trainer.errors import InputError
from trainer.generate.modules import Step
from trainer.generate.network import WHOLE_MODEL, Network, Place
from trainer.parallel.group import Group, Groups

# How long the other ranks wait for work from an idle rank 0. If rank 0 dies, its connections close and they end.
IDLE = timedelta(days=365)


@dataclass(frozen=True)
class Division:
    """Into how many parts the ranks divide a model; 0: computed from the number of ranks."""

    tensor: int = 0
    pipeline: int = 0

    def layout(self, world: int, config: ModelConfig) -> Layout:
        """Return the layout of a model on `world` ranks; refuse numbers that do not fit."""
        tensor, pipeline = self.tensor, self.pipeline
        if not tensor and not pipeline:
            tensor = max(size for size in range(1, world + 1) if world % size == 0 and _divides(config, size))
        tensor = tensor or world // pipeline or 1
        pipeline = pipeline or world // tensor or 1
        if tensor * pipeline != world:
            raise InputError(
                f"--tensor {tensor} x --pipeline {pipeline} is {tensor * pipeline} ranks, but there are {world}",
                f"choose numbers whose product is {world}, or name more nodes with --on",
            )
        faults = []
        if not _divides(config, tensor):
            faults.append(
                f"--tensor {tensor} does not divide {config.heads} heads, {config.groups} key heads, "
                f"{config.inner} feed-forward channels{f' and {config.experts} experts' if config.experts else ''}"
            )
        if pipeline > config.layers:
            faults.append(f"--pipeline {pipeline} is more than the model's {config.layers} layers")
        if faults:
            raise InputError("\n".join(faults), "use other numbers, or fewer nodes")
        return Layout(1, tensor, pipeline)


def _divides(config: ModelConfig, tensor: int) -> bool:
    numbers = [
        *config.attention.counts.values(),
        config.inner,
        config.shared_ffn,
        config.dense_ffn,
        config.experts,
    ]
    return not any(number % tensor for number in numbers)


@dataclass
class Ranks:
    """The ranks that share a model; a single rank has the whole model."""

    group: Group
    place: Place = WHOLE_MODEL
    control: Any = None
    """The process group for rank 0's commands to the other ranks."""
    neighbours: int = 1
    """How many ranks run on this machine and share its memory."""

    @classmethod
    def join(cls, environment: Env, device: Device) -> Ranks:
        """Join the other ranks; return this rank's view of them. A collective of all ranks."""
        group = Group.join(environment, device)
        control = dist.new_group(backend="gloo", timeout=IDLE) if group.world > 1 else None
        return cls(group, WHOLE_MODEL, control, environment.local_world_size)

    def divide(self, config: ModelConfig, division: Division) -> None:
        """Choose this rank's part of a model. A collective of all ranks."""
        layout = division.layout(self.group.world, config)
        if self.group.world == 1:
            return
        groups = Groups.of(self.group, layout, tied=config.tied)
        self.place = Place(groups.tensor, groups.pipeline)

    @property
    def leads(self) -> bool:
        """Return whether this rank runs the batcher."""
        return self.group.rank == 0

    def fewest(self, pages: int) -> int:
        """Return the smallest `pages` of all ranks. A collective of all ranks."""
        return min(self.group.gather(pages))


class Task(IntEnum):
    """A command of rank 0 to the other ranks."""

    END = 0
    STEP = 1
    COPY_PAGE = 2
    ABANDON = 3
    """End, because rank 0 ends with an error."""


# The head of a command: the task, how many numbers follow, and the sizes of their parts.
_HEAD = 8


class Leader(Network):
    """The network on rank 0: the other ranks compute their parts of each step."""

    def __init__(self, own: Network, ranks: Ranks) -> None:
        super().__init__(own.model, own.config, own.cache, own.fused, own.place, own.kind)
        self.ranks = ranks

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        self._send_task(Task.STEP, _numbers_of(step), _sizes_of(step))
        own = self.compute(step)
        pipeline = self.place.pipeline
        if own is None:
            own = torch.empty(len(step.wanted), self.config.vocab, device=self.cache.device)
            dist.recv(own, pipeline.ranks[-1], group=pipeline.group)
        return own.cpu()

    def copy_page(self, source: int, target: int) -> None:
        self._send_task(Task.COPY_PAGE, torch.tensor([source, target]))
        super().copy_page(source, target)

    def end(self, *, well: bool = True) -> None:
        """End the other ranks. `well=False`: they exit at once, so that only the error of this rank is reported."""
        self._send_task(Task.END if well else Task.ABANDON, torch.empty(0, dtype=torch.int64))

    def _send_task(self, task: Task, numbers: Tensor, sizes: tuple[int, ...] = ()) -> None:
        head = torch.tensor([task, len(numbers), *sizes, *[0] * (_HEAD - 2 - len(sizes))])
        dist.broadcast(head, 0, group=self.ranks.control)
        if len(numbers):
            dist.broadcast(numbers, 0, group=self.ranks.control)


@torch.inference_mode()
def follow(network: Network, ranks: Ranks) -> bool:
    """Compute this rank's part of rank 0's steps until rank 0 ends; return whether it ended without an error."""
    pipeline, tensor = network.place.pipeline, network.place.tensor
    while True:
        head = torch.empty(_HEAD, dtype=torch.int64)
        dist.broadcast(head, 0, group=ranks.control)
        task, count, *sizes = head.tolist()
        numbers = torch.empty(count, dtype=torch.int64)
        if count:
            dist.broadcast(numbers, 0, group=ranks.control)
        if task in (Task.END, Task.ABANDON):
            return bool(task == Task.END)
        if task == Task.COPY_PAGE:
            network.copy_page(*numbers.tolist())
            continue
        logits = network.compute(_step_of(numbers, sizes))
        if logits is not None and pipeline.stages > 1 and tensor.rank == 0:
            dist.send(logits.contiguous(), pipeline.ranks[0], group=pipeline.group)


def _sizes_of(step: Step) -> tuple[int, ...]:
    return (
        len(step.ids),
        step.positions.dim(),
        len(step.wanted),
        *step.spans.tables.shape,
        step.spans.longest,
    )


def _numbers_of(step: Step) -> Tensor:
    spans = step.spans
    parts = [step.ids, step.positions, step.wanted, *(getattr(spans, name) for name in _TENSORS)]
    return torch.cat([part.flatten().to(torch.int64) for part in parts])


_TENSORS = tuple(field.name for field in fields(Spans) if field.name != "longest")


def _step_of(numbers: Tensor, sizes: list[int]) -> Step:
    """Return the step that rank 0 sent as a flat tensor."""
    tokens, rows, wanted, sequences, width, longest = sizes
    shapes: dict[str, tuple[int, ...]] = {
        "ids": (tokens,),
        "positions": (2, tokens) if rows == 2 else (tokens,),
        "wanted": (wanted,),
        "tables": (sequences, width),
        "begins": (sequences + 1,),
        "first": (tokens,),
        "last": (tokens,),
        "slots": (tokens,),
    }
    lengths = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = {
        name: part.view(shape).clone()
        for (name, shape), part in zip(shapes.items(), numbers.split(lengths), strict=True)
    }
    small = {name: parts[name].to(torch.int32) for name in ("tables", "begins", "first", "last")}
    spans = Spans(**small, slots=parts["slots"], longest=longest)
    return Step(parts["ids"], parts["positions"], spans, parts["wanted"])


def on_ranks(own: Network, ranks: Ranks) -> Network:
    """Return the network for the batcher: with several ranks a `Leader`, else `own`."""
    return Leader(own, ranks) if ranks.group.world > 1 and ranks.leads else own


def alone() -> Ranks:
    """Return the ranks of a process that has the whole model."""
    return Ranks(Group(0, 1, Device("cpu")))
