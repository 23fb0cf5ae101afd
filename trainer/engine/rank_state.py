"""A rank's weights, gradients and optimizer state with ZeRO 0 and 1, and the buffer that sums gradients over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
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
from trainer.model.cuts import Cut, cuts_of, learned, own_of
from trainer.model.norm import Norm
from trainer.parallel.group import Group
from trainer.parallel.pipeline import TIED, UNDIVIDED, Pipeline
from trainer.parallel.tensor import Parallel

# The type of matrices in each precision.
COMPUTED_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Names and complete tensors. Producing one is a collective: every rank must consume all of them.
Arriving = Iterable[tuple[str, Tensor]]


class RankState(Protocol):
    """One rank's weights, gradients and optimizer state. Every method is a collective over the data parallel group."""

    optimizer: ShardedAdamW

    def clear(self) -> None:
        """Drop all gradients, before a step's first backward pass."""

    def last_backward(self, names: Collection[str] = ()) -> None:
        """Announce that the next backward pass completes the gradients of `names`, or of all parameters.

        These gradients may be exchanged during that pass.
        """

    def wait(self) -> None:
        """Wait until every gradient is the sum over data parallel ranks, parts of the sequence and tied copies."""

    @property
    def skips(self) -> bool:
        """Return whether `update` changes nothing if the norm is not finite, so that the host need not wait for it."""

    def clip(self, limit: float, scale: float = 1.0) -> Tensor:
        """Return the gradients' norm over the whole model; `update` will scale them down to `limit` if it is not 0.

        `scale`: the factor of the loss; norm and update are divided by it.
        """

    def update(self, rate: float) -> None:
        """Take one optimizer step; then every rank has the new weights."""

    def skipped(self) -> None:
        """Note that the last update changed nothing, because the norm was not finite."""

    def parts(self) -> list[Part]:
        """Return this rank's parts of all learned weights and moments. Not a collective."""

    def fixed_parts(self) -> list[Part]:
        """Return this rank's parts of the frozen weights, which are never saved. Not a collective."""

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        """Let `fill` write all parts, then continue after `optimizer_steps` updates. Not a collective."""

    def replicate(self, names: Collection[str]) -> None:
        """Copy the named parameters from the first rank with the same weights to the others."""


class ReplicatedState:
    """ZeRO 0 and 1: every rank has all weights and gradients; with ZeRO 1 the optimizer state is divided.

    In bf16 and fp16 the weights have that type, except those of norms, and the optimizer keeps fp32 masters: whole, or
    for bf16 as 16 more bits. So a forward pass casts no weights.
    """

    def __init__(
        self, model: Model, config: TrainConfig, data: Group, pipeline: Pipeline = UNDIVIDED
    ) -> None:
        self.model, self.cuts, self.parallel = model, cuts_of(model), model.parallel
        everything = dict(model.named_parameters())
        self.parameters: Mapping[str, nn.Parameter] = learned(everything)
        self.fixed = {name: each for name, each in everything.items() if name not in self.parameters}
        self.gradients = GradientBuffer(self.parameters, self.cuts, data, self.parallel, pipeline)
        self.ops = native.choose(data.device.kind, config.native)
        host = moves_optimizer(config, data)
        compact = config.stores_remainders(data.device.kind)
        self.optimizer = ShardedAdamW(
            self.parameters, config.optimizer, data, config.zero, self.ops, host, compact
        )
        if config.precision != "fp32":
            names = lowered(model)
            self.optimizer.lower(
                [name for name in names if name in self.parameters], COMPUTED_IN[config.precision]
            )
            for name in self.fixed.keys() & set(names):
                self.fixed[name].data = self.fixed[name].data.to(COMPUTED_IN[config.precision])
        self.factor: float | Tensor = 1.0
        self.skips = self.optimizer.ops.reads_factor

    def clear(self) -> None:
        self.gradients.clear()
        # Do this before the passes: whole masters together with activations would be the memory peak of the first step.
        self.optimizer.divide()

    def last_backward(self, names: Collection[str] = ()) -> None:
        self.gradients.sum_on_next_backward(names)

    def wait(self) -> None:
        self.gradients.wait()

    def clip(self, limit: float, scale: float = 1.0) -> Tensor:
        norm = self.gradients.norm(self.ops.square_sum) / scale
        if self.skips:
            self.factor = clip_factor_on_device(norm, limit, scale)
        else:
            self.factor = clip_factor(float(norm), limit) / scale
        return norm

    def update(self, rate: float) -> None:
        self.optimizer.step(rate, self.gradients.gradients(), self.factor)
        self.gradients.clear()

    def skipped(self) -> None:
        self.optimizer.taken -= 1

    def parts(self) -> list[Part]:
        data, parallel, pipeline = self.optimizer.group, self.parallel, self.gradients.pipeline
        self.optimizer.join()
        # With ZeRO 0 every rank could save everything; each saves the parameters that it would own with ZeRO 1.
        owner = self.optimizer.owner or owners(self.parameters, data.world)
        found = list[Part]()
        for name, parameter in self.parameters.items():
            cut = self.cuts[name]
            owned = owner[name] == data.rank and saves_copy(name, cut, parallel, pipeline)
            found += optimizer_parts(self.optimizer, name, Place(parameter.shape, cut, parallel).part, owned)
        return found

    def fixed_parts(self) -> list[Part]:
        found = list[Part]()
        for name, parameter in self.fixed.items():
            found += Place(parameter.shape, self.cuts[name], self.parallel).part(
                name, parameter.detach(), False
            )
        return found

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        fill(self.parts())
        self.optimizer.taken = optimizer_steps

    def replicate(self, names: Collection[str]) -> None:
        everything = {**self.parameters, **self.fixed}
        self.optimizer.group.broadcast(everything[name].data for name in sorted(names))


