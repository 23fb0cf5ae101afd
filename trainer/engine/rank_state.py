"""A rank's weights, gradients and optimizer state with ZeRO 0 and 1, and the buffer that sums gradients over ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

import native
from native.reference import square_sum as plain_square_sum
from trainer.checkpoint.part import Part
from trainer.config.train_config import TrainConfig
from trainer.device import Stopwatch
from trainer.engine.buckets import Buckets, GatheredWeights
from trainer.engine.optimizer import AdamW, decay_of
from trainer.engine.parts import Place, optimizer_parts
from trainer.engine.passes import Model
from trainer.model.cuts import Cut, cuts_of, learned, own_of
from trainer.parallel.group import Group
from trainer.parallel.pipeline import TIED, UNDIVIDED, Pipeline
from trainer.parallel.tensor import Parallel

# The type of matrices in each precision.
COMPUTED_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Names and complete tensors. Producing one is a collective: every rank must consume all of them.
Arriving = Iterable[tuple[str, Tensor]]


class RankState(Protocol):
    """One rank's weights, gradients and optimizer state. Every method is a collective over the data parallel group."""

    optimizer: AdamW

    def clear(self, own: Stopwatch | None = None) -> None:
        """Drop all gradients, before a step's first backward pass; `own` stops while that waits for other ranks."""

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
    """ZeRO 0 and 1: every rank has all weights and room for all gradients; ZeRO 1 divides the rest of the step.

    With ZeRO 1, each rank gets the sums of its share of each bucket of gradients, has the optimizer state of this
    share and updates it. The other ranks' new weights arrive while the next pass begins.

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
        self.group, self.pipeline = data, pipeline
        self.ops = native.choose(data.device.kind, config.native)
        norms, kind = norms_of(model), COMPUTED_IN[config.precision]
        types = {name: torch.float32 if each in norms else kind for name, each in everything.items()}
        self.buckets = Buckets(self.parameters, data.rank, data.world, types)
        masters = {name: each.data for name, each in self.parameters.items() if types[name] != torch.float32}
        own: Mapping[str, Tensor] = self.parameters
        self.weights = None
        divided = config.zero >= 1 and data.world > 1
        if divided:
            masters = {name: whole.clone() for name, whole in self.buckets.shares(masters).items()}
            self.weights = GatheredWeights(model, self.parameters, self.buckets, data, types)
            own = self.buckets.shares(self.parameters)
        for name, each in everything.items():
            each.data = each.data.to(types[name])
        self.gradients = GradientBuffer(
            self.parameters, self.cuts, data, self.parallel, pipeline, self.buckets, divided
        )
        decays = {name: decay_of(each, config.optimizer) for name, each in self.parameters.items()}
        self.optimizer = AdamW(
            own,
            config.optimizer,
            decays,
            self.ops,
            masters,
            host=moves_optimizer(config, data),
            remainders=config.stores_remainders(data.device.kind),
        )
        self.factor: float | Tensor = 1.0
        self.skips = self.optimizer.ops.reads_factor

    def clear(self, own: Stopwatch | None = None) -> None:
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
        self.weights_arrived()
        self.optimizer.step(rate, self.gradients.gradients(), self.factor)
        self.gradients.clear()
        if self.weights:
            self.weights.send()

    def weights_arrived(self) -> None:
        """Wait until this rank has the weights that the last update gave to all ranks."""
        if self.weights:
            self.weights.wait()

    def skipped(self) -> None:
        self.optimizer.taken -= 1

    def parts(self) -> list[Part]:
        self.weights_arrived()
        self.optimizer.join()
        found = list[Part]()
        for name, parameter in self.parameters.items():
            cut = self.cuts[name]
            place = Place(parameter.shape, cut, self.parallel)
            saves = saves_copy(name, cut, self.parallel, self.pipeline)
            if name in self.optimizer.parameters:
                put = partial(self._put, place, self.buckets.own[name])
                found += optimizer_parts(self.optimizer, name, put, saves)
            if self.weights:
                found += _rest(place, name, parameter.detach(), self.buckets.own[name])
        return found

    def _put(self, place: Place, own: slice, key: str, tensor: Tensor, owned: bool) -> Iterator[Part]:
        """Yield the parts of a share; with ZeRO 0 of a whole tensor, of which this rank saves its share."""
        if self.weights:
            yield from place.flat(key, own.start, tensor, owned)
            return
        yield from place.flat(key, own.start, tensor.view(-1)[own], owned)
        yield from _rest(place, key, tensor, own)

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
        self.group.broadcast(everything[name].data for name in sorted(names))


def _rest(place: Place, key: str, whole: Tensor, own: slice) -> Iterator[Part]:
    """Yield the parts of a tensor that are outside of this rank's share; other ranks save them."""
    flat = whole.view(-1)
    yield from place.flat(key, 0, flat[: own.start], owned=False)
    yield from place.flat(key, own.stop, flat[own.stop :], owned=False)


