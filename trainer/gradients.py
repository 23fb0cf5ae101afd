"""All gradients of a rank in one buffer, summed over the data parallel ranks, and their norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.group import Group
from trainer.logical import Cut
from trainer.parallel import Parallel

# Gradients travel in pieces of this size while the backward pass goes on (DDP's own default).
BUCKET_BYTES = 25 << 20


class GradientBuffer:
    """All gradients as views of one fp32 buffer, summed over the ranks by pieces during the backward pass.

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
    ) -> None:
        """`group`: the ranks that hold the same parts of the model; `parallel`: those that share each matrix."""
        self.parameters, self.cuts, self.group, self.parallel = parameters, cuts, group, parallel
        ordered = list(parameters.values())[::-1]  # about the order in which they are finished
        self.flat = ordered[0].new_zeros(sum(parameter.numel() for parameter in ordered))
        self.pieces: list[Tensor] = []
        self.waiting: list[int] = []  # gradients still to come, a piece
        self.sizes: list[int] = []
        self.next_piece = 0
        self.summing = False
        self.work: list[Any] = []
        self._lay_out(ordered)

    def _lay_out(self, ordered: Sequence[nn.Parameter]) -> None:
        start = end = count = 0
        for i, parameter in enumerate(ordered):
            parameter.grad = self.flat[end : end + parameter.numel()].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._hook(len(self.pieces)))
            end, count = end + parameter.numel(), count + 1
            if (end - start) * self.flat.element_size() >= BUCKET_BYTES or i == len(ordered) - 1:
                self.pieces.append(self.flat[start:end])
                self.sizes.append(count)
                start, count = end, 0

    def _hook(self, piece: int) -> Any:
        def arrived(_: Tensor) -> None:
            if self.summing:
                self.waiting[piece] -= 1
                self._send_ready()

        return arrived

    def _send_ready(self) -> None:
        """Send finished pieces in their order, which is then the same on every rank."""
        while self.next_piece < len(self.pieces) and self.waiting[self.next_piece] == 0:
            piece = self.pieces[self.next_piece]
            self.work.append(dist.all_reduce(piece, group=self.group.handle, async_op=True))
            self.next_piece += 1

    def clear(self) -> None:
        self.flat.zero_()

    def sum_on_next_backward(self) -> None:
        """The next backward pass is the step's last: send each piece as it becomes complete."""
        self.summing = self.group.world > 1
        self.waiting, self.next_piece = list(self.sizes), 0

    def wait(self) -> None:
        """Until every piece is summed."""
        for work in self.work:
            work.wait()
        self.work.clear()
        self.summing = False
        if self.parallel.divides_sequence:
            self._add_parts()

    def _add_parts(self) -> None:
        """Sum what each tensor parallel rank has of its part of the sequence alone."""
        parts = [self._gradient(name) for name, cut in self.cuts.items() if cut.partial]
        whole = self.parallel.sum(torch.cat([part.flatten() for part in parts]))
        for part, summed in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))

    def clip(self, limit: float) -> float:
        """The global norm; gradients above `limit` (if not 0) are scaled down to it."""
        norm = float(self._norm().item())
        if 0 < limit < norm < float("inf"):
            self.flat.mul_(limit / (norm + 1e-6))
        return norm

    def _norm(self) -> Tensor:
        """Over all parts of the model."""
        if self.parallel.size == 1:
            norm: Tensor = torch.linalg.vector_norm(self.flat)
            return norm
        return norm_of({name: self._gradient(name) for name in self.cuts}, self.cuts, self.parallel)

    def _gradient(self, name: str) -> Tensor:
        gradient = self.parameters[name].grad
        assert gradient is not None  # a view of the buffer from the beginning
        return gradient


def norm_of(gradients: Mapping[str, Tensor], cuts: Mapping[str, Cut], parallel: Parallel) -> Tensor:
    """Over all parts of the model; what every tensor parallel rank has whole is counted on one of them."""
    counted = [
        gradient for name, gradient in gradients.items() if parallel.rank == 0 or cuts[name].dim is not None
    ]
    squares = torch.stack([torch.linalg.vector_norm(gradient).square() for gradient in counted])
    return parallel.sum(squares.sum()).sqrt()
