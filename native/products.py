"""Products of matrices by torch, except those that torch computes slowly on a CPU.

Where the kernel of `native.cpu.product` is faster, it computes the product; `native.cpu.linear` offers it. On a CPU
without bf16 instructions torch multiplies bf16 in a plain loop, at a tenth to a hundredth of the rate of fp32 products:
there, blocks of both matrices are converted to fp32 and multiplied in fp32, and the sums are rounded to bf16 once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The rows and columns of a block. Multiplying blocks takes far longer than converting them; a block has 16 MB.
SIDE = 2048
# The first two numbers of torch's version.
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


try:
    _MULTIPLIES_BF16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
except (AttributeError, RuntimeError):
    # A torch without oneDNN cannot be asked.
    _MULTIPLIES_BF16 = True


def multiplies_bf16() -> bool:
    """Return whether torch has fast bf16 products for this CPU."""
    return _MULTIPLIES_BF16


def widens(x: Tensor) -> bool:
    """Return whether products of `x` are computed in blocks of fp32."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not multiplies_bf16()


@dataclass(frozen=True)
class Kernel:
    """Products on a CPU by a kernel of ours."""

    serves: Callable[[Tensor, Tensor, Tensor | None], bool]
    """Takes two matrices and a result; returns whether the kernel should compute it."""
    write: Callable[..., None]
    """Takes a result, two matrices, and optionally a bias, whether to add to the result, and a factor."""
    least_sizes: Callable[[torch.dtype], tuple[int, int] | None]
    """Returns the least rows or columns and the least multiplications for which `linear` is worth a call; or None."""
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """`linear_op`, which has a gradient."""


_offered: list[Kernel] = []
_wanted = [True]


def offer(kernel: Kernel) -> None:
    """Use the kernel in this process, unless `use_kernel` has switched it off."""
    _offered[:] = [kernel]


def use_kernel(wanted: bool) -> None:
    """Set whether this process uses the kernel; it does so by default."""
    _wanted[0] = wanted


def _kernel_for(a: Tensor, b: Tensor, out: Tensor | None) -> Kernel | None:
    """Return the kernel if it should compute this product."""
    kernel = _offered[0] if _offered and _wanted[0] else None
    return kernel if kernel and kernel.serves(a, b, out) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias, with gradients."""
    if x.device.type != "cpu" or not _offered or not _is_ours(x, weight):
        return F.linear(_dense(x), _dense(weight), bias)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if weight.dtype != x.dtype:
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        result = _offered[0].linear(x, weight, bias)
    return result


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` computes this product without torch's `F.linear`."""
    found = _least_sizes(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype)
    rows = x.numel() // max(1, x.shape[-1])
    return found is not None and min(rows, len(weight)) >= found[0] and rows * weight.numel() >= found[1]


def _least_sizes(dtype: torch.dtype) -> tuple[int, int] | None:
    """Return the least rows or columns and the least multiplications of a product that is not `F.linear`'s.

    None: all products are.
    """
    if dtype == torch.bfloat16 and not multiplies_bf16():
        return 0, 0
    return _offered[0].least_sizes(dtype) if _wanted[0] else None


# torch.compile calls this instead of compiling it; `torch.compiler.assume_constant_result` sets this too, but also
# imports the compiler.
_least_sizes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product of two matrices, in `out` if it is given; without gradient."""
    if kernel := _kernel_for(a, b, out):
        out = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
        kernel.write(out, a, b)
        return out
    if not widens(a):
        return torch.mm(_dense(a), _dense(b), out=out)
    out = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
    return _fill(out, a, b, None)


def addmm_(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Add `alpha` times the product of two matrices to `out`; return it. Without gradient."""
    if kernel := _kernel_for(a, b, out):
        kernel.write(out, a, b, None, True, alpha)
        return out
    return out.add_(mm(a, b), alpha=alpha) if widens(a) else out.addmm_(_dense(a), _dense(b), alpha=alpha)


def add_product_(
    total: Tensor, a: Tensor, b: Tensor, add_: Callable[[Tensor, Tensor], object], first: bool
) -> None:
    """Add the product of two bf16 or fp16 matrices to an fp32 tensor, for some rows at a time. Without gradient.

    add_: adds a tensor of the matrices' type to an fp32 tensor. first: `total` has no values yet.
    """
    if kernel := _kernel_for(a, b, total):
        kernel.write(total, a, b, None, not first)
        return
    if widens(a):
        for rows in _parts(len(a)):
            for part in _parts(len(b)):
                beta = 0 if first and part.start == 0 else 1
                total[rows].addmm_(_wide(a[rows, part]), _wide(b[part]), beta=beta)
        return
    if _adds_in_fp32(a):
        mixed: Any = torch
        if first:
            mixed.mm(a, b, out_dtype=torch.float32, out=total)
        else:
            mixed.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return
    # All parts share a buffer: new ones for each part would be spread over more memory.
    # Other devices compute a large product faster than many small ones.
    b = _dense(b)
    side = SIDE if a.device.type == "cpu" else max(1, len(a))
    product = a.new_empty(min(side, len(a)), b.shape[1])
    for rows in _parts(len(a), side):
        piece = product[: rows.stop - rows.start]
        torch.mm(_dense(a[rows]), b, out=piece)
        if first:
            total[rows] = piece
        else:
            add_(total[rows], piece)


