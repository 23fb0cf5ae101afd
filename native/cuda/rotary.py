"""Rotary positions of queries and keys on CUDA, in one launch in each direction, computed in fp32."""

from __future__ import annotations

from torch import Tensor

from native.cuda import language
from native.cuda.blocks import blocks_for
from native.cuda.language import jit, on_device, register, tl
from native.fallback import report_fallback
from native.gradients import rotary_op, rotated_shapes
from native.reference import rotary as plain

METHOD = "queries and keys in one launch"


def rotary(
    q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys; angles have no gradient."""
    if q.dtype != k.dtype:
        report_fallback("rotary", "cuda", f"has no kernel for {q.dtype} and {k.dtype}")
        return plain(q, k, cosines, sines, interleaved)
    if not language.computes("rotary", q):
        return plain(q, k, cosines, sines, interleaved)
    turned: tuple[Tensor, Tensor] = _OP(q, k, cosines.float(), sines.float(), interleaved, False)
    return turned


@jit
def _turn_heads(
    x_at: tl.tensor, out_at: tl.tensor, cosine: tl.tensor, sine: tl.tensor, heads: tl.tensor, head_step: tl.tensor,
    dim: tl.tensor, half: tl.tensor, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate all heads of one position; the heads of the result are contiguous."""
    pair = tl.arange(0, PAIRS)[None, :]
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        inside = (head < heads) & (pair < half)
        at, to = x_at + head * head_step, out_at + head * dim
        left = tl.load(at + first, inside, 0.0).to(tl.float32)
        right = tl.load(at + second, inside, 0.0).to(tl.float32)
        tl.store(to + first, (left * cosine - right * sine).to(out_at.dtype.element_ty), inside)
        tl.store(to + second, (right * cosine + left * sine).to(out_at.dtype.element_ty), inside)
        if REST > 0:
            column = 2 * half + tl.arange(0, REST)[None, :]
            known = (head < heads) & (column < dim)
            tl.store(to + column, tl.load(at + column, known, 0.0), known)


@jit
def _rotary(
    q_at: tl.tensor, k_at: tl.tensor, q_out_at: tl.tensor, k_out_at: tl.tensor, cosines_at: tl.tensor,
    sines_at: tl.tensor, q_batch: tl.tensor, q_head: tl.tensor, q_row: tl.tensor, k_batch: tl.tensor,
    k_head: tl.tensor, k_row: tl.tensor, angles_batch: tl.tensor, rows: tl.tensor, heads: tl.tensor,
    groups: tl.tensor, dim: tl.tensor, half: tl.tensor, sign: tl.tensor, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sample, row = program // rows, program % rows
    pair = tl.arange(0, PAIRS)[None, :]
    angle = sample * angles_batch + row * half + pair
    cosine = tl.load(cosines_at + angle, pair < half, 0.0)
    sine = tl.load(sines_at + angle, pair < half, 0.0) * sign
    q_at += sample * q_batch + row * q_row
    k_at += sample * k_batch + row * k_row
    _turn_heads(
        q_at,
        q_out_at + program * heads * dim,
        cosine,
        sine,
        heads,
        q_head,
        dim,
        half,
        INTERLEAVED,
        HEADS,
        PAIRS,
        REST,
    )
    _turn_heads(
        k_at,
        k_out_at + program * groups * dim,
        cosine,
        sine,
        groups,
        k_head,
        dim,
        half,
        INTERLEAVED,
        HEADS,
        PAIRS,
        REST,
    )


def _compute(
    q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cosines, sines = cosines.contiguous(), sines.contiguous()
    out = rotated_shapes(q, k)
    batch, heads, rows, dim = q.shape
    half, groups = cosines.shape[-1], k.shape[1]
    if not q.numel():
        return out
    pairs = language.width_of(half)
    steps = (*q.stride()[:3], *k.stride()[:3], rows * half if len(cosines) > 1 else 0)
    sizes = (rows, heads, groups, dim, half, -1.0 if back else 1.0)
    with on_device(q):
        _rotary[(batch * rows,)](
            q,
            k,
            *out,
            cosines,
            sines,
            *steps,
            *sizes,
            INTERLEAVED=interleaved,
            HEADS=min(blocks_for(q).rows(2 * pairs), language.width_of(max(heads, groups))),
            PAIRS=pairs,
            REST=language.width_of(dim - 2 * half) if dim > 2 * half else 0,
        )
    return out


_OP = rotary_op(register, _compute)
