"""Define every op in plain torch. `tests.support.op_cases` compares every other backend with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim.adamw import adamw as functional_adamw

from native.divided import ColumnKernels, divided_loss
from native.masks import EVERY_KEY, Dropout, Mask
from native.masters import joined_one_by_one
from native.paging import Reach
from native.philox import factors, kept_numbers
from native.update import AdamWStep
from native.vocabulary import VocabularyPart

# The devices with torch's fused AdamW.
FUSED_ON, FUSED_ADAMW = ("cpu", "cuda"), "aten::_fused_adamw_"
# How many bytes of keys paged attention copies out of pages at a time.
GATHERED = 128 << 20


def why_not() -> str:
    """Return "": this backend runs wherever torch runs."""
    return ""


def describe() -> str:
    """Return what this backend does, in one line for the report."""
    return "plain torch, on any device"


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Return the layer norm in the type of `x`, computed in fp32.

    torch's own bf16 backward pass sums the weight's gradient in bf16; over 1,024 rows an error of 4.0 in 118 was
    measured.
    """
    wide = None if bias is None else _wide(bias)
    return F.layer_norm(_wide(x), x.shape[-1:], _wide(weight), wide, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return `x` divided by the root of its mean square, times the weight, in the type of `x`; computed in fp32.

    It stores `x` and one number per row for the backward pass; torch's own function stores another copy of `x`.
    """
    result: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse * _wide(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normal, slope = _wide(x) * inverse, _wide(upstream)
        of_weight = (slope * normal).flatten(0, -2).sum(0).to(weight.dtype)
        slope = slope * _wide(weight)
        own = inverse * (slope - normal * (slope * normal).mean(-1, keepdim=True))
        return own.to(x.dtype), of_weight, None


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return x + residual, rounded to their type, and its layer norm."""
    added = x + residual
    return added, layer_norm(added, weight, bias, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Return x + residual, rounded to their type, and its RMS norm."""
    added = x + residual
    return added, rms_norm(added, weight, eps)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of `x`, exact or by tanh."""
    return F.gelu(x, approximate=approximate)


def gelu_backward(x: Tensor, upstream: Tensor, approximate: str = "none") -> Tensor:
    """Return the gradient of `x` from that of `gelu`."""
    found: Tensor = torch.ops.aten.gelu_backward(upstream, x, approximate=approximate)
    return found


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of x + bias, exact or by tanh."""
    return F.gelu(x + bias.to(x.dtype), approximate=approximate)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) times up, the halves of `x`; only `x` is stored for the backward pass."""
    result: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return swiglu_backward(x, upstream)


def swiglu_backward(x: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of `x` from that of `swiglu`."""
    gate, up = x.chunk(2, -1)
    of_gate = torch.ops.aten.silu_backward(upstream * up, gate)
    return torch.cat((of_gate, upstream * F.silu(gate)), -1)


def dropout_add(
    x: Tensor, residual: Tensor, bias: Tensor | None, state: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias) in the type of the residual stream, computed in fp32."""
    wide = _wide(x) if bias is None else _wide(x) + _wide(bias)
    kept = kept_numbers(x.shape, state.cpu(), probability).to(x.device)
    return (_wide(residual) + (wide / (1.0 - probability)).masked_fill(~kept, 0.0)).to(residual.dtype)


def rotary(
    q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys in their own types; angles have no gradient."""
    cosines, sines = cosines.detach(), sines.detach()
    return _turned(q, cosines, sines, interleaved), _turned(k, cosines, sines, interleaved)


def _turned(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    size = 2 * cosines.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    cosines, sines = cosines.to(x.dtype), sines.to(x.dtype)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        pairs = torch.stack([first * cosines - second * sines, second * cosines + first * sines], -1)
        parts = [pairs.flatten(-2)]
    else:
        first, second = rotated.chunk(2, -1)
        parts = [first * cosines - second * sines, second * cosines + first * sines]
    return torch.cat([*parts, rest] if rest.shape[-1] else parts, -1)


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the mean cross-entropy in fp32 over the targets that are not `ignore_index`."""
    return F.cross_entropy(_wide(logits), targets, ignore_index=ignore_index)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, ignore_index: int = -100
) -> Tensor:
    """Return the cross-entropy of x times the rows of `weight` before `vocabulary`; the logits are not copied."""
    return cross_entropy(F.linear(x, weight[:vocabulary]), targets, ignore_index)


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, part: VocabularyPart, smoothing: float = 0.0, ignore_index: int = -100
) -> Tensor:
    """Return the mean cross-entropy of logits that ranks divide by columns."""
    return divided_loss(logits, targets, part, smoothing, ignore_index, _COLUMNS)


def _column_sums(logits: Tensor, columns: Tensor, own: int, of_target: float, of_all: float) -> Tensor:
    wide = _wide(logits[:, :own])
    top = wide.amax(1) if own else wide.new_full(wide.shape[:1], float("-inf"))
    rows = (columns >= 0).nonzero().squeeze(1)
    wanted = wide.new_zeros(wide.shape[:1])
    wanted[rows] = wide[rows, columns[rows]] * of_target
    if of_all:
        wanted += wide.sum(1) * of_all
    return torch.stack((top, (wide - top.unsqueeze(1)).exp_().sum(1), wanted))


def _column_slopes(
    logits: Tensor, columns: Tensor, factors: Tensor, own: int, of_target: float, of_all: float
) -> None:
    top, factor, share = factors.unsqueeze(2)
    slopes = (_wide(logits[:, :own]) - top).exp_().mul_(factor).sub_(share * of_all)
    rows = (columns >= 0).nonzero().squeeze(1)
    slopes[rows, columns[rows]] -= share[rows, 0] * of_target
    logits[:, :own] = slopes.masked_fill_((share == 0) | share.isnan(), 0.0)
    logits[:, own:] = 0


def _scale(gradient: Tensor, upstream: Tensor) -> None:
    gradient.mul_(upstream)


_COLUMNS = ColumnKernels(_column_sums, _column_slopes, _scale)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the row of `weight` for each id."""
    return F.embedding(ids, weight)


def tied_embedding(ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `embedding`, and `weight` for its other use."""
    return embedding(ids, weight), weight


def route(logits: Tensor, top_k: int, renormalize: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return the softmax of the logits, and the weights and indices of the largest."""
    wide = _wide(logits)
    chances = torch.softmax(wide, -1)
    # If logits are equal, topk may return any of them.
    order = torch.argsort(wide.detach(), dim=-1, descending=True, stable=True)
    chosen = order[:, :top_k]
    weights = chances.gather(-1, chosen)
    return chances, weights / weights.sum(-1, keepdim=True) if renormalize else weights, chosen


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias."""
    return F.linear(x, weight, bias)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of each group times the transpose of its matrix."""
    groups = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in groups])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    mask: Mask = EVERY_KEY,
    dropout: Dropout | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention as two matrix products; heads of `k` and `v` that groups share are repeated.

    `cap`: a soft limit of the scores; 0: none. `sinks`: of each head, a score without a value.
    """
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    scores = capped((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1), cap)  # (batch, heads, queries, keys)
    if causal:
        scores = scores.masked_fill(hidden(mask, q.shape[-2], k.shape[-2], q.device), float("-inf"))
    probabilities = shares(scores, sinks)
    if dropout is not None:
        probabilities = probabilities * factors(dropout, probabilities)
    return probabilities @ v


def capped(x: Tensor, cap: float) -> Tensor:
    """Return cap x tanh(x / cap), which is near `x` where that is small; `cap` 0: `x`."""
    return torch.tanh(x / cap) * cap if cap else x


def shares(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores (..., heads, queries, keys), of which each head's sink has a share too."""
    if sinks is None:
        return torch.softmax(scores, -1)
    more = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, more], -1), -1)[..., :-1]


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return keys or values (batch, groups, keys, dim), repeated for each of `heads` heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def hidden(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return True where causal attention hides a key from a query, (queries, keys) or (batch, 1, queries, keys)."""
    wanted = (queries, keys, device)
    if wanted not in mask.made:
        at = torch.arange(keys, device=device)
        behind = at[keys - queries :].unsqueeze(-1) - at if queries <= keys else None
        found = future(queries, keys, device)
        if mask.source is not None:
            found = found & (at >= mask.source.view(-1, 1, 1, 1))
        if mask.window and behind is not None:
            found = found | (behind >= mask.window)
        if mask.documents is not None:
            numbers = mask.documents.unsqueeze(1)
            found = found | (numbers[..., keys - queries :].unsqueeze(-1) != numbers.unsqueeze(-2))
        mask.made[wanted] = found
    return mask.made[wanted]


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, reach: Reach, cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention of one new token per text; the pages of some texts are copied at a time."""
    of_text = reach.tables.shape[1] * keys[:1].numel() * keys.element_size()
    texts = max(1, GATHERED // max(1, of_text))
    pieces = (
        _over_pages(q[at : at + texts], keys, values, reach, slice(at, at + texts), cap, sinks)
        for at in range(0, len(q), texts)
    )
    return torch.cat(list(pieces)) if len(q) else torch.empty_like(q)


def store_in_pages(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store the keys and values of tokens, (tokens, groups, dim), at their slots of the pages."""
    for pages, new in ((keys, k), (values, v)):
        pages.flatten(0, 1).index_copy_(0, slots, new.to(pages.dtype))


def _over_pages(
    q: Tensor, keys: Tensor, values: Tensor, reach: Reach, texts: slice, cap: float, sinks: Tensor | None
) -> Tensor:
    tables, first, last = reach.tables[texts].long(), reach.first[texts, None], reach.last[texts, None]
    # (texts, groups, positions, dim)
    k, v = (pages[tables].flatten(1, 2).transpose(1, 2) for pages in (keys, values))
    rows = (q * q.shape[-1] ** -0.5).unflatten(
        1, (keys.shape[2], -1)
    )  # (texts, groups, heads of a group, dim)
    at = torch.arange(k.shape[2], device=q.device)
    unseen = ((at < first) | (at >= last))[:, None, None]
    scores = capped(_wide(rows @ k.transpose(-2, -1)), cap).masked_fill(unseen, float("-inf"))
    if sinks is not None:
        return (shares(scores.flatten(1, 2).unsqueeze(2), sinks).view(scores.shape).to(v.dtype) @ v).flatten(
            1, 2
        )
    return (torch.softmax(scores, -1).to(v.dtype) @ v).flatten(1, 2)


def fuses_adamw(kind: str) -> bool:
    """Return whether torch updates all tensors of such a device in one call; torch_npu may have registered that too."""
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    return kind in FUSED_ON or (kind == "npu" and registered(FUSED_ADAMW, "PrivateUse1"))


def adamw(update: AdamWStep) -> None:
    """Run one step of torch's AdamW in the type of the masters, with its fused kernel if the device has one."""
    if any(remainder is not None for remainder in update.remainders):
        joined_one_by_one(update, adamw)
        return
    held = update.held
    wide = [gradient.to(tensor.dtype) for gradient, tensor in zip(update.gradients, held, strict=True)]
    if update.factor != 1.0:
        torch._foreach_mul_(wide, update.factor)
    for decay in dict.fromkeys(update.decays):
        chosen = [i for i, own in enumerate(update.decays) if own == decay]
        fused = fuses_adamw(held[chosen[0]].device.type)
        kernel = torch._fused_adamw_ if fused else functional_adamw
        step = torch.tensor(float(update.step), device=held[chosen[0]].device)
        weights, slopes, means, powers = (
            [tensors[i] for i in chosen] for tensors in (held, wide, update.averages, update.squares)
        )
        kernel(
            weights,
            slopes,
            means,
            powers,
            # The maxima of Amsgrad, which is not used.
            [],
            # Without the fused kernel, torch adds 1 to the number of steps of each tensor itself.
            [step if fused else step - 1 for _ in chosen],
            amsgrad=False,
            lr=update.rate,
            beta1=update.betas[0],
            beta2=update.betas[1],
            weight_decay=decay,
            eps=update.eps,
            maximize=False,
        )
    for tensor, low in zip(held, update.lowered, strict=True):
        if low is not None:
            low.copy_(tensor)


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all numbers, in fp32."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in tensors]
    return torch.stack(norms).square().sum() if norms else torch.zeros(())


def future(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return True where a key comes after a query; the last query is at the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + keys - queries)


def _wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or unchanged if it is fp64, which the cases use to avoid rounding."""
    return x if x.dtype == torch.float64 else x.float()
