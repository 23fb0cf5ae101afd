"""Process groups of ranks and their collectives, which do nothing on a single rank."""

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

from trainer.compat import SumByGloo, all_gather, reduce_scatter
from trainer.config.layout import Layout
from trainer.device import Device
from trainer.env import Env
from trainer.parallel.pipeline import UNDIVIDED, Pipeline
from trainer.parallel.tensor import ALONE, Parallel

T = TypeVar("T")

# The timeout of a collective: longer than the slowest step or save, shorter than a night.
PATIENCE = timedelta(minutes=10)
# How long a rank waits for the others to start, because each node first builds its index of samples at its own speed.
# The launcher reports ranks that die earlier.
ARRIVAL = timedelta(hours=12)


class Group:
    """All ranks of a run, or some of them. All methods are collectives."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: Device,
        members: Sequence[int] = (),
        handle: Any = None,
        store: Any = None,
        node: str = "",
    ) -> None:
        """`rank` and `world` count within the group; `members`: the numbers of its ranks within the run.

        `store`: the store through which the ranks connected; None for a single rank.
        """
        self.rank = rank
        self.world = world
        self.device = device
        self.members = tuple(members) or tuple(range(world))
        # Torch's process group; None means the group of all ranks.
        self.handle = handle
        self.store = store
        # The launcher's name of this node; empty without a launcher.
        self.node = node

    @classmethod
    def join(cls, environment: Env, device: Device, always: bool = False) -> Group:
        """Connect to the other ranks and return their group; with `always`, a single rank gets a process group too."""
        rank, world, store = environment.rank, environment.world_size, None
        if world > 1:
            store = _open_store(environment)
            dist.init_process_group(
                device.collectives, store=store, timeout=PATIENCE, rank=rank, world_size=world
            )
        elif always:
            dist.init_process_group(device.collectives, store=HashStore(), rank=0, world_size=1)
        return cls(rank, world, device, store=store, node=environment.node)

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

    def sum(self, x: Tensor) -> None:
        """Sum `x` over the ranks in place."""
        dist.all_reduce(x, group=self.handle)

    def start_sum(self, x: Tensor) -> Any:
        """Start to sum `x` over the ranks in place; return the work to wait for."""
        return dist.all_reduce(x, group=self.handle, async_op=True)

    def sum_shares(self, x: Tensor) -> Any:
        """Start to sum `x` over the ranks, each of which gets its share in place; return the work to wait for."""
        own = x.chunk(self.world)[self.rank]
        if self.device.kind == "cpu":
            return SumByGloo(x, own, self.handle)
        return reduce_scatter(own, x, group=self.handle, async_op=True)

    def gather_shares(self, x: Tensor) -> list[Any]:
        """Start to overwrite `x` with the shares of all ranks; return the work to wait for."""
        shares = x.chunk(self.world)
        if self.device.kind == "cpu":
            # Gloo's all-gather copies everything, and takes 1.2 to 4 times as long.
            return [
                dist.broadcast(share, member, group=self.handle, async_op=True)
                for share, member in zip(shares, self.members, strict=True)
            ]
        return [all_gather(x, shares[self.rank], group=self.handle, async_op=True)]

    def broadcast(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Overwrite the tensors with those of rank `source`."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, self.members[source], group=self.handle)

    def share(self, value: T) -> T:
        """Return rank 0's value (numbers, text or lists of them) on every rank."""
        if self.world == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, self.members[0], group=self.handle)
        return cast("T", box[0])

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
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
    """Data parallel: ranks with the same part of the model and different samples."""
    tensor: Parallel
    """Tensor parallel: ranks that share every layer and process the same samples."""
    pipeline: Pipeline = UNDIVIDED
    """Pipeline: the stages of one model, which process the same samples."""
    context: Parallel = ALONE
    """Context parallel: ranks that process the same samples, each its own part of the tokens."""

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
        """Return a number to seed dropout with; it is equal on ranks with the same activations."""
        if self.tensor.divides_sequence:
            return self.everyone.rank
        return self.data.rank + self.data.world * self.pipeline.stage


def _new_group(members: Sequence[int], everyone: Group) -> Group:
    """Return the group of `members`, which include this rank; all members create their groups in the same order.

    Only the members synchronize: if all ranks took part in each group, a thousand ranks would need minutes.
    """
    if len(members) == everyone.world:
        return everyone
    handle = dist.new_group(list(members), timeout=PATIENCE, use_local_synchronization=True)
    return Group(members.index(everyone.rank), len(members), everyone.device, members, handle)


def _new_pipeline(members: Sequence[int], everyone: Group, interleave: int, tied: bool) -> Pipeline:
    """Return the pipeline of `members`, including the groups for messages between stages."""
    pipeline = _new_group(members, everyone)
    # With two stages, the same two neighbours send in both directions.
    two_ways = 2 if len(members) == 2 and interleave > 1 else 1
    backward, forward = (
        tuple(
            dist.new_group(list(members), timeout=PATIENCE, use_local_synchronization=True)
            for _ in range(two_ways)
        )
        for _ in range(2)
    )
    ends = pipeline.handle
    # Create this group last, because not all ranks create it.
    if len(members) > 2 and pipeline.rank in (0, pipeline.world - 1):
        both = [members[0], members[-1]]
        ends = dist.new_group(both, timeout=PATIENCE, use_local_synchronization=True)
    return Pipeline(
        pipeline.rank, tuple(members), interleave, tied, pipeline.handle, ends, (backward, forward)
    )


def _open_store(environment: Env) -> Any:
    """Return the store after all ranks have joined, so that no collective times out during the start."""
    host, port, world = environment.master_addr, environment.master_port, environment.world_size
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    # Rank 0 waits for all ranks.
    store = make(host, port, world, environment.rank == 0, timeout=ARRIVAL)
    if environment.rank == 0:
        store.set("everyone", "is here")
    else:
        store.wait(["everyone"], ARRIVAL)
    store.set_timeout(PATIENCE)
    return store


def leave(group: Group, code: int) -> None:
    """End this process after success, without the usual teardown of the interpreter.

    With the usual teardown, a gloo rank on a loaded machine sometimes aborts (`terminate called without an active
    exception`): in 7 of 30 runs. With a barrier and _exit it was 0 of 10. Gloo's groups are left to the kernel: with
    torch 2.6, destroying them never returned in 2 of 22 runs, because the other rank was gone first.
    """
    group.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    if group.world > 1:
        if dist.get_backend() != "gloo":
            dist.destroy_process_group()
        os._exit(code)