def saves_copy(name: str, cut: Cut, parallel: Parallel, pipeline: Pipeline) -> bool:
    """Return whether this rank's copy of a parameter is the one that is counted and saved."""
    return pipeline.counts(name) and (parallel.rank == 0 or cut.dim is not None)


def moves_optimizer(config: TrainConfig, data: Group) -> bool:
    """Return whether the optimizer state moves to CPU memory; on a CPU it is there already."""
    return config.offload and data.device.kind != "cpu"


def norms_of(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of norms and the biases of routers, which are fp32 in every precision."""
    found = (getattr(module, name) for module in model.modules() for name in getattr(module, "wide", ()))
    return {parameter for parameter in found if parameter is not None}


@torch.no_grad()
def load_parameters(model: Model, arriving: Arriving) -> None:
    """Load whole parameters; this rank keeps its parts."""
    cuts, parameters = cuts_of(model), dict(model.named_parameters())
    for name, whole in arriving:
        parameters[name].copy_(own_of(name, whole, parameters[name], cuts, model.parallel))


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
    """Adds gradients of any type in fp32 and sums them over the ranks, in buckets, during the backward pass.

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
        buckets: Buckets | None = None,
        divides: bool = False,
    ) -> None:
        """`group`: the ranks that hold the same parts of the model. `parallel`: the ranks that share each matrix.

        `divides`: each rank gets the sums of its shares of the buckets alone.
        """
        self.parameters, self.cuts, self.group, self.parallel = parameters, cuts, group, parallel
        self.pipeline = pipeline
        self.travels = group.world > 1
        # Parameters whose last backward pass of the step has begun.
        self.last: Collection[str] = ()
        # Parameters whose gradients are in the buffer.
        self.added: set[str] = set()
        # Whether a pass is captured, so that ranks exchange nothing in it.
        self.records = False
        self.divides = divides
        types = dict.fromkeys(parameters, torch.float32)
        self.buckets = buckets or Buckets(parameters, group.rank, group.world, types)
        self.bucket_of = {name: i for i, bucket in enumerate(self.buckets.all) for name in bucket.names}
        # How many gradients of each bucket are not complete yet.
        self.waiting: list[int] = []
        self.next_bucket = 0
        self.work: deque[Any] = deque()
        for name in parameters:
            parameters[name].register_post_accumulate_grad_hook(partial(self._arrived, name))

    @cached_property
    def flat(self) -> Tensor:
        """Return the buffer, which is allocated on first use."""
        return torch.zeros(self.buckets.size, device=self.group.device.name, dtype=torch.float32)

    @cached_property
    def views(self) -> Mapping[str, Tensor]:
        """Return each parameter's view of the buffer."""
        return {name: self.buckets.view(name, self.flat) for name in self.parameters}

    @cached_property
    def shares(self) -> Mapping[str, Tensor]:
        """Return this rank's share of each parameter's view of the buffer."""
        return self.buckets.shares(self.views)

    def gradients(self) -> Mapping[str, Tensor]:
        """Return all gradients, or this rank's shares of them, after `wait`; changes apply to the gradients."""
        if self.divides:
            return self.shares
        # `wait` has set missing gradients to zero.
        return {
            name: self.views[name] if name in self.added else cast("Tensor", parameter.grad)
            for name, parameter in self.parameters.items()
        }

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
            self.waiting[self.bucket_of[name]] -= 1
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
        """Start summing complete buckets, in an order that is the same on every rank."""
        while self.next_bucket < len(self.waiting) and self.waiting[self.next_bucket] == 0:
            bucket = self.buckets.all[self.next_bucket].of(self.flat)
            # Gloo has a copy of each bucket on its way to the shares.
            while self.divides and self.group.device.kind == "cpu" and len(self.work) > 1:
                self.work.popleft().wait()
            self.work.append(self.group.sum_shares(bucket) if self.divides else self.group.start_sum(bucket))
            self.next_bucket += 1

    def clear(self) -> None:
        """Drop all gradients and free those that are not in the buffer."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.added.clear()
        self.last = ()
        self.waiting, self.next_bucket = [len(bucket.names) for bucket in self.buckets.all], 0

    def sum_on_next_backward(self, names: Collection[str] = ()) -> None:
        """Sum each bucket as soon as the next backward pass completes it: the last pass for `names`, or for all."""
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
            self.waiting = [0] * len(self.buckets.all)
            self._send_ready()
        while self.work:
            self.work.popleft().wait()
        self.last = ()
        if self.parallel.divides_sequence:
            # Each rank computed these gradients from its part of the sequence.
            own = self.gradients().items()
            self.parallel.sum_all([gradient for name, gradient in own if self.cuts[name].partial])
        if self.pipeline.stages > 1 and (tied := self.gradients().get(TIED)) is not None:
            self.pipeline.sum_ends(tied)
        for name in () if self.divides else self.added:
            if self.parameters[name].dtype == self.flat.dtype:
                self.parameters[name].grad = self.views[name]

    def norm(self, square_sum: Callable[[Sequence[Tensor]], Tensor] = plain_square_sum) -> Tensor:
        """Return the norm over all parts of the model."""
        gradients = self.gradients().items()
        counted = {name: gradient for name, gradient in gradients if self.pipeline.counts(name)}
        return norm_of(
            counted, self.cuts, self.parallel, self.pipeline, self.group, square_sum, shares=self.divides
        )


def norm_of(
    gradients: Mapping[str, Tensor],
    cuts: Mapping[str, Cut],
    parallel: Parallel,
    pipeline: Pipeline,
    data: Group,
    square_sum: Callable[[Sequence[Tensor]], Tensor] = plain_square_sum,
    *,
    shares: bool = False,
) -> Tensor:
    """Return the norm over all parts of the model; parameters that all tensor parallel ranks have are counted once.

    `shares`: each data parallel rank has a share of each gradient.
    """
    counted = [
        gradient for name, gradient in gradients.items() if parallel.rank == 0 or cuts[name].dim is not None
    ]
    total = square_sum(counted) if counted else torch.zeros((), device=data.device.name)
    if shares:
        data.sum(total)
    return pipeline.sum(parallel.sum(total)).sqrt()


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that scales gradients of this norm down to `limit`; 1 if `limit` is 0."""
    return limit / (norm + 1e-6) if 0 < limit < norm < float("inf") else 1.0


def clip_factor_on_device(norm: Tensor, limit: float, scale: float) -> Tensor:
    """Return `clip_factor` over `scale` as a tensor on the norm's device; NaN for a norm that is not finite."""
    factor = torch.where(norm > limit, limit / (norm + 1e-6), 1.0) if limit > 0 else torch.ones_like(norm)
    return torch.where(norm < float("inf"), factor / scale, float("nan"))
