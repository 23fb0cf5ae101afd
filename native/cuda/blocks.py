"""Choose block sizes for each device.

The rows for GPUs follow from what the compiler reports: no kernel spills registers at widths up to 4,096, and none more
than 64 bytes at 16,384 (`tests/native/test_cuda.py` compiles them for each capability). None was measured on hardware.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from native.cuda.language import interpreted


@dataclass(frozen=True)
class Blocks:
    """Sizes for one kind of device; all but `pieces` are powers of two."""

    flat: int
    """Numbers of one program of an element by element kernel."""
    tile: int
    """Numbers of the rows that one program of a norm holds at a time; at least one row."""
    columns: int
    """Logits that a program of the cross-entropy holds at a time."""
    pieces: int
    """Programs whose partial sums are added in a fixed order: about two for each multiprocessor."""
    widest_sums: int = 8192
    """The widest row for which a program holds the sums of the weight's gradient next to the row."""

    def rows(self, width: int) -> int:
        """Return how many rows of `width` (a power of two) a program holds."""
        return max(1, self.tile // width)

    def warps(self, numbers: int) -> int:
        """Return the warps of a program that holds so many numbers: 16 for each thread, from 4 to 32 warps."""
        return min(32, max(4, numbers // 512))


# The keys are compute capabilities, or names of devices that need other sizes than their capability has.
TABLE = {
    "8.0": Blocks(flat=1024, tile=2048, columns=4096, pieces=216),
    "8.6": Blocks(flat=1024, tile=2048, columns=4096, pieces=168),
    "8.9": Blocks(flat=1024, tile=2048, columns=4096, pieces=256),
    "9.0": Blocks(flat=1024, tile=4096, columns=8192, pieces=264),
    "10.0": Blocks(flat=1024, tile=4096, columns=8192, pieces=296),
    "12.0": Blocks(flat=1024, tile=2048, columns=4096, pieces=340),
    # Small enough that the cases need several blocks in every direction.
    "interpreter": Blocks(flat=4096, tile=4096, columns=1024, pieces=5, widest_sums=128),
}


def blocks_for(x: Tensor) -> Blocks:
    """Return the sizes for the device of `x`."""
    return TABLE[key_of(x)]


def key_of(x: Tensor) -> str:
    """Return the row of the table that the device of `x` takes."""
    if interpreted():
        return "interpreter"
    return _key_of_device(x.device.index if x.device.index is not None else torch.cuda.current_device())


@functools.cache
def _key_of_device(index: int) -> str:
    name = torch.cuda.get_device_name(index)
    return name if name in TABLE else nearest(torch.cuda.get_device_capability(index))


def nearest(capability: tuple[int, int]) -> str:
    """Return the newest capability in the table that is not newer than this one."""
    known = sorted(
        (int(major), int(minor)) for major, minor in (key.split(".") for key in TABLE if key[0].isdigit())
    )
    older = [own for own in known if own <= capability] or known[:1]
    return ".".join(map(str, older[-1]))
