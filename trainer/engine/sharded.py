"""ZeRO 2 and 3 by torch's fully_shard: each data parallel rank has its rows of every matrix, and of what belongs to it.

With ZeRO 2 the weights are gathered once a step and the gradients divided as soon as they are made; with ZeRO 3 each
block's weights are gathered when it is their turn, forward and again backward. Layer norms stay whole on every rank:
they are some 0.02 % of a model, and must not share the matrices' type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.checkpoint.part import Part
from trainer.config.train_config import TrainConfig
from trainer.device import give_back_freed_memory
from trainer.engine.optimizer import ShardedAdamW
from trainer.engine.parts import Place, optimizer_parts
from trainer.engine.passes import Model
from trainer.engine.rank_state import (
    COMPUTED_IN,
    Arriving,
    GradientBuffer,
    clip_factor,
    moves_optimizer,
    saves_copy,
)
from trainer.model.layers import LayerNorm, cuts_of, own_of, parameter_of
from trainer.parallel.group import Group
from trainer.parallel.pipeline import TIED, UNDIVIDED, Pipeline


class ShardedState:
    """A rank's rows of each matrix and bias in fp32, with their gradients and moments; layer norms whole."""

    def __init__(
        self, model: Model, config: TrainConfig, data: Group, pipeline: Pipeline = UNDIVIDED
    ) -> None:
        self.model, self.zero, self.data, self.parallel = model, config.zero, data, model.parallel
        self.pipeline = pipeline
        self.cuts = cuts_of(model)
        self.names = list(self.cuts)
        norms = _norms_of(model)
        for one in norms:
            one.data = one.data.to(data.device.name)
        self.whole = {name: one for name, one in model.named_parameters() if one in norms}
        data.broadcast(one.data for one in self.whole.values())
        self.modules = _shard(model, config, data, norms)
        if data.device.kind == "cpu":
            give_back_freed_memory()
        self.shards: dict[str, Any] = {
            name: one for name, one in model.named_parameters() if name not in self.whole
        }
        self.rows = {name: nn.Parameter(_own_rows(one)) for name, one in self.shards.items()}
        cuts = {name: self.cuts[name] for name in self.whole}
        self.gradients = GradientBuffer(self.whole, cuts, data, self.parallel)
        held = {name: one for name, one in {**self.whole, **self.rows}.items() if one.numel()}
        self.optimizer = ShardedAdamW(
            held, config.optimizer, data, zero=0, host=moves_optimizer(config, data)
        )
        self.factor = 1.0

    def clear(self) -> None:
        self.gradients.clear()
        for one in self.shards.values():
            one.grad = None
        self._keep_gathered(self.zero < 3)

    def last_backward(self, names: Collection[str] = ()) -> None:
        self.gradients.sum_on_next_backward(names)
        self._keep_gathered(False)

    def _keep_gathered(self, keep: bool) -> None:
        """Between the micro-batches of a step no weight changes, so ZeRO 2 need not gather them again."""
        for module in self.modules:
            module.set_reshard_after_backward(not keep, recurse=False)

    def wait(self) -> None:
        self.gradients.wait()
        for name, own in self.rows.items():
            own.grad = _own_rows(self.shards[name].grad)
        if self.parallel.divides_sequence:
            self._add_parts()
        if self.pipeline.stages > 1 and TIED in self.rows:
            self.pipeline.sum_ends(self._gradient(TIED))

    def _add_parts(self) -> None:
        """Sum what each tensor parallel rank has of its part of the sequence alone."""
        parts = [self._gradient(name) for name in self.rows if self.cuts[name].partial]
        # As of a last stage without a layer.
        if not parts:
            return
        whole = self.parallel.sum(torch.cat([part.flatten() for part in parts]))
        for part, summed in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))

    def clip(self, limit: float, scale: float = 1.0) -> float:
        norm = math.sqrt(self._square()) / scale
        self.factor = clip_factor(norm, limit) / scale
        return norm

    def _square(self) -> float:
        """Of the norm: rows over all ranks, and what several have whole on the first of them."""
        counted = [self._gradient(name) for name in self.rows if self._is_counted(name)]
        if self.data.rank == 0 and self.parallel.rank == 0:
            counted.append(self.gradients.flat)
        norms = torch._foreach_norm(counted) if counted else [torch.zeros((), device=self.data.device.name)]
        square = torch.stack(list(norms)).square().sum()
        own = self.data.total(float(self.parallel.sum(square).item()))
        return self.pipeline.total(own, self.data.device)

    def _is_counted(self, name: str) -> bool:
        return saves_copy(name, self.cuts[name], self.parallel, self.pipeline)

    def _gradient(self, name: str) -> Tensor:
        gradient = self.rows[name].grad
        # `wait` has put it there.
        assert gradient is not None
        return gradient

    def update(self, rate: float) -> None:
        self._reshard()
        self.optimizer.step(rate, factor=self.factor)

    def _reshard(self) -> None:
        """An evaluation leaves weights gathered, which the rows are about to differ from."""
        for module in self.modules:
            module.reshard()

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], int]:
        weights = {name: self._gathered(name, self._held(name)) for name in self.names}
        moments = {
            f"{moment}.{name}": self._gathered(name, self.optimizer.moments.get(f"{moment}.{name}"))
            for name in self.names
            for moment in ("exp_avg", "exp_avg_sq")
        }
        return weights, moments, self.optimizer.taken

    def _held(self, name: str) -> Tensor:
        return (self.whole if name in self.whole else self.rows)[name].detach()

    def _gathered(self, name: str, own: Tensor | None) -> Tensor:
        """One tensor of all ranks' rows, in the node's memory of the first of them; `own`: None where it has none."""
        if name in self.whole:
            assert own is not None
            return own
        shape = self.shards[name].shape
        # Rows a rank, padding included.
        each = -(-shape[0] // self.data.world)
        padded = self.rows[name].new_zeros((each, *shape[1:]))
        if own is not None:
            padded[: len(own)] = own
        together = self.data.gather_flat(padded.flatten()).view(-1, *shape[1:])[: shape[0]]
        return together.cpu() if self.data.rank == 0 else padded

    def parts(self) -> list[Part]:
        found = list[Part]()
        for name in self.names:
            counted = self._is_counted(name)
            if name in self.whole:
                place = Place(self.whole[name].shape, self.cuts[name], self.parallel)
                owned = counted and self.data.rank == 0
                found += optimizer_parts(self.optimizer, name, place.part, owned)
            elif self.rows[name].numel():
                shape = self.shards[name].shape
                place = Place(shape, self.cuts[name], self.parallel)
                first = -(-shape[0] // self.data.world) * self.data.rank
                found += optimizer_parts(self.optimizer, name, partial(place.rows, first), counted)
        return found

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        self._reshard()
        fill(self.parts())
        self.optimizer.taken = optimizer_steps

    @torch.no_grad()
    def load(self, model: Arriving, optimizer: Arriving, taken: int) -> None:
        self._reshard()
        for arriving in (model, optimizer):
            for key, whole in arriving:
                # Else another stage has it.
                if parameter_of(key, self.cuts) in self.cuts:
                    self.optimizer.take(key, self._own_of(key, whole))
        self.optimizer.taken = taken

    def _own_of(self, key: str, whole: Tensor) -> Tensor:
        """Of a whole tensor, what this rank has of it, which may be nothing."""
        name = parameter_of(key, self.cuts)
        like = self.whole[name] if name in self.whole else self.shards[name]
        part = own_of(key, whole, like, self.cuts, self.parallel)
        if name in self.whole:
            return part
        first = -(-len(part) // self.data.world) * self.data.rank
        return part[first : first + len(self.rows[name])]


def _norms_of(model: nn.Module) -> set[nn.Parameter]:
    return {one for module in model.modules() if isinstance(module, LayerNorm) for one in module.parameters()}


def _shard(model: Model, config: TrainConfig, data: Group, norms: set[nn.Parameter]) -> list[FSDPModule]:
    """Blocks, then what is left (the tables), each gathered and reduced as one.

    Each comes to the device when it is its turn and leaves its rows there: none need have room for the whole model.
    """
    handle: Any = data.handle or dist.group.WORLD
    mesh = DeviceMesh.from_group(handle, data.device.kind)
    kind = COMPUTED_IN[config.precision]
    policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32, cast_forward_inputs=False)
    found = list[FSDPModule]()
    for module in (*model.blocks.values(), model):
        # The tables are used first and last: there is no time in which they could be given away.
        again = config.zero >= 3 and module is not model
        fully_shard(module, mesh=mesh, reshard_after_forward=again, mp_policy=policy, ignored_params=norms)
        assert isinstance(module, FSDPModule)
        # The losses are scaled for a sum already.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        found.append(module)
    return found


def _own_rows(sharded: Any) -> Tensor:
    """What this rank has of a divided tensor: the same memory."""
    rows: Tensor = sharded.detach().to_local()
    return rows
