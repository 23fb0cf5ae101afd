"""What a rank holds between steps: weights, gradients, moments, whole or its part of them.

All gradients of a rank: used as they come where that is right, else added up in one fp32 buffer and summed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import native
from native.reference import square_sum as plain_square_sum
from trainer.checkpoint.part import Part
from trainer.config.train_config import TrainConfig
from trainer.engine.optimizer import ShardedAdamW, owners
from trainer.engine.parts import Place, optimizer_parts
from trainer.engine.passes import Model
from trainer.model.layers import Cut, LayerNorm, cuts_of, own_of, parameter_of
from trainer.parallel.group import Group
from trainer.parallel.pipeline import TIED, UNDIVIDED, Pipeline
from trainer.parallel.tensor import Parallel

COMPUTED_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Names and whole tensors; all ranks must take all of them.
Arriving = Iterable[tuple[str, Tensor]]


class RankState(Protocol):
    """Weights and what belongs to them, of one rank among its data parallel ones; all methods are for all of these."""

    optimizer: ShardedAdamW

    def clear(self) -> None:
        """Before a step's first backward pass: no gradients."""

    def last_backward(self, names: Collection[str] = ()) -> None:
        """The next backward pass finishes the gradients, of these if not of all: they may travel while it goes on."""

    def wait(self) -> None:
        """Until every gradient is the sum over the data parallel ranks, the sequence's parts and tied copies."""

    def clip(self, limit: float, scale: float = 1.0) -> float:
        """The norm over all parts of the model; gradients above `limit` (if not 0) are scaled down to it.

        `scale`: what the loss was multiplied by; norm and update are as if it had not been.
        """

    def update(self, rate: float) -> None:
        """One optimizer step; every rank has the new weights afterwards."""

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], int]:
        """Weights, moments, steps taken; of the tensor parallel part, whole on the first data parallel rank."""

    def load(self, model: Arriving, optimizer: Arriving, taken: int) -> None:
        """Take a whole state; this rank keeps its parts."""

    def parts(self) -> list[Part]:
        """Return the parts of all weights and moments that this rank holds. No collective."""

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        """Have `fill` write all parts, then continue after so many updates. No collective."""


class ReplicatedState:
    """ZeRO 0 and 1: every rank has all weights and gradients; the optimizer's state may be divided.

    Below fp32 the weights are kept in the type that matrices compute in, but for layer norms, and the optimizer
    has masters of them in fp32. Nothing is cast in a pass then.
    """

    def __init__(
        self, model: Model, config: TrainConfig, data: Group, pipeline: Pipeline = UNDIVIDED
    ) -> None:
        self.model, self.cuts, self.parallel = model, cuts_of(model), model.parallel
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        data.broadcast(parameter.data for parameter in self.parameters.values())
        self.gradients = GradientBuffer(self.parameters, self.cuts, data, self.parallel, pipeline)
        self.ops = native.choose(data.device.kind, config.native)
        host = moves_optimizer(config, data)
        self.optimizer = ShardedAdamW(self.parameters, config.optimizer, data, config.zero, self.ops, host)
        if config.precision != "fp32":
            self.optimizer.lower(lowered(model), COMPUTED_IN[config.precision])
        self.factor = 1.0

    def clear(self) -> None:
        self.gradients.clear()

    def last_backward(self, names: Collection[str] = ()) -> None:
        self.gradients.sum_on_next_backward(names)

    def wait(self) -> None:
        self.gradients.wait()

    def clip(self, limit: float, scale: float = 1.0) -> float:
        norm = self.gradients.norm(self.ops.square_sum) / scale
        self.factor = clip_factor(norm, limit) / scale
        return norm

    def update(self, rate: float) -> None:
        self.optimizer.step(rate, self.gradients.gradients(), self.factor)
        self.gradients.clear()

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], int]:
        moments, taken = self.optimizer.state()
        return self.optimizer.weights(), moments, taken

    def parts(self) -> list[Part]:
        data, parallel, pipeline = self.optimizer.group, self.parallel, self.gradients.pipeline
        # With ZeRO 0 every rank could save all; each saves the parameters that it would own.
        owner = self.optimizer.owner or owners(self.parameters, data.world)
        found = list[Part]()
        for name, parameter in self.parameters.items():
            cut = self.cuts[name]
            owned = owner[name] == data.rank and saves_copy(name, cut, parallel, pipeline)
            found += optimizer_parts(self.optimizer, name, Place(parameter.shape, cut, parallel).part, owned)
        return found

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        fill(self.parts())
        self.optimizer.taken = optimizer_steps

    def load(self, model: Arriving, optimizer: Arriving, taken: int) -> None:
        for arriving in (model, optimizer):
            for key, whole in arriving:
                like = self.parameters.get(parameter_of(key, self.cuts))
                # Else another stage has it.
                if like is not None:
                    self.optimizer.take(key, own_of(key, whole, like, self.cuts, self.parallel))
        self.optimizer.taken = taken


