"""Cross-entropy of logits with columns divided among ranks, on a CPU; one pass over the logits before the exchange."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native import reference
from native.compiled.arguments import FLOAT, INT, POINTER, SIZE, structure
from native.compiled.library import load
from native.compiled.op import SUFFIX, address, kernel, register
from native.divided import divided_loss
from native.fallback import report_fallback
from native.gradients import column_kernels, three_of_each_token
from native.vocabulary import VocabularyPart


class _Columns(ctypes.Structure):
    """The layout of `struct Columns` in cross_entropy.cpp."""

    _fields_ = structure(
        (POINTER, "logits targets numbers factors"),
        (SIZE, "tokens vocabulary columns row"),
        (FLOAT, "of_target of_all"),
        (INT, "threads level bf16"),
    )


METHOD = "one pass before the exchange, gradient in place"


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, part: VocabularyPart, smoothing: float = 0.0, ignore_index: int = -100
) -> Tensor:
    """Return the mean loss; the reference computes other types than fp32 and bf16."""
    if logits.dtype not in SUFFIX:
        report_fallback("vocabulary_cross_entropy", "cpu", f"has no kernel for {logits.dtype}")
        return reference.vocabulary_cross_entropy(logits, targets, part, smoothing, ignore_index)
    return divided_loss(logits, targets, part, smoothing, ignore_index, _KERNELS)


def _sums(logits: Tensor, columns: Tensor, own: int, of_target: float, of_all: float) -> Tensor:
    numbers = three_of_each_token(logits)
    _run(
        logits if logits.stride(-1) == 1 else logits.contiguous(),
        columns,
        numbers,
        None,
        own,
        of_target,
        of_all,
    )
    return numbers


def _slopes(
    logits: Tensor, columns: Tensor, factors: Tensor, own: int, of_target: float, of_all: float
) -> None:
    _run(logits, columns, None, factors.contiguous(), own, of_target, of_all)


def _run(
    logits: Tensor,
    columns: Tensor,
    numbers: Tensor | None,
    factors: Tensor | None,
    own: int,
    of_target: float,
    of_all: float,
) -> None:
    threads, is_bf16 = torch.get_num_threads(), logits.dtype == torch.bfloat16
    arguments = _Columns(
        *map(address, (logits, columns.contiguous(), numbers, factors)),
        logits.shape[0],
        own,
        logits.shape[1],
        logits.stride(0),
        of_target,
        of_all,
        threads,
        load().level,
        is_bf16,
    )
    kernel("native_columns", logits.dtype, POINTER)(ctypes.byref(arguments))


def _scale(gradient: Tensor, upstream: Tensor) -> None:
    # Without gradient accumulation the factor is 1, which saves a pass over the logits.
    if upstream.item() != 1.0:
        gradient.mul_(upstream)


_KERNELS = column_kernels(register, _sums, _slopes, _scale)
