"""The process group `hccl` over gloo: what it is given is an NPU's, and it refuses anything else."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Done:
    """Work that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class Hccl(dist.ProcessGroup):
    """Each collective on copies in the CPU's memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.store, self.told = store, Counter[tuple[int, int]]()
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        return "hccl"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("npu")]

    def _set_group_name(self, name: str) -> None:
        self.given_name = name

    @property
    def group_name(self) -> str:
        return self.given_name

    def _over(self, tensors: Sequence[Tensor], call: Callable[[list[Tensor]], Any]) -> Any:
        wrong = [tensor.device for tensor in tensors if tensor.device.type != "npu"]
        if wrong:
            raise RuntimeError(f"HCCL was given a tensor on {wrong[0]}")
        copies = [tensor.detach().cpu() for tensor in tensors]
        work = call(copies)
        work.wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.detach().copy_(copy)
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        options = opts or dist.AllreduceOptions()
        return self._over(tensors, lambda copies: self.gloo.allreduce(copies, options))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._over(tensors, lambda copies: self.gloo.broadcast(copies, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (flat,), (own,) = outputs, inputs
        return self._over(flat, lambda copies: self.gloo.allgather([copies], [own.detach().cpu()]))

    def _allgather_base(self, out: Tensor, own: Tensor, opts: Any = None) -> Any:
        flat = [torch.empty(own.numel(), dtype=own.dtype) for _ in range(self.size())]
        work = self.gloo.allgather([flat], [own.detach().cpu().flatten()])
        work.wait()
        out.detach().view(-1).copy_(torch.cat(flat))
        return work

    def _reduce_scatter_base(self, out: Tensor, whole: Tensor, opts: Any = None) -> Any:
        def call(copies: list[Tensor]) -> Any:
            summed = whole.detach().cpu()
            work = self.gloo.allreduce([summed], dist.AllreduceOptions())
            work.wait()
            copies[0].copy_(summed.view(self.size(), -1)[self.rank()].view_as(copies[0]))
            return work

        return self._over([out], call)

    # Torch 2.13 calls them so.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        for tensor in tensors:
            self.store.set(self._next(self.rank(), to), pickle.dumps(tensor.detach().cpu()))
        return Done()

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        for tensor in tensors:
            tensor.detach().copy_(pickle.loads(self.store.get(self._next(source, self.rank()))))
        return Done()

    def _next(self, source: int, to: int) -> str:
        self.told[source, to] += 1
        return f"from {source} to {to}: {self.told[source, to]}"

    def barrier(self, opts: Any = None) -> Any:
        work = self.gloo.barrier(dist.BarrierOptions())
        work.wait()
        return work


def register(note: Callable[..., None]) -> None:
    """Make `hccl` a backend of torch.distributed, for tensors of NPUs."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> Hccl:
        seen = {
            name: os.environ.get(name)
            for name in ("RANK_TABLE_FILE", "HCCL_IF_IP", "ASCEND_RT_VISIBLE_DEVICES", "CPU_AFFINITY_CONF")
        }
        note("hccl", size=size, group_rank=rank, device=torch.npu.current_device(), **seen)
        return Hccl(store, rank, size, timeout)

    dist.Backend.register_backend("hccl", create, devices=["npu"])
