"""A whole step of a model as one call of the compiled library: a list of instructions that all threads work on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from native.compiled.arguments import FLOAT, POINTER, SIZE, function, structure
from native.compiled.library import load, why_not
from native.compiled.op import address
from native.decode.packed import Packed
from native.decode.paged import TILE, Spans

__all__ = [
    "Activation",
    "Buffer",
    "Inputs",
    "Instruction",
    "Op",
    "Program",
    "largest",
    "likelihoods",
    "why_not",
]


class Op(IntEnum):
    """The operation of an instruction."""

    EMBED = 0
    NORM = 1
    PRODUCT = 2
    PLACE = 3
    """Rotate queries and keys, and store keys and values in the cache."""
    ATTEND = 4
    GATE = 5
    ADD = 6
    QUANTIZE = 7


class Activation(IntEnum):
    """The activation after a product."""

    NONE = 0
    GELU_TANH = 1
    GELU = 2


@dataclass(eq=False)
class Buffer:
    """Rows of numbers, one row per token of a step."""

    width: int
    dtype: torch.dtype = torch.float32
    """int8 means rows of bytes; see `quantized_bytes`."""
    data: Tensor = field(default_factory=lambda: torch.empty(0))

    def reserve(self, rows: int) -> None:
        self.data = torch.zeros(rows, self.width, dtype=self.dtype)


@dataclass(frozen=True)
class Instruction:
    """One instruction; fields that its operation does not use are left out."""

    op: Op
    x: Buffer | None = None
    out: Buffer | None = None
    rounded: Buffer | None = None
    """Receives the results in bf16; for QUANTIZE, in 8 bits."""
    sum: Buffer | None = None
    """The results of a product are added to the rows of this buffer."""
    product: Packed | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    pages: tuple[Tensor, Tensor] | None = None
    width: int = 0
    heads: int = 1
    groups: int = 1
    rotated: int = 0
    interleaved: bool = False
    activation: Activation = Activation.NONE
    centered: bool = False
    """Whether a norm subtracts the mean."""
    eps: float = 0.0
    scale: float = 1.0
    offset: int = 0
    """Skip this many numbers at the beginning of each row of `x` and `out`."""
    of_wanted: bool = False
    """Whether only the wanted tokens have rows."""


@dataclass(frozen=True)
class Inputs:
    """The new tokens of a step; positions and angles may be missing if no instruction reads them."""

    tokens: int
    spans: Spans
    wanted: Tensor
    ids: Tensor | None = None
    positions: Tensor | None = None
    inner_positions: Tensor | None = None
    turns: tuple[Tensor, Tensor] | None = None
    """Cosines and sines, each (tokens, rotated / 2)."""


class _Instruction(ctypes.Structure):
    """The layout of `struct Instruction` in program.cpp."""

    _fields_ = structure(
        (SIZE, "op of_wanted"),
        (POINTER, "x out rounded sum"),
        (SIZE, "x_stride out_stride rounded_stride sum_stride"),
        (POINTER, "product weight bias keys values"),
        (SIZE, "width heads groups rotated interleaved activation"),
        (FLOAT, "eps scale"),
    )


class _Step(ctypes.Structure):
    """The layout of `struct Step` in program.cpp."""

    _fields_ = structure(
        (SIZE, "tokens wanted sequences table_stride room"),
        (
            POINTER,
            "ids positions inner_positions wanted_rows slots cosines sines tables begins first last scratch",
        ),
        (SIZE, "threads level"),
    )


SMALL = 1 << 19
"""With fewer multiply-adds in a step, further threads cost more time than they save: about 50 microseconds."""


class Program:
    """Instructions with their buffers, which grow with the largest step."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        self.code = tuple(code)
        self._buffers = list(dict.fromkeys(_buffers_of(self.code)))
        self._native = (_Instruction * len(self.code))()
        self._pieces = (ctypes.c_uint32 * len(self.code))()
        self._rows = 0
        self._scratch = torch.empty(0)
        packed = [
            entry.product for entry in self.code if entry.product is not None and entry.op == Op.PRODUCT
        ]
        self._multiplications = sum(product.outputs * product.inputs for product in packed)

    def run(self, inputs: Inputs, begin: int = 0, end: int | None = None) -> None:
        """Run the instructions [begin, end); the results are in the buffers."""
        self.reserve(inputs.tokens)
        end = len(self.code) if end is None else end
        spans = inputs.spans
        threads = torch.get_num_threads()
        if inputs.tokens * self._multiplications < SMALL:
            threads = 1
        room = -(-spans.longest // 16) * 16
        if self._scratch.numel() < threads * TILE * room:
            self._scratch = torch.empty(2 * threads * TILE * room)
        turns = inputs.turns or (None, None)
        step = _Step(
            inputs.tokens,
            len(inputs.wanted),
            len(spans.tables),
            spans.tables.stride(0),
            room,
            *map(address, (inputs.ids, inputs.positions, inputs.inner_positions, inputs.wanted, spans.slots)),
            *map(address, (*turns, spans.tables, spans.begins, spans.first, spans.last, self._scratch)),
            threads,
            load().level,
        )
        first = ctypes.addressof(self._native) + begin * ctypes.sizeof(_Instruction)
        run = function("native_program_run", None, POINTER, SIZE, POINTER, POINTER)
        run(first, end - begin, ctypes.addressof(step), ctypes.addressof(self._pieces))

    def reserve(self, rows: int) -> None:
        """Make the buffers large enough for this many rows."""
        if rows <= self._rows:
            return
        self._rows = max(rows, min(2 * self._rows, 1024))
        for buffer in self._buffers:
            buffer.reserve(self._rows)
        for at, entry in enumerate(self.code):
            self._native[at] = _bound(entry)


def _buffers_of(code: Sequence[Instruction]) -> Iterator[Buffer]:
    for entry in code:
        for buffer in (entry.x, entry.out, entry.rounded, entry.sum):
            if buffer is not None:
                yield buffer


def _bound(entry: Instruction) -> _Instruction:
    buffers = (entry.x, entry.out, entry.rounded, entry.sum)
    addresses = [0 if buffer is None else buffer.data.data_ptr() for buffer in buffers]
    for place, buffer in enumerate(buffers[:2]):
        if buffer is not None:
            addresses[place] += entry.offset * buffer.data.element_size()
    keys, values = entry.pages or (None, None)
    return _Instruction(
        entry.op,
        entry.of_wanted,
        *addresses,
        *(0 if buffer is None else buffer.width for buffer in buffers),
        0 if entry.product is None else ctypes.addressof(entry.product.structure),
        *map(address, (entry.weight, entry.bias, keys, values)),
        entry.width,
        entry.heads,
        entry.groups,
        entry.rotated,
        entry.interleaved,
        entry.centered if entry.op == Op.NORM else entry.activation,
        entry.eps,
        entry.scale,
    )


def largest(row: Tensor) -> int:
    """Return the index of the largest number in an fp32 row; of several, the first index."""
    if why_not() or row.dtype != torch.float32 or not row.is_contiguous():
        return int(row.argmax())
    return int(function("native_program_largest", SIZE, POINTER, SIZE)(row.data_ptr(), row.numel()))


def likelihoods(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log probability of each row's target, and whether it is the most likely token; of equals, the first.

    The library must be present; rows of `logits` are in fp32.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and targets.dtype == torch.int64
    rows, width = logits.shape
    found, best, targets = torch.empty(rows), torch.empty(rows, dtype=torch.bool), targets.contiguous()
    assert not rows or (int(targets.min()) >= 0 and int(targets.max()) < width)
    types = (POINTER, SIZE, SIZE, SIZE, POINTER, POINTER, POINTER, SIZE, SIZE)
    sizes, pointers = (logits.stride(0), rows, width), map(address, (targets, found, best))
    run = function("native_program_likelihoods", None, *types)
    run(logits.data_ptr(), *sizes, *pointers, torch.get_num_threads(), load().level)
    return found, best
