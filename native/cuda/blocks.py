"""Choose block sizes for each device.

The rows for GPUs are based on the compiler's reports. At widths up to 4,096 no kernel spills registers; at 16,384 none
spills more than 64 bytes. `tests/native/test_cuda.py` compiles the kernels for each capability. No row was measured on
hardware.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from native.cuda.language import interpreted


@dataclass(frozen=True)
class Blocks:
    """Block sizes for one kind of device; all except `pieces` are powers of two."""

    flat: int
    """How many numbers one program of an elementwise kernel handles."""
    tile: int
    """How many numbers of rows one program of a norm has at a time; at least one row."""
    columns: int
    """How many logits a program of the cross-entropy has at a time."""
    pieces: int
    """How many programs have partial sums, which are added in a fixed order: about two per multiprocessor."""
    widest_sums: int = 8192
    """The widest row for which a program has the sums of the weight's gradient in registers together with the row."""

    def rows(self, width: int) -> int:
        """Return how many rows of `width` (a power of two) a program handles."""
        return max(1, self.tile // width)

    def warps(self, numbers: int) -> int:
        """Return the number of warps of a program with this many numbers: 16 numbers per thread, from 4 to 32 warps."""
        return min(32, max(4, numbers // 512))


# The keys are compute capabilities, or names of devices that need other sizes than their capability.
TABLE = {
    "8.0": Blocks(flat=1024, tile=2048, columns=4096, pieces=216),
    "8.6": Blocks(flat=1024, tile=2048, columns=4096, pieces=168),
    "8.9": Blocks(flat=1024, tile=2048, columns=4096, pieces=256),
    "9.0": Blocks(flat=1024, tile=4096, columns=8192, pieces=264),
    "10.0": Blocks(flat=1024, tile=4096, columns=8192, pieces=296),
    "12.0": Blocks(flat=1024, tile=2048, columns=4096, pieces=340),
    # These are so small that the cases need several blocks in every direction.
    "interpreter": Blocks(flat=4096, tile=4096, columns=1024, pieces=5, widest_sums=128),
}


def blocks_for(x: Tensor) -> Blocks:
    """Return the sizes for the device of `x`."""
    return TABLE[key_of(x)]


def key_of(x: Tensor) -> str:
    """Return the key of the table's row for the device of `x`."""
    if interpreted():
        return "interpreter"
    return _key_of_device(x.device.index if x.device.index is not None else torch.cuda.current_device())


@functools.cache
def _key_of_device(index: int) -> str:
    name = torch.cuda.get_device_name(index)
    return name if name in TABLE else nearest(torch.cuda.get_device_capability(index))


def nearest(capability: tuple[int, int]) -> str:
    """Return the newest capability in the table that is not newer than `capability`."""
    known = sorted(
        (int(major), int(minor)) for major, minor in (key.split(".") for key in TABLE if key[0].isdigit())
    )
    older = [own for own in known if own <= capability] or known[:1]
    return ".".join(map(str, older[-1]))
