"""Map a rank's part of a parameter to its place in the logical tensor, without tensor parallel cuts and padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from trainer.checkpoint.part import MOMENTS, Box, Part, flat_boxes, volume, whole_box
from trainer.engine.optimizer import AdamW
from trainer.model.cuts import Cut
from trainer.parallel.tensor import Parallel


def optimizer_parts(
    optimizer: AdamW, name: str, put: Callable[[str, Tensor, bool], Iterator[Part]], owned: bool
) -> Iterator[Part]:
    """Yield the parts of one parameter: its weight, its fp32 master if there is one, and its moments."""
    master = optimizer.masters.get(name)
    weight = optimizer.parameters[name].detach()
    yield from put(name, weight, owned and master is None)
    if master is not None:
        yield from put(name, master.detach(), owned)
    for key in (f"{moment}.{name}" for moment in MOMENTS):
        if key in optimizer.moments:
            yield from put(key, optimizer.moments[key], owned)


class Place:
    """The place of this rank's tensor, of shape `own`, in the logical tensor."""

    def __init__(self, own: Sequence[int], cut: Cut, parallel: Parallel) -> None:
        self.own, self.cut, self.parallel = tuple(own), cut, parallel
        self.shape = cut.whole_shape(self.own, parallel.size)

    def part(self, key: str, tensor: Tensor, owned: bool) -> Iterator[Part]:
        """Yield the parts of `tensor`, which is this rank's whole tensor."""
        yield from self._cut(key, whole_box(self.own), tensor, owned)

    def rows(self, first: int, key: str, tensor: Tensor, owned: bool) -> Iterator[Part]:
        """Yield the parts of `tensor`, which contains the rows of this rank's tensor from row `first` on."""
        if tensor.numel():
            box = ((first, first + len(tensor)), *whole_box(self.own[1:]))
            yield from self._cut(key, box, tensor, owned)

    def flat(self, key: str, start: int, flat: Tensor, owned: bool) -> Iterator[Part]:
        """Yield the parts of `flat`, which contains this rank's flattened tensor from number `start` on."""
        done = 0
        for box in flat_boxes(self.own, start, start + flat.numel()):
            numbers = volume(box)
            tensor = flat[done : done + numbers].view([stop - begin for begin, stop in box])
            yield from self._cut(key, box, tensor, owned)
            done += numbers

    def _cut(self, key: str, box: Box, tensor: Tensor, owned: bool) -> Iterator[Part]:
        dim = self._dim
        if dim is None:
            yield Part(key, self.shape, box, tensor, owned)
            return
        start, stop = box[dim]
        for first, last, whole in self._segments(dim):
            begin, end = max(first, start), min(last, stop, first + self.shape[dim] - whole)
            if begin < end:
                shifted = (begin - first + whole, end - first + whole)
                place = (*box[:dim], shifted, *box[dim + 1 :])
                yield Part(key, self.shape, place, tensor.narrow(dim, begin - start, end - begin), owned)

    @property
    def _dim(self) -> int | None:
        """Return the dimension along which this rank's tensor differs from the logical one."""
        if self.parallel.size > 1 and self.cut.dim is not None:
            return self.cut.dim
        return 0 if self.cut.rows is not None else None

    def _segments(self, dim: int) -> Iterator[tuple[int, int, int]]:
        """Yield contiguous ranges of this rank's tensor along `dim`, and where each begins in the logical tensor."""
        size, rank = self.parallel.size, self.parallel.rank
        own = whole = 0
        for section in self.cut.sections or (self.own[dim] * size,):
            share = section // size
            yield own, own + share, whole + rank * share
            own, whole = own + share, whole + section