def _adds_in_fp32(x: Tensor) -> bool:
    """Return whether torch adds a product of 16-bit matrices on this device to an fp32 tensor, without rounding it.

    CUDA does since torch 2.8; before 2.10 the tensor that it is added to had to have 16 bits too.
    """
    return x.device.type == "cuda" and torch.version.cuda is not None and TORCH >= (2, 10)


def _dense(x: Tensor) -> Tensor:
    """Return a factor of a product of torch, without gaps between its lines if torch might read what is in them.

    With AMX instructions, torch multiplies 16-bit numbers in steps of 32. The last step of a row reads what follows the
    row and multiplies it by 0, and NaN stays NaN.
    """
    if x.device.type != "cpu" or x.dtype == torch.float32:
        return x
    if x.dim() == 2 and x.stride(0) == 1:
        return x if x.shape[0] % 32 == 0 else x.t().contiguous().t()
    return x if x.shape[-1] % 32 == 0 else x.contiguous()


def _fill(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    inner = list(_parts(a.shape[1])) or [slice(0, 0)]
    for rows in _parts(a.shape[0]):
        for columns in _parts(b.shape[1]):
            products = ((_wide(a[rows, part]), _wide(b[part, columns])) for part in inner)
            first = next(products)
            total = torch.mm(*first) if bias is None else torch.addmm(bias[columns].float(), *first)
            for pair in products:
                total.addmm_(*pair)
            out[rows, columns] = total
    return out


def _parts(size: int, side: int = SIDE) -> Iterator[slice]:
    """Return a dimension's blocks, which have similar sizes."""
    count = -(-size // side)
    for number in range(count):
        yield slice(size * number // count, size * (number + 1) // count)


def _wide(x: Tensor) -> Tensor:
    """Return a block in fp32; the dimension that is contiguous stays contiguous."""
    return x.t().float().t() if x.stride(0) == 1 else x.float()


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.flatten(0, -2)
    if kernel := _kernel_for(rows, weight.t(), None):
        out = x.new_empty(len(rows), len(weight))
        kernel.write(out, rows, weight.t(), bias)
    elif widens(x):
        out = _fill(x.new_empty(len(rows), len(weight)), rows, weight.t(), bias)
    else:
        out = F.linear(_dense(rows), _dense(weight), bias)
    return out.view(*x.shape[:-1], len(weight))


def _backward(
    upstream: Tensor, x: Tensor | None, weight: Tensor | None, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the weight and of the bias; a gradient is empty if it is not needed."""
    rows = upstream.flatten(0, -2)
    return (
        _none(rows) if weight is None else mm(rows, weight).view(*upstream.shape[:-1], weight.shape[1]),
        _none(rows) if x is None else mm(rows.t(), x.flatten(0, -2)),
        rows.sum(0) if of_bias else _none(rows),
    )


def _none(like: Tensor) -> Tensor:
    """Return an empty tensor: an op's results are always tensors, and never the same one."""
    return like.new_empty(0)


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gradient_shapes(
    upstream: Tensor, x: Tensor | None, weight: Tensor | None, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    width = upstream.shape[-1]
    return (
        _none(upstream) if weight is None else upstream.new_empty(*upstream.shape[:-1], weight.shape[1]),
        _none(upstream) if x is None else upstream.new_empty(width, x.shape[-1]),
        upstream.new_empty(width) if of_bias else _none(upstream),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _bias = inputs
    # The gradient of each factor needs the other one.
    of_x, of_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None)


def linear_op(register: Callable[..., Any]) -> Callable[..., Any]:
    """Register the product of rows with a matrix and its bias; the gradients of all three are computed together."""

    def gradient(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        found = back(upstream, *ctx.saved_tensors, wanted[2])
        return tuple(each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True))

    back = register(
        "linear_backward(Tensor upstream, Tensor? x, Tensor? weight, bool of_bias) -> (Tensor, Tensor, Tensor)",
        _backward,
        _gradient_shapes,
    )
    schema = "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
    op: Callable[..., Any] = register(schema, _forward, _shape, _keep, gradient)
    return op
