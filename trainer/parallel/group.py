"""Process groups of ranks and their collectives, which do nothing for a rank alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from trainer.config.layout import Layout
from trainer.device import Device
from trainer.env import Env
from trainer.parallel.pipeline import UNDIVIDED, Pipeline
from trainer.parallel.tensor import ALONE, Parallel

T = TypeVar("T")

# A rank waits this long for the others: longer than the slowest step or save, shorter than a night.
PATIENCE = timedelta(minutes=10)
# A rank waits this long for the others to start: before, each node builds its index of samples at its own speed. The
# launcher reports ranks that died before.
ARRIVAL = timedelta(hours=12)


class Group:
    """All ranks of a run, or some of them. Every method is a collective."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: Device,
        members: Sequence[int] = (),
        handle: Any = None,
        store: Any = None,
    ) -> None:
        """`rank` and `world` count within the group; `members`: its ranks as the run counts them.

        `store`: where the ranks met; None for a rank alone.
        """
        self.rank = rank
        self.world = world
        self.device = device
        self.members = tuple(members) or tuple(range(world))
        # Torch's process group; None is the one of all ranks.
        self.handle = handle
        self.store = store

    @classmethod
    def join(cls, environment: Env, device: Device, always: bool = False) -> Group:
        """Join the other ranks and return their group; with `always`, a rank alone has a process group too."""
        rank, world, store = environment.rank, environment.world_size, None
        if world > 1:
            store = _open_store(environment)
            dist.init_process_group(
                device.collectives, store=store, timeout=PATIENCE, rank=rank, world_size=world
            )
        elif always:
            dist.init_process_group(device.collectives, store=HashStore(), rank=0, world_size=1)
        return cls(rank, world, device, store=store)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return self.total(float(flag)) > 0

    def total(self, value: float) -> float:
        """Return the sum over the ranks."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64 if self.device.kind == "cpu" else torch.float32)
        tensor = tensor.to(self.device.name)
        dist.all_reduce(tensor, group=self.handle)
        return float(tensor.item())

    def broadcast(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Overwrite the tensors with those of the rank `source`."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, self.members[source], group=self.handle)

    def share(self, value: T) -> T:
        """Return rank 0's value (numbers, text, lists of them) on every rank."""
        if self.world == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, self.members[0], group=self.handle)
        return cast("T", box[0])

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on every rank."""
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, value, group=self.handle)
        return box

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.handle)


@dataclass(frozen=True)
class Groups:
    """The groups that this rank belongs to."""

    everyone: Group
    data: Group
    """Ranks with the same part of the model and other samples."""
    tensor: Parallel
    """Ranks that share every layer and see the same samples."""
    pipeline: Pipeline = UNDIVIDED
    """Stages of the same pipeline, which see the same samples."""
    context: Parallel = ALONE
    """Data parallel ranks that see the same samples, each its own stretch of the tokens."""

    @classmethod
    def of(
        cls, everyone: Group, layout: Layout, sequence: bool = False, interleave: int = 1, tied: bool = True
    ) -> Groups:
        """Return the groups of a layout; `tied`: see Pipeline. A collective of all ranks."""
        stage, data, tensor = layout.place(everyone.rank)
        tensor_group, pipeline = ALONE, UNDIVIDED
        if layout.tensor > 1:
            own = _new_group([layout.rank(stage, data, at) for at in range(layout.tensor)], everyone)
            tensor_group = Parallel(own.rank, own.world, own.handle, sequence)
        data_group = _new_group([layout.rank(stage, at, tensor) for at in range(layout.data)], everyone)
        context = ALONE
        if layout.context > 1:
            first = data - data % layout.context
            members = [layout.rank(stage, first + at, tensor) for at in range(layout.context)]
            own = _new_group(members, everyone)
            context = Parallel(own.rank, own.world, own.handle)
        if layout.pipeline > 1:
            pipeline = _new_pipeline(
                [layout.rank(at, data, tensor) for at in range(layout.pipeline)], everyone, interleave, tied
            )
        return cls(everyone, data_group, tensor_group, pipeline, context)

    @property
    def dropout_place(self) -> int:
        """Return a number that seeds dropout; ranks with the same activations have the same number."""
        if self.tensor.divides_sequence:
            return self.everyone.rank
        return self.data.rank + self.data.world * self.pipeline.stage


def _new_group(members: Sequence[int], everyone: Group) -> Group:
    """Return the group of `members`, which include this rank; all of them create their groups in the same order.

    Only its members synchronize: with all ranks for every group, the groups of a thousand ranks take minutes.
    """
    if len(members) == everyone.world:
        return everyone
    handle = dist.new_group(list(members), timeout=PATIENCE, use_local_synchronization=True)
    return Group(members.index(everyone.rank), len(members), everyone.device, members, handle)


def _new_pipeline(members: Sequence[int], everyone: Group, interleave: int, tied: bool) -> Pipeline:
    """Return the pipeline of `members`, with the groups for messages between stages."""
    pipeline = _new_group(members, everyone)
    # Then two neighbours send in both directions.
    two_ways = 2 if len(members) == 2 and interleave > 1 else 1
    backward, forward = (
        tuple(
            dist.new_group(list(members), timeout=PATIENCE, use_local_synchronization=True)
            for _ in range(two_ways)
        )
        for _ in range(2)
    )
    ends = pipeline.handle
    # The last group, since not all make it.
    if len(members) > 2 and pipeline.rank in (0, pipeline.world - 1):
        both = [members[0], members[-1]]
        ends = dist.new_group(both, timeout=PATIENCE, use_local_synchronization=True)
    return Pipeline(
        pipeline.rank, tuple(members), interleave, tied, pipeline.handle, ends, (backward, forward)
    )


def _open_store(environment: Env) -> Any:
    """Return the store once all ranks have joined, so that no timeout of a collective runs before."""
    host, port, world = environment.master_addr, environment.master_port, environment.world_size
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    # rank 0 waits for all.
    store = make(host, port, world, environment.rank == 0, timeout=ARRIVAL)
    if environment.rank == 0:
        store.set("everyone", "is here")
    else:
        store.wait(["everyone"], ARRIVAL)
    store.set_timeout(PATIENCE)
    return store


def leave(group: Group, code: int) -> None:
    """End this process after a good run, without the usual teardown of the interpreter.

    A gloo rank that is torn down in the usual way aborts now and then on a loaded machine
    (`terminate called without an active exception`): 7 of 30 runs; with a barrier and _exit 0 of 10.
    """
    group.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    if group.world > 1:
        dist.destroy_process_group()
        os._exit(code)