def saves_copy(name: str, cut: Cut, parallel: Parallel, pipeline: Pipeline) -> bool:
    """Return whether this rank's copy of a parameter is the one of several that is counted and saved."""
    return pipeline.counts(name) and (parallel.rank == 0 or cut.dim is not None)


def moves_optimizer(config: TrainConfig, data: Group) -> bool:
    """Whether the optimizer's state leaves the device; a CPU's memory is the node's already."""
    return config.offload and data.device.kind != "cpu"


def lowered(model: nn.Module) -> list[str]:
    """Parameters that may be kept in less than fp32: all but those of layer norms."""
    kept = {one for module in model.modules() if isinstance(module, LayerNorm) for one in module.parameters()}
    return [name for name, parameter in model.named_parameters() if parameter not in kept]


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Of each parameter its shape in a checkpoint."""
    cuts = cuts_of(model)
    return {
        name: cuts[name].whole_shape(parameter.shape, model.parallel.size)
        for name, parameter in model.named_parameters()
    }


@torch.no_grad()
def load_parameters(model: Model, arriving: Arriving) -> None:
    """Take whole parameters; this rank keeps its parts."""
    cuts, parameters = cuts_of(model), dict(model.named_parameters())
    for name, whole in arriving:
        parameters[name].copy_(own_of(name, whole, parameters[name], cuts, model.parallel))


# Gradients travel in pieces of this size while the backward pass goes on (DDP's own default).
BUCKET_BYTES = 25 << 20


class GradientBuffer:
    """Gradients of whatever type, added in fp32 and summed over the ranks by pieces during the backward pass.

    A rank alone with one micro-batch uses each gradient as it comes: no buffer, nothing zeroed, nothing added.

    Why not DDP: it regroups its pieces after the first step, and gloo adds an element's parts in an order
    that depends on its place in a piece. With three ranks or more a resumed run would then differ from an
    uninterrupted one in the last bits. Here the places never change.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        cuts: Mapping[str, Cut],
        group: Group,
        parallel: Parallel,
        pipeline: Pipeline = UNDIVIDED,
    ) -> None:
        """`group`: the ranks that hold the same parts of the model; `parallel`: those that share each matrix."""
        self.parameters, self.cuts, self.group, self.parallel = parameters, cuts, group, parallel
        self.pipeline = pipeline
        self.travels = group.world > 1
        # Whose last backward pass of the step is under way, or over.
        self.last: Collection[str] = ()
        # Whose gradients are in the buffer.
        self.added: set[str] = set()
        # About the order in which they are finished.
        ordered = list(parameters)[::-1]
        self.pieces = _pieces(ordered, parameters)
        self.piece_of = {name: i for i, piece in enumerate(self.pieces) for name in piece}
        # Gradients still to come, a piece.
        self.waiting: list[int] = []
        self.next_piece = 0
        self.work: list[Any] = []
        for name in ordered:
            parameters[name].register_post_accumulate_grad_hook(partial(self._arrived, name))

    @cached_property
    def flat(self) -> Tensor:
        """The buffer, made when it is first needed."""
        numbers = sum(parameter.numel() for parameter in self.parameters.values())
        return torch.zeros(numbers, device=self.group.device.name, dtype=torch.float32)

    @cached_property
    def views(self) -> Mapping[str, Tensor]:
        """Of each parameter its place in the buffer."""
        found, end = {}, 0
        for name in (name for piece in self.pieces for name in piece):
            parameter = self.parameters[name]
            found[name] = self.flat[end : end + parameter.numel()].view_as(parameter)
            end += parameter.numel()
        return found

    def gradient(self, name: str) -> Tensor:
        """One parameter's, after `wait`; in place, so that it may be changed."""
        if name in self.added:
            return self.views[name]
        gradient = self.parameters[name].grad
        # `wait` fills up what never came.
        assert gradient is not None
        return gradient

    def gradients(self) -> dict[str, Tensor]:
        """All of them, after `wait`."""
        return {name: self.gradient(name) for name in self.parameters}

    def _arrived(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if (
            name in self.last
            and not self.travels
            and not self.parallel.divides_sequence
            and name not in self.added
        ):
            # The only one there will be.
            return
        if name in self.added:
            self.views[name].add_(parameter.grad)
        else:
            self.views[name].copy_(parameter.grad)
        self.added.add(name)
        parameter.grad = None
        if name in self.last and self.travels:
            self.waiting[self.piece_of[name]] -= 1
            self._send_ready()

    def _send_ready(self) -> None:
        """Send finished pieces in their order, which is then the same on every rank."""
        while self.next_piece < len(self.pieces) and self.waiting[self.next_piece] == 0:
            self.work.append(dist.all_reduce(self._piece(), group=self.group.handle, async_op=True))
            self.next_piece += 1

    def _piece(self) -> Tensor:
        """The next one to be sent, as a part of the buffer."""
        first, last = (self.views[self.pieces[self.next_piece][at]] for at in (0, -1))
        return self.flat[first.storage_offset() : last.storage_offset() + last.numel()]

    def clear(self) -> None:
        """No gradients; what was not in the buffer gives its memory back."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.added.clear()
        self.last = ()
        self.waiting, self.next_piece = [len(piece) for piece in self.pieces], 0

    def sum_on_next_backward(self, names: Collection[str] = ()) -> None:
        """The next backward pass is the step's last, of these if not of all: send each piece as it is complete."""
        self.last = {*self.last, *names} if names else self.parameters.keys()

    @torch.no_grad()
    def wait(self) -> None:
        """Until every gradient is there and summed."""
        for name, parameter in self.parameters.items():
            # A part of the model that had no part in the loss.
            if parameter.grad is None and name not in self.added:
                self.views[name].zero_()
                self.added.add(name)
        if self.travels:
            self.waiting = [0] * len(self.pieces)
            self._send_ready()
        for work in self.work:
            work.wait()
        self.work.clear()
        self.last = ()
        if self.parallel.divides_sequence:
            self._add_parts()
        if self.pipeline.stages > 1 and TIED in self.parameters:
            self.pipeline.sum_ends(self.gradient(TIED))
        for name in self.added:
            if self.parameters[name].dtype == self.flat.dtype:
                self.parameters[name].grad = self.views[name]

    def _add_parts(self) -> None:
        """Sum what each tensor parallel rank has of its part of the sequence alone."""
        parts = [self.gradient(name) for name, cut in self.cuts.items() if cut.partial]
        # As of a first stage that only embeds.
        if not parts:
            return
        whole = self.parallel.sum(torch.cat([part.flatten() for part in parts]))
        for part, summed in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))

    def norm(self, square_sum: Callable[[Sequence[Tensor]], Tensor] = plain_square_sum) -> float:
        """Over all parts of the model."""
        counted = {name: one for name, one in self.gradients().items() if self.pipeline.counts(name)}
        return float(norm_of(counted, self.cuts, self.parallel, self.pipeline, square_sum).item())


def _pieces(ordered: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Neighbours in the buffer that travel together."""
    pieces: list[list[str]] = [[]]
    size = 0
    for name in ordered:
        if size * 4 >= BUCKET_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(name)
        size += parameters[name].numel()
    return pieces if ordered else []


def norm_of(
    gradients: Mapping[str, Tensor],
    cuts: Mapping[str, Cut],
    parallel: Parallel,
    pipeline: Pipeline = UNDIVIDED,
    square_sum: Callable[[Sequence[Tensor]], Tensor] = plain_square_sum,
) -> Tensor:
    """Over all parts of the model; what every tensor parallel rank has whole is counted on one of them."""
    counted = [
        gradient for name, gradient in gradients.items() if parallel.rank == 0 or cuts[name].dim is not None
    ]
    nothing = next(iter(gradients.values())).new_zeros((), dtype=torch.float32)
    return pipeline.sum(parallel.sum(square_sum(counted) if counted else nothing)).sqrt()


def clip_factor(norm: float, limit: float) -> float:
    """What the gradients are multiplied by, so that their norm is at most `limit` (if not 0)."""
    return limit / (norm + 1e-6) if 0 < limit < norm < float("inf") else 1.0
