"""The ranks as one: the process group, and the few things they say to each other. Alone, each is a no-op."""

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
# And so long for them to come at all: before, each node makes the order of its samples, at its own disk's speed. A rank
# that died on the way is the launcher's to tell.
ARRIVAL = timedelta(hours=12)


class Group:
    """All ranks of a run, or some of them. Every method is for all of its ranks together."""

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
        """Meet the other ranks; with `always`, torch's process group exists for a rank alone too."""
        rank, world, store = environment.rank, environment.world_size, None
        if world > 1:
            store = _met(environment)
            dist.init_process_group(
                device.collectives, store=store, timeout=PATIENCE, rank=rank, world_size=world
            )
        elif always:
            dist.init_process_group(device.collectives, store=HashStore(), rank=0, world_size=1)
        return cls(rank, world, device, store=store)

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        return self.total(float(flag)) > 0

    def total(self, value: float) -> float:
        """The sum over the ranks."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64 if self.device.kind == "cpu" else torch.float32)
        tensor = tensor.to(self.device.name)
        dist.all_reduce(tensor, group=self.handle)
        return float(tensor.item())

    def broadcast(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Overwrite the tensors by those of the rank `source`."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, self.members[source], group=self.handle)

    def share(self, value: T) -> T:
        """Rank 0's plain value (numbers, text, lists of them), on every rank."""
        if self.world == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, self.members[0], group=self.handle)
        return cast("T", box[0])

    def gather(self, value: T) -> list[T]:
        """Every rank's plain value, in the ranks' order, on all of them."""
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
    """The ranks that this one has something in common with."""

    everyone: Group
    data: Group
    """Those that hold the same part of the model and see other samples."""
    tensor: Parallel
    """Those that share every layer and see the same samples."""
    pipeline: Pipeline = UNDIVIDED
    """Those that together have the model and see the same samples."""

    @classmethod
    def of(cls, everyone: Group, layout: Layout, sequence: bool = False, interleave: int = 1) -> Groups:
        """By a layout; for all ranks together."""
        stage, data, tensor = layout.place(everyone.rank)
        beside, line = ALONE, UNDIVIDED
        if layout.tensor > 1:
            own = _made([layout.rank(stage, data, at) for at in range(layout.tensor)], everyone)
            beside = Parallel(own.rank, own.world, own.handle, sequence)
        across = _made([layout.rank(stage, at, tensor) for at in range(layout.data)], everyone)
        if layout.pipeline > 1:
            line = _line(
                [layout.rank(at, data, tensor) for at in range(layout.pipeline)], everyone, interleave
            )
        return cls(everyone, across, beside, line)

    @property
    def dropout_place(self) -> int:
        """Tells this rank's dropout from others'; those that hold the same numbers must drop the same."""
        if self.tensor.divides_sequence:
            return self.everyone.rank
        return self.data.rank + self.data.world * self.pipeline.stage


def _made(members: Sequence[int], everyone: Group) -> Group:
    """The group of these ranks, which are this one's; each of them makes its groups in the same order.

    Its members alone meet for it: where all ranks meet for every group, those of a thousand take minutes.
    """
    if len(members) == everyone.world:
        return everyone
    handle = dist.new_group(list(members), timeout=PATIENCE, use_local_synchronization=True)
    return Group(members.index(everyone.rank), len(members), everyone.device, members, handle)


def _line(members: Sequence[int], everyone: Group, interleave: int) -> Pipeline:
    """Beside the stages' own group those in which the passes send: see Pipeline."""
    line = _made(members, everyone)
    # Two neighbours send both ways then.
    two_ways = 2 if len(members) == 2 and interleave > 1 else 1
    backward, forward = (
        tuple(
            dist.new_group(list(members), timeout=PATIENCE, use_local_synchronization=True)
            for _ in range(two_ways)
        )
        for _ in range(2)
    )
    ends = line.handle
    # The last group, since not all make it.
    if len(members) > 2 and line.rank in (0, line.world - 1):
        both = [members[0], members[-1]]
        ends = dist.new_group(both, timeout=PATIENCE, use_local_synchronization=True)
    return Pipeline(line.rank, tuple(members), interleave, line.handle, ends, (backward, forward))


def _met(environment: Env) -> Any:
    """Where the ranks find each other, once all of them are there: no timeout of a collective runs before."""
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
    """End this process after a good run, without the interpreter's own end.

    A gloo rank that is torn down in the usual way aborts now and then on a loaded machine
    (`terminate called without an active exception`): 7 of 30 runs; with a barrier and _exit 0 of 10.
    """
    group.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    if group.world > 1:
        dist.destroy_process_group()
        os._exit(code)
