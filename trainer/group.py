"""The ranks as one: the process group, and the few things they say to each other. Alone, each is a no-op."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from trainer.device import Device
from trainer.env import Env

T = TypeVar("T")

# A rank waits this long for the others: longer than the slowest step or save, shorter than a night.
PATIENCE = timedelta(minutes=10)
# And so long for them to come at all: before, each node makes the order of its samples, at its own disk's speed. A rank
# that died on the way is the launcher's to tell.
ARRIVAL = timedelta(hours=12)


class Group:
    """All ranks of a run. Every method but `rank` and `world` must be called by every rank."""

    def __init__(self, rank: int, world: int, device: Device) -> None:
        self.rank = rank
        self.world = world
        self.device = device

    @classmethod
    def join(cls, environment: Env, device: Device, always: bool = False) -> Group:
        """Meet the other ranks; with `always`, torch's process group exists for a rank alone too."""
        rank, world = environment.rank, environment.world_size
        if world > 1:
            store = _met(environment)
            dist.init_process_group(
                device.collectives, store=store, timeout=PATIENCE, rank=rank, world_size=world
            )
        elif always:
            dist.init_process_group(device.collectives, store=HashStore(), rank=0, world_size=1)
        return cls(rank, world, device)

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        return self.total(float(flag)) > 0

    def total(self, value: float) -> float:
        """The sum over the ranks."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64 if self.device.kind == "cpu" else torch.float32)
        tensor = tensor.to(self.device.name)
        dist.all_reduce(tensor)
        return float(tensor.item())

    def broadcast(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Overwrite the tensors by those of `source`."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, source)

    def share(self, value: T) -> T:
        """Rank 0's plain value (numbers, text, lists of them), on every rank."""
        if self.world == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, 0)
        return cast("T", box[0])

    def gather_flat(self, part: Tensor) -> Tensor:
        """The ranks' equally long parts, one after the other."""
        if self.world == 1:
            return part
        whole = part.new_empty(self.world * part.numel())
        dist.all_gather(list(whole.chunk(self.world)), part.contiguous())
        return whole

    def bring_to_zero(self, tensor: Tensor, owner: int) -> None:
        """Overwrite rank 0's tensor by the owner's."""
        if owner == 0:
            return
        if self.rank == owner:
            dist.send(tensor, 0)
        elif self.rank == 0:
            dist.recv(tensor, owner)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def _met(environment: Env) -> Any:
    """Where the ranks find each other, once all of them are there: no timeout of a collective runs before."""
    host, port, world = environment.master_addr, environment.master_port, environment.world_size
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make(host, port, world, environment.rank == 0, timeout=ARRIVAL)  # rank 0 waits for all
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
