"""All gradients of a rank: used as they come where that is right, else added up in one fp32 buffer and summed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from native.reference import square_sum as plain_square_sum
from trainer.group import Group
from trainer.logical import Cut
from trainer.parallel import Parallel
from trainer.pipeline import TIED, UNDIVIDED, Pipeline

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
        self.last: Collection[str] = ()  # whose last backward pass of the step is under way, or over
        self.added: set[str] = set()  # whose gradients are in the buffer
        ordered = list(parameters)[::-1]  # about the order in which they are finished
        self.pieces = _pieces(ordered, parameters)
        self.piece_of = {name: i for i, piece in enumerate(self.pieces) for name in piece}
        self.waiting: list[int] = []  # gradients still to come, a piece
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
        assert gradient is not None  # `wait` fills up what never came
        return gradient

    def gradients(self) -> dict[str, Tensor]:
        """All of them, after `wait`."""
        return {name: self.gradient(name) for name in self.parameters}

    def _arrived(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if name in self.last and not self.travels and not self.parallel.divides_sequence and name not in self.added:
            return  # the only one there will be
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
            if parameter.grad is None and name not in self.added:  # a part of the model that had no part in the loss
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
        if not parts:  # as of a first stage that only embeds
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
