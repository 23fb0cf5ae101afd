"""The table of a checkpoint's tensors, and a short form for the boxes of them in a file.

All blocks of a model are divided in the same way. So tensors of one kind are neighbours in the table, and the entry of
a file has one line per kind instead of one per tensor: 1 MB for 1,536 files, not 200 MB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainer.checkpoint.part import MOMENTS, Box, whole_box

Shape = tuple[int, ...]
# [box as start, stop, start, stop, ...; ranges of places in the table as first, last + 1, ...]
Held = list[list[list[int]]]
_LAYER = re.compile(r"\.(\d+)\.")


def tensor_table(shapes: Mapping[str, Shape], with_moments: bool) -> dict[str, Shape]:
    """Return the shape of each logical tensor of a model, in the order of the table."""
    found = dict(shapes)
    for moment in MOMENTS if with_moments else ():
        found |= {f"{moment}.{name}": shape for name, shape in shapes.items()}
    return {key: found[key] for key in sorted(found, key=_place)}


def _place(key: str) -> tuple[str, int, int]:
    moment = next((index for index, moment in enumerate(MOMENTS) if key.startswith(f"{moment}.")), -1)
    name = key.split(".", 1)[1] if moment >= 0 else key
    layer = _LAYER.search(name)
    return _LAYER.sub(".*.", name, count=1), moment, int(layer[1]) if layer else -1


def held_boxes(boxes: Iterable[tuple[str, Box]], table: Sequence[str]) -> Held:
    """Return the short form of these boxes of the table's tensors."""
    index = {key: at for at, key in enumerate(table)}
    places: dict[Box, list[int]] = {}
    for key, box in boxes:
        places.setdefault(box, []).append(index[key])
    return [[[end for pair in box for end in pair], _ranges(sorted(found))] for box, found in places.items()]


def _ranges(places: Sequence[int]) -> list[int]:
    found: list[int] = []
    for index in places:
        if found and found[-1] == index:
            found[-1] += 1
        else:
            found += [index, index + 1]
    return found


def boxes_held(held: Held, table: Sequence[str]) -> Iterator[tuple[str, Box]]:
    """Yield each box of the short form with its tensor."""
    for flat, ranges in held:
        box = tuple(zip(flat[::2], flat[1::2], strict=True))
        for first, last in zip(ranges[::2], ranges[1::2], strict=True):
            yield from ((key, box) for key in table[first:last])


def meet(box: Box, flat: Sequence[int]) -> bool:
    """Return whether a box and a box of the short form overlap."""
    if 2 * len(box) != len(flat):
        return False
    return all(a < flat[2 * dim + 1] and flat[2 * dim] < b for dim, (a, b) in enumerate(box))


class HeldCheck:
    """Checks short forms from a manifest; files of one training name the same ranges, which are looked up once."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = shapes
        self._shapes_of: dict[tuple[int, ...], set[Shape]] = {}

    def is_sound(self, held: Any) -> bool:
        """Return whether a short form names boxes inside of the table's tensors."""
        return isinstance(held, list) and all(self._is_sound_group(group) for group in held)

    def _is_sound_group(self, group: Any) -> bool:
        lists = isinstance(group, list) and len(group) == 2 and all(isinstance(part, list) for part in group)
        if not lists or not all(type(number) is int for part in group for number in part):
            return False
        flat, ranges = group
        if len(flat) % 2 or len(ranges) % 2:
            return False
        key = tuple(ranges)
        if key not in self._shapes_of:
            pairs = list(zip(ranges[::2], ranges[1::2], strict=True))
            if not all(0 <= first < last <= len(self._shapes) for first, last in pairs):
                return False
            self._shapes_of[key] = {shape for first, last in pairs for shape in self._shapes[first:last]}
        return all(_is_inside(flat, shape) for shape in self._shapes_of[key])


def _is_inside(flat: Sequence[int], shape: Shape) -> bool:
    if len(flat) != 2 * len(shape):
        return False
    return all(0 <= flat[2 * dim] < flat[2 * dim + 1] <= size for dim, size in enumerate(shape))


def name_in_file(key: str, box: Box, shape: Shape) -> str:
    """Return the name of a box in its file: the tensor's own name if it is whole, else with its ranges."""
    if box == whole_box(shape):
        return key
    return f"{key}@" + ",".join(f"{start}:{stop}" for start, stop in box)
