"""ZeRO 2 and 3 by torch's fully_shard: each data parallel rank has some rows of every matrix, gradient and moment.

With ZeRO 2, weights are gathered once per step, and gradients are divided as soon as they are computed. With ZeRO 3,
each block's weights are gathered before its forward pass and again before its backward pass. Norms are not divided:
they are about 0.02 % of a model, and their type differs from that of the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import native
from trainer.checkpoint.part import Part
from trainer.config.train_config import TrainConfig
from trainer.device import Stopwatch, give_back_freed_memory, pool_buffers
from trainer.engine.optimizer import AdamW, decay_of
from trainer.engine.parts import Place, optimizer_parts
from trainer.engine.passes import Model
from trainer.engine.rank_state import (
    COMPUTED_IN,
    GradientBuffer,
    clip_factor,
    moves_optimizer,
    norms_of,
    saves_copy,
)
from trainer.model.cuts import cuts_of, learned
from trainer.model.unallocated import allocate
from trainer.parallel.group import Group
from trainer.parallel.pipeline import TIED, UNDIVIDED, Pipeline


class ShardedState:
    """This rank's rows of each matrix and bias in fp32, with gradients and moments; norms are whole."""

    def __init__(
        self, model: Model, config: TrainConfig, data: Group, pipeline: Pipeline = UNDIVIDED
    ) -> None:
        self.model, self.zero, self.data, self.parallel = model, config.zero, data, model.parallel
        self.pipeline = pipeline
        self.cuts = cuts_of(model)
        norms = norms_of(model)
        for norm in norms:
            norm.data = norm.data.to(data.device.name)
        whole = {name: parameter for name, parameter in model.named_parameters() if parameter in norms}
        self.whole = learned(whole)
        self.waits = Waits()
        self.modules = _shard(model, config, data, norms, self.waits)
        if data.device.kind == "cpu" and pool_buffers():
            give_back_freed_memory()
        everything: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.shards: dict[str, nn.Parameter] = {
            name: shard for name, shard in everything.items() if name not in whole and shard.requires_grad
        }
        self.names = [name for name in self.cuts if name in self.whole or name in self.shards]
        self.rows = {name: nn.Parameter(_own_rows(shard)) for name, shard in self.shards.items()}
        self.fixed = {name: each for name, each in everything.items() if name not in self.names}
        cuts = {name: self.cuts[name] for name in self.whole}
        self.gradients = GradientBuffer(self.whole, cuts, data, self.parallel)
        own = {name: part for name, part in {**self.whole, **self.rows}.items() if part.numel()}
        decays = {name: decay_of(part, config.optimizer) for name, part in own.items()}
        ops, host = native.choose(data.device.kind), moves_optimizer(config, data)
        self.optimizer = AdamW(own, config.optimizer, decays, ops, host=host)
        self.factor = 1.0
        self.skips = False

    def clear(self, own: Stopwatch | None = None) -> None:
        self.waits.own = own
        self.gradients.clear()
        for shard in self.shards.values():
            shard.grad = None
        self._keep_gathered(self.zero < 3)

    def last_backward(self, names: Collection[str] = ()) -> None:
        self.gradients.sum_on_next_backward(names)
        self._keep_gathered(False)

    def _keep_gathered(self, keep: bool) -> None:
        """Keep gathered weights after a backward pass, because ZeRO 2 uses them in the step's next micro-batch."""
        for module in self.modules:
            module.set_reshard_after_backward(not keep, recurse=False)

    def wait(self) -> None:
        self.waits.own = None
        self.gradients.wait()
        for name, own in self.rows.items():
            own.grad = _own_rows(self.shards[name].grad)
        if self.parallel.divides_sequence:
            # Each rank computed these gradients from its part of the sequence.
            self.parallel.sum_all([self._gradient(name) for name in self.rows if self.cuts[name].partial])
        if self.pipeline.stages > 1 and TIED in self.rows:
            self.pipeline.sum_ends(self._gradient(TIED))

    def clip(self, limit: float, scale: float = 1.0) -> Tensor:
        norm = math.sqrt(self._square()) / scale
        self.factor = clip_factor(norm, limit) / scale
        return torch.tensor(norm)

    def _square(self) -> float:
        """Return the norm's square: each rank adds its rows, and the first rank adds what every rank has whole."""
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
        # `wait` has set this gradient.
        assert gradient is not None
        return gradient

    def update(self, rate: float) -> None:
        self._reshard()
        self.optimizer.step(rate, factor=self.factor)

    def skipped(self) -> None:
        """Do nothing: no update skips."""

    def _reshard(self) -> None:
        """Free gathered weights, which an evaluation keeps and which the update would make stale."""
        for module in self.modules:
            module.reshard()

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

    def fixed_parts(self) -> list[Part]:
        self._reshard()
        found = list[Part]()
        for name, parameter in self.fixed.items():
            place = Place(parameter.shape, self.cuts[name], self.parallel)
            if not isinstance(parameter, DTensor):
                found += place.part(name, parameter.detach(), False)
            elif len(own := _own_rows(parameter)):
                first = -(-parameter.shape[0] // self.data.world) * self.data.rank
                found += place.rows(first, name, own, False)
        return found

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        self._reshard()
        fill(self.parts())
        self.optimizer.taken = optimizer_steps

    def replicate(self, names: Collection[str]) -> None:
        """Do nothing: each rank has different rows, and norms, which are whole, have constant initial values."""


class Waits:
    """Stops the stopwatch of a step while a sharded module waits for other ranks: for weights or for gradients.

    Hooks run in the order in which they are made, and `fully_shard` makes its own between `before` and `after`.
    """

    def __init__(self) -> None:
        self.own: Stopwatch | None = None

    def _stop(self, _: Any = None) -> None:
        if self.own is not None:
            self.own.stop()

    def _resume(self, _: Any = None) -> None:
        if self.own is not None:
            self.own.resume()

    def before(self, module: nn.Module) -> None:
        module.register_forward_hook(lambda _, given, output: _on_gradient(output, self._stop))

    def after(self, module: nn.Module) -> None:
        def begins(_: nn.Module, given: Any) -> None:
            self._stop()
            _on_gradient(given, self._resume)

        def gathered(_: nn.Module, given: Any) -> None:
            self._resume()
            _on_gradient(given, self._stop)

        module.register_forward_pre_hook(begins, prepend=True)
        module.register_forward_pre_hook(gathered)
        module.register_forward_hook(lambda _, given, output: _on_gradient(output, self._resume))


def _on_gradient(values: Any, do: Callable[[Any], None]) -> None:
    """Call `do` when the gradient of the first tensor that has one is known."""
    tensors = values if isinstance(values, tuple) else (values,)
    first = next((each for each in tensors if isinstance(each, Tensor) and each.requires_grad), None)
    if first is not None and torch.is_grad_enabled():
        first.register_hook(do)


def _shard(
    model: Model, config: TrainConfig, data: Group, norms: set[nn.Parameter], waits: Waits
) -> list[FSDPModule]:
    """Shard each block, then the rest (the tables); return the modules that are gathered as a unit.

    Modules are allocated on the device one by one and keep only their rows, so that neither a device nor a node needs
    memory for the whole model.
    """
    handle: Any = data.handle or dist.group.WORLD
    mesh = DeviceMesh.from_group(handle, data.device.kind)
    kind = COMPUTED_IN[config.precision]
    policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32, cast_forward_inputs=False)
    modules = list[FSDPModule]()
    for module in (*model.blocks.values(), model):
        # The tables are used at the start and at the end of a pass, so freeing them in between saves little.
        again = config.zero >= 3 and module is not model
        allocate(module, data.device.name)
        waits.before(module)
        fully_shard(module, mesh=mesh, reshard_after_forward=again, mp_policy=policy, ignored_params=norms)
        waits.after(module)
        assert isinstance(module, FSDPModule)
        # The losses are already weighted for a sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        modules.append(module)
    return modules


def _own_rows(sharded: Any) -> Tensor:
    """Return this rank's rows of a divided tensor, as a view of it."""
    rows: Tensor = sharded.detach().to_local()
    return rows