def saves_copy(name: str, cut: Cut, parallel: Parallel, pipeline: Pipeline) -> bool:
    """Return whether this rank's copy of a parameter is the one that is counted and saved."""
    return pipeline.counts(name) and (parallel.rank == 0 or cut.dim is not None)


def moves_optimizer(config: TrainConfig, data: Group) -> bool:
    """Return whether the optimizer state moves to CPU memory; on a CPU it is there already."""
    return config.offload and data.device.kind != "cpu"


def lowered(model: nn.Module) -> list[str]:
    """Return the names of the parameters that may have a 16-bit type: all except those of norms."""
    norms = (module for module in model.modules() if isinstance(module, Norm))
    norm_parameters = {parameter for norm in norms for parameter in norm.parameters()}
    return [name for name, parameter in model.named_parameters() if parameter not in norm_parameters]


@torch.no_grad()
def load_parameters(model: Model, arriving: Arriving) -> None:
    """Load whole parameters; this rank keeps its parts."""
    cuts, parameters = cuts_of(model), dict(model.named_parameters())
    for name, whole in arriving:
        parameters[name].copy_(own_of(name, whole, parameters[name], cuts, model.parallel))


# The size of the pieces in which gradients are exchanged during the backward pass (DDP's default).
BUCKET_BYTES = 25 << 20


class Mode(Enum):
    """What a backward pass does with a gradient."""

    KEEP = "keep"
    """Leave it to autograd, because nothing will be added to it."""
    WRITE = "write"
    """Write it into the buffer."""
    ADD = "add"
    """Add it to the buffer."""


@dataclass
class Arrived:
    """The gradients of a captured pass, which each replay computes again in the same memory."""

    added: set[str] = field(default_factory=set)
    """The names of those in the buffer."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Those that autograd keeps."""


