"""Cross-entropy on a CPU: loss and gradient in one pass, with the gradient written over the logits.

Eager torch stores the logits, their fp32 copy, the log-probabilities and the gradient; this code stores one of them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from native.compiled.arguments import INT, POINTER, SIZE, structure
from native.compiled.library import load
from native.compiled.op import SUFFIX, address, kernel, register
from native.gradients import cross_entropy_op


class _Arguments(ctypes.Structure):
    """The layout of `struct Arguments` in cross_entropy.cpp."""

    _fields_ = structure(
        (POINTER, "targets losses scratch"),
        (SIZE, "tokens vocabulary columns counted ignore_index"),
        (INT, "gradient threads level"),
    )


METHOD = "gradient in place of the logits"


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the mean cross-entropy of fp32 or bf16 logits.

    Logits that need a gradient are overwritten with it, unless they are a leaf or torch.compile traces the call.
    """
    _check(logits, targets)
    targets = targets.to(torch.int64).contiguous()
    if torch.compiler.is_compiling():
        result: Tensor = _APART(logits, targets, ignore_index)[0]
        return result
    if not (logits.requires_grad and torch.is_grad_enabled()):
        return _call(logits.detach().contiguous(), targets, ignore_index, False)
    # A leaf is a parameter of the caller: torch refuses to change one in place, so this code copies it.
    own = logits.clone() if logits.is_leaf else logits
    loss: Tensor = _InPlace.apply(own, targets, ignore_index)  # type: ignore[no-untyped-call]
    return loss


class _InPlace(torch.autograd.Function):
    """Cross-entropy whose forward pass already computes the gradient; backward returns it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        gradient = logits.contiguous()
        loss = _call(gradient, targets, ignore_index, True)
        # Autograd then raises an error if another op saved the logits, which are overwritten here.
        torch.autograd.graph.increment_version(logits)
        ctx.gradient = gradient
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("the gradient of cross_entropy overwrote the logits and was already used")
        # Without gradient accumulation the factor is 1, which saves a pass over tokens x vocabulary.
        return (gradient if upstream.item() == 1.0 else gradient.mul_(upstream)), None, None


def _check(logits: Tensor, targets: Tensor) -> None:
    if logits.dtype not in SUFFIX or logits.device.type != "cpu":
        raise TypeError(
            f"cross_entropy on the cpu backend takes float32 or bfloat16 logits on a CPU, "
            f"not {logits.dtype} on {logits.device}; the reference supports all types"
        )
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"cross_entropy takes logits (tokens, vocabulary) and targets (tokens,), "
            f"not {tuple(logits.shape)} and {tuple(targets.shape)}"
        )


def _call(logits: Tensor, targets: Tensor, ignore_index: int, gradient: bool) -> Tensor:
    loss: Tensor = _OVER(logits, targets, ignore_index, gradient)
    return loss


def _on_meta(logits: Tensor, targets: Tensor, ignore_index: int, gradient: bool) -> Tensor:
    return logits.new_empty((), dtype=torch.float32)


def _on_cpu(logits: Tensor, targets: Tensor, ignore_index: int, gradient: bool) -> Tensor:
    return run(logits, targets, ignore_index, gradient, load().level)


def _apart(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the loss, and its gradient in new memory."""
    gradient = logits.clone(memory_format=torch.contiguous_format)
    return run(gradient, targets, ignore_index, True, load().level), gradient


_OVER = register(
    "cross_entropy_(Tensor(a!) logits, Tensor targets, int ignore_index, bool gradient) -> Tensor",
    _on_cpu,
    _on_meta,
)
_APART = cross_entropy_op(register, _apart)


def run(logits: Tensor, targets: Tensor, ignore_index: int, gradient: bool, level: int) -> Tensor:
    """Return the mean loss of contiguous logits, computed by the kernel for one instruction set."""
    targets = checked(targets, logits.shape[1], ignore_index)
    count = int((targets != ignore_index).sum())
    return mean_of(losses_of(logits, targets, ignore_index, gradient, level, logits.shape[1], count), count)


def checked(targets: Tensor, vocabulary: int, ignore_index: int) -> Tensor:
    """Return the targets as contiguous int64; raise IndexError if one is outside the vocabulary."""
    targets = targets.to(torch.int64).contiguous()
    outside = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
    if outside.any():
        row = int(outside.nonzero()[0])
        problem = f"target {int(targets[row])} of token {row}"
        raise IndexError(f"{problem} is outside the vocabulary [0,{vocabulary})")
    return targets


def mean_of(losses: Tensor, count: int) -> Tensor:
    """Return the sum of the losses divided by `count`, summed in fp64 so that the order does not affect the result."""
    return (losses.sum(dtype=torch.float64) / count if count else losses.new_tensor(float("nan"))).float()


def losses_of(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    gradient: bool,
    level: int,
    vocabulary: int,
    count: int,
) -> Tensor:
    """Return the loss of each token, for contiguous logits and checked targets.

    Columns from `vocabulary` on are padding and have no gradient. `count` is the number of tokens in the
    mean, including those of other calls.
    """
    tokens, columns = logits.shape
    threads = max(1, torch.get_num_threads())
    losses = torch.empty(tokens, dtype=torch.float32)
    scratch = torch.empty(threads if gradient and logits.dtype == torch.bfloat16 else 0, vocabulary)
    sizes = (tokens, vocabulary, columns, count, ignore_index)
    pointers = map(address, (targets, losses, scratch))
    arguments = _Arguments(*pointers, *sizes, gradient, threads, level)
    run_kernel = kernel("native_cross_entropy", logits.dtype, POINTER, POINTER)
    run_kernel(logits.data_ptr(), ctypes.byref(arguments))
    return losses