class GradientBuffer:
    """Adds gradients of any type in fp32 and sums them over the ranks, in pieces, during the backward pass.

    A single rank with one micro-batch uses autograd's gradients without a buffer.

    DDP is not used because it regroups its buckets after the first step, and gloo adds the ranks' values of an element
    in an order that depends on the element's index in its bucket. With three or more ranks, a resumed run would differ
    from an uninterrupted one in the last bits. Here the indices never change.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        cuts: Mapping[str, Cut],
        group: Group,
        parallel: Parallel,
        pipeline: Pipeline = UNDIVIDED,
    ) -> None:
        """`group`: the ranks that hold the same parts of the model. `parallel`: the ranks that share each matrix."""
        self.parameters, self.cuts, self.group, self.parallel = parameters, cuts, group, parallel
        self.pipeline = pipeline
        self.travels = group.world > 1
        # Parameters whose last backward pass of the step has begun.
        self.last: Collection[str] = ()
        # Parameters whose gradients are in the buffer.
        self.added: set[str] = set()
        # Whether a pass is captured, so that ranks exchange nothing in it.
        self.records = False
        # Approximately the order in which the backward pass completes the gradients.
        ordered = list(parameters)[::-1]
        self.pieces = _pieces(ordered, parameters)
        self.piece_of = {name: i for i, piece in enumerate(self.pieces) for name in piece}
        # How many gradients of each piece are not complete yet.
        self.waiting: list[int] = []
        self.next_piece = 0
        self.work: list[Any] = []
        for name in ordered:
            parameters[name].register_post_accumulate_grad_hook(partial(self._arrived, name))

    @cached_property
    def flat(self) -> Tensor:
        """Return the buffer, which is allocated on first use."""
        numbers = sum(parameter.numel() for parameter in self.parameters.values())
        return torch.zeros(numbers, device=self.group.device.name, dtype=torch.float32)

    @cached_property
    def views(self) -> Mapping[str, Tensor]:
        """Return each parameter's view of the buffer."""
        views, end = {}, 0
        for name in (name for piece in self.pieces for name in piece):
            parameter = self.parameters[name]
            views[name] = self.flat[end : end + parameter.numel()].view_as(parameter)
            end += parameter.numel()
        return views

    def gradient(self, name: str) -> Tensor:
        """Return one parameter's gradient, after `wait`; it is a view, so changes apply to the gradient itself."""
        if name in self.added:
            return self.views[name]
        gradient = self.parameters[name].grad
        # `wait` has set missing gradients to zero.
        assert gradient is not None
        return gradient

    def gradients(self) -> dict[str, Tensor]:
        """Return all gradients, after `wait`."""
        return {name: self.gradient(name) for name in self.parameters}

    def _arrived(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if name in self.last and self.mode is Mode.KEEP:
            # No other gradient will be added to this one.
            return
        if name in self.added:
            self.views[name].add_(parameter.grad)
        else:
            self.views[name].copy_(parameter.grad)
        self.added.add(name)
        parameter.grad = None
        if name in self.last and self.travels and not self.records:
            self.waiting[self.piece_of[name]] -= 1
            self._send_ready()

    @property
    def mode(self) -> Mode:
        """Return what the next backward pass does with gradients that are not in the buffer yet."""
        if self.added:
            return Mode.ADD
        alone = not self.travels and not self.parallel.divides_sequence
        return Mode.KEEP if self.last and alone else Mode.WRITE

    @contextmanager
    def recording(self) -> Iterator[Arrived]:
        """Record which gradients a captured pass computes; afterwards nothing has arrived yet."""
        before, self.records = set(self.added), True
        arrived = Arrived()
        try:
            yield arrived
            arrived.added |= self.added
            arrived.kept |= {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        finally:
            self.added, self.records = before, False
            for parameter in self.parameters.values():
                parameter.grad = None

    def replayed(self, arrived: Arrived) -> None:
        """Note the gradients that a replayed pass has computed; `wait` sums them over the ranks."""
        self.added |= arrived.added
        for name, gradient in arrived.kept.items():
            self.parameters[name].grad = gradient

    def _send_ready(self) -> None:
        """Start summing complete pieces, in an order that is the same on every rank."""
        while self.next_piece < len(self.pieces) and self.waiting[self.next_piece] == 0:
            self.work.append(dist.all_reduce(self._piece(), group=self.group.handle, async_op=True))
            self.next_piece += 1

    def _piece(self) -> Tensor:
        """Return the next piece to sum, as a view of the buffer."""
        first, last = (self.views[self.pieces[self.next_piece][at]] for at in (0, -1))
        return self.flat[first.storage_offset() : last.storage_offset() + last.numel()]

    def clear(self) -> None:
        """Drop all gradients and free those that are not in the buffer."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.added.clear()
        self.last = ()
        self.waiting, self.next_piece = [len(piece) for piece in self.pieces], 0

    def sum_on_next_backward(self, names: Collection[str] = ()) -> None:
        """Sum each piece as soon as the next backward pass completes it: the last pass for `names`, or for all."""
        self.last = {*self.last, *names} if names else self.parameters.keys()

    @torch.no_grad()
    def wait(self) -> None:
        """Wait until every gradient is complete and summed."""
        for name, parameter in self.parameters.items():
            # The loss did not depend on this parameter.
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
        """Sum, over the tensor parallel ranks, the gradients that each rank computed from its part of the sequence."""
        parts = [self.gradient(name) for name in self.parameters if self.cuts[name].partial]
        # This can be empty, for example on a first stage with only the embedding.
        if not parts:
            return
        whole = self.parallel.sum(torch.cat([part.flatten() for part in parts]))
        for part, summed in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))

    def norm(self, square_sum: Callable[[Sequence[Tensor]], Tensor] = plain_square_sum) -> Tensor:
        """Return the norm over all parts of the model."""
        gradients = self.gradients().items()
        counted = {name: gradient for name, gradient in gradients if self.pipeline.counts(name)}
        return norm_of(counted, self.cuts, self.parallel, self.pipeline, square_sum)


def _pieces(ordered: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the parameters of each piece: those that are adjacent in the buffer and summed together."""
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
    """Return the norm over all parts of the model; parameters that all tensor parallel ranks have are counted once."""
    counted = [
        gradient for name, gradient in gradients.items() if parallel.rank == 0 or cuts[name].dim is not None
    ]
    if not counted and not gradients:
        # A stage without learned parameters.
        return pipeline.sum(parallel.sum(torch.zeros(()))).sqrt()
    nothing = next(iter(gradients.values())).new_zeros((), dtype=torch.float32)
    return pipeline.sum(parallel.sum(square_sum(counted) if counted else nothing)).sqrt()


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that scales gradients of this norm down to `limit`; 1 if `limit` is 0."""
    return limit / (norm + 1e-6) if 0 < limit < norm < float("inf") else 1.0


def clip_factor_on_device(norm: Tensor, limit: float, scale: float) -> Tensor:
    """Return `clip_factor` over `scale` as a tensor on the norm's device; NaN for a norm that is not finite."""
    factor = torch.where(norm > limit, limit / (norm + 1e-6), 1.0) if limit > 0 else torch.ones_like(norm)
    return torch.where(norm < float("inf"), factor / scale, float("nan"))
