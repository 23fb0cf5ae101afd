"""CANN's kernels as their documentation describes them, in plain torch: every argument is checked, nothing is lenient.

The pages are those of the repository Ascend/op-plugin, commit 517f2e7, folder docs/zh/custom_APIs/torch_npu; types of
results that the pages leave out, and what can be derived, are from its files op_plugin/config/op_plugin_functions.yaml
and derivatives.yaml. The types that a kernel has on a chip, and those of its weight, are rows of native/npu/facts.py.
Numbers are computed in fp32, as CANN does inside.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from native.npu import facts

# The chip that is simulated.
CHIP = os.environ.get("NPU_CHIP", "Ascend910B3")
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"CANN: {message}")


def _types(name: str, *tensors: Tensor) -> None:
    """Refuse a type that the row of a kernel does not have on this chip."""
    known = facts.types(name, facts.generation(CHIP))
    require(bool(known), f"the {CHIP} has no {name}")
    for x in tensors:
        require(NAMES.get(x.dtype) in known, f"{name} takes {', '.join(known)} on this chip, not {x.dtype}")


def _weight(name: str, x: Tensor, weight: Tensor) -> None:
    wide = facts.KERNELS[name].weight == facts.OWN_OR_FP32
    require(
        weight.dtype == x.dtype or (wide and weight.dtype == torch.float32),
        f"the weight of {name} has its type {facts.KERNELS[name].weight}",
    )


# torch_npu-npu_rms_norm.md: 2 to 8 dimensions; gamma has the last of them, in the type of x or float32; the second
# result is the inverse deviation in float32.
def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    _types("npu_rms_norm", self, gamma)
    require(2 <= self.dim() <= 8, f"npu_rms_norm takes 2 to 8 dimensions, not {self.dim()}")
    require(gamma.shape == self.shape[self.dim() - gamma.dim() :], "gamma has the last dimensions of x")
    _weight("npu_rms_norm", self, gamma)
    return _RMSNorm.apply(self, gamma, float(epsilon))


# op_plugin_functions.yaml, RmsNormBackwardKernelOpApi.cpp: the gradient of gamma is float32.
def npu_rms_norm_backward(dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    _types("npu_rms_norm_backward", dy, self)
    _weight("npu_rms_norm_backward", self, gamma)
    require(dy.dtype == self.dtype and dy.shape == self.shape, "dy is like x")
    require(
        rstd.dtype == torch.float32 and rstd.numel() == self.numel() // gamma.numel(), "rstd of npu_rms_norm"
    )
    x, slope = self.float(), dy.float()
    inverse = rstd.reshape(*self.shape[:-1], 1)
    normal = x * inverse
    of_gamma = (slope * normal).reshape(-1, gamma.numel()).sum(0)
    slope = slope * gamma.float()
    own = inverse * (slope - normal * (slope * normal).mean(-1, keepdim=True))
    return own.to(self.dtype), of_gamma.reshape(gamma.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, gamma, inverse)
        ctx.mark_non_differentiable(inverse)
        return (wide * inverse * gamma.float()).to(x.dtype), inverse

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
        x, gamma, inverse = ctx.saved_tensors
        own, of_gamma = npu_rms_norm_backward(dy, x, gamma, inverse)
        return own, of_gamma.to(gamma.dtype), None


# torch_npu-npu_add_rms_norm.md: one type for all three, no empty tensors; results: norm, inverse deviation, sum.
# derivatives.yaml does not have it: the results carry no gradient.
@torch.no_grad()
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06
) -> tuple[Tensor, Tensor, Tensor]:
    _types("npu_add_rms_norm", x1, x2, gamma)
    _weight("npu_add_rms_norm", x1, gamma)
    require(x1.dtype == x2.dtype, "x1 and x2 have one type")
    require(
        x1.shape == x2.shape and 1 <= x1.dim() <= 8 and x1.numel() > 0, "x1 and x2 have one shape, not empty"
    )
    require(gamma.shape == x1.shape[x1.dim() - gamma.dim() :], "gamma has the last dimensions of x1")
    total = (x1.float() + x2.float()).to(x1.dtype)
    wide = total.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * gamma.float()).to(x1.dtype), inverse, total


# AddLayerNormKernelNpuOpApi.cpp and derivatives.yaml: norm, mean, inverse deviation, and the sum (only with
# additional_output); the first and the last have gradients. aclnnAddLayerNormGrad (add_layer_norm_grad_def.cpp) has dy,
# x1, x2 and gamma of one type.
def npu_add_layer_norm(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float = 1e-05,
    additional_output: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _types("npu_add_layer_norm", x1, x2, gamma, beta)
    require(x1.dtype == x2.dtype and x1.shape == x2.shape, "x1 and x2 are alike")
    require(
        gamma.dtype == beta.dtype and gamma.shape == beta.shape == x1.shape[-1:], "gamma and beta are alike"
    )
    _weight("npu_add_layer_norm", x1, gamma)
    total = (x1.float() + x2.float()).to(x1.dtype)
    wide = total.float()
    mean = wide.mean(-1, keepdim=True)
    inverse = torch.rsqrt(wide.var(-1, correction=0, keepdim=True) + epsilon)
    out = ((wide - mean) * inverse * gamma.float() + beta.float()).to(x1.dtype)
    if out.requires_grad:
        out.register_hook(lambda _: _weight("npu_add_layer_norm_backward", x1, gamma))
    return out, mean.detach(), inverse.detach(), total if additional_output else total.new_empty(0)


# aclnnLayerNorm (torch's layer norm on an NPU): the weight has the type of the input or FLOAT, and that of the bias.
# The gradients of both are summed in float32 (LayerNormBackwardKernelNpuOpApi.cpp).
def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    _types("layer_norm", x, weight)
    require(tuple(shape) == tuple(weight.shape) == tuple(x.shape[-1:]), "the weight has the last dimension")
    _weight("layer_norm", x, weight)
    require(
        bias is None or (bias.dtype, bias.shape) == (weight.dtype, weight.shape),
        "the bias is like the weight",
    )
    wide = None if bias is None else bias.float()
    return F.layer_norm(x.float(), shape, weight.float(), wide, eps).to(x.dtype)


# torch_npu-npu_swiglu.md: neither empty nor with gaps; silu of the first half times the second.
def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    _types("npu_swiglu", self)
    require(1 <= self.dim() <= 8 and -self.dim() <= dim < self.dim(), "dim is one of 1 to 8 dimensions")
    require(
        self.is_contiguous() and self.numel() > 0, "npu_swiglu takes contiguous tensors that are not empty"
    )
    require(
        self.shape[dim] % 2 == 0, f"dimension {dim} has {self.shape[dim]} numbers, which 2 does not divide"
    )
    gate, up = self.float().chunk(2, dim)
    return (F.silu(gate) * up).to(self.dtype)


# op_plugin_functions.yaml
def npu_swiglu_backward(grad_output: Tensor, self: Tensor, dim: int = -1) -> Tensor:
    _types("npu_swiglu_backward", grad_output, self)
    require(grad_output.dtype == self.dtype and self.is_contiguous(), "the gradient is like the result")
    gate, up = self.float().chunk(2, dim)
    of_gate = torch.ops.aten.silu_backward(grad_output.float() * up, gate)
    return torch.cat((of_gate, grad_output.float() * F.silu(gate)), dim).to(self.dtype)


# torch_npu-npu_gelu.md: erf for "none", tanh for "tanh". torch's own gelu ignores `approximate` on an NPU.
def npu_gelu(self: Tensor, *, approximate: str = "none") -> Tensor:
    _types("npu_gelu", self)
    require(self.dim() <= 8 and approximate in ("none", "tanh"), f"approximate {approximate!r}")
    return F.gelu(self.float(), approximate=approximate).to(self.dtype)


# op_plugin_functions.yaml
def npu_gelu_backward(grad_output: Tensor, self: Tensor, *, approximate: str = "none") -> Tensor:
    _types("npu_gelu_backward", grad_output, self)
    require(
        grad_output.shape == self.shape and approximate in ("none", "tanh"), f"approximate {approximate!r}"
    )
    _types("npu_gelu_backward", grad_output, self)
    wide = torch.ops.aten.gelu_backward(grad_output.float(), self.float(), approximate=approximate)
    return wide.to(self.dtype)


# torch_npu-npu_cross_entropy_loss.md: targets inside [0, C) unless ignore_index is 0 or more; the loss and the
# logarithms have the type of the input; with a gradient, "mean" takes the defaults alone.
def npu_cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _types("npu_cross_entropy_loss", input)
    require(
        input.dim() == 2 and 0 < input.shape[0] <= 200_000 and input.shape[1] > 0, "N is in (0,200000], C > 0"
    )
    require(target.dtype == torch.int64 and target.shape == input.shape[:1], "targets are int64, one a row")
    inside = (target >= 0) & (target < input.shape[1])
    require(bool((inside | ((target == ignore_index) & (ignore_index >= 0))).all()), "targets are in [0,C)")
    require(ignore_index < input.shape[1] and reduction in ("mean", "sum", "none"), "ignore_index, reduction")
    require(
        not label_smoothing and not lse_square_scale_for_zloss and not return_zloss and weight is None,
        "defaults",
    )
    require(
        not (input.requires_grad and reduction == "mean" and ignore_index != -100), "mean takes the defaults"
    )
    logarithms = F.log_softmax(input.float(), -1)
    loss = F.nll_loss(logarithms, target, reduction=reduction, ignore_index=ignore_index).to(input.dtype)
    empty = input.new_empty(0)
    return (loss if reduction == "none" else loss.view(1)), logarithms.detach().to(input.dtype), empty, empty


# torch_npu-npu_grouped_matmul.md without quantisation: group_list is a tensor of ends (group_list_type 0) or of counts
# (1); group_type 0 divides the rows of x, 2 its columns; split_item 2 and 3 give one result.
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
) -> list[Tensor]:
    _types("npu_grouped_matmul", *x, *weight)
    require(len(x) == 1 and len(weight) == 1 and split_item in (2, 3), "one tensor each, one result")
    require(
        group_list is not None and group_list.dtype == torch.int64 and group_list.dim() == 1, "group_list"
    )
    assert group_list is not None
    require(group_type in (0, 2) and group_list_type in (0, 1), "group_type, group_list_type")
    ends = group_list if group_list_type == 0 else group_list.cumsum(0)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    require(min(sizes) >= 0 and x[0].dtype == weight[0].dtype and x[0].dim() == 2, "groups, types")
    if group_type == 0:
        require(weight[0].dim() == 3 and weight[0].shape[0] == len(sizes), "weights (groups, k, n)")
        require(sum(sizes) == len(x[0]), "the groups are all rows")
        parts = [part @ own for part, own in zip(x[0].split(sizes), weight[0], strict=True)]
        return [torch.cat(parts)]
    require(
        weight[0].dim() == 2 and sum(sizes) == x[0].shape[1] == len(weight[0]), "the groups are all columns"
    )
    pairs = zip(x[0].split(sizes, 1), weight[0].split(sizes), strict=True)
    return [torch.stack([part @ own for part, own in pairs])]


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Update weight and moments; the powers are those of the step before (aclnnApplyAdamW)."""
    numbers = (beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon)
    require(all(isinstance(number, (int, float)) for number in numbers), "the first seven are numbers")
    require(not amsgrad and not maximize and max_grad_norm is None, "amsgrad needs max_grad_norm")
    weight, mean, square = out
    _types("npu_apply_adam_w", grad)
    require(
        len({x.dtype for x in (grad, *out)}) == 1 and len({x.shape for x in (grad, *out)}) == 1,
        "types, shapes",
    )
    mean.mul_(beta1).add_(grad, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    deviation = (square / (1 - beta2_power * beta2)).sqrt().add_(epsilon)
    weight.mul_(1 - lr * weight_decay).addcdiv_(mean, deviation, value=-lr / (1 - beta1_power * beta1))
    return out


# torch_npu-npu_fusion_attention.md: layouts BNSD, BSND, and TND with the ends of sequences; the modes of the mask are
# described in its section on sparse_mode, with the origin of modes 3 and 4 at the last query and the last key.
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Any, ...]:
    _types("npu_fusion_attention", query, key, value)
    require(query.dtype == key.dtype == value.dtype and key.shape == value.shape, "q, k and v are alike")
    require(
        pse is None and padding_mask is None and keep_prob == 1.0, "without pse, padding_mask and dropout"
    )
    require(inner_precise in (0, 2) and isinstance(scale, float), "inner_precise, scale")
    empty = query.new_zeros(0)
    if input_layout == "TND":
        out = _sequences(
            query, key, value, head_num, scale, atten_mask, sparse_mode, actual_seq_qlen, actual_seq_kvlen
        )
        return out, empty, empty, empty, 0, 0, 0
    by_rows = input_layout == "BSND"
    require(
        (by_rows or input_layout == "BNSD") and query.dim() == 4 and not actual_seq_qlen,
        f"input_layout {input_layout}",
    )
    if by_rows:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    batch, heads, queries, dim = query.shape
    groups, keys = key.shape[1:3]
    require(head_num == heads and 1 <= heads <= 256 and heads % groups == 0, f"{head_num} of {heads} heads")
    require(
        key.shape == (batch, groups, keys, dim) and 1 <= dim <= 768 and queries > 0 and keys > 0, "shapes"
    )
    if atten_mask is not None:
        require(atten_mask.dtype in (torch.bool, torch.uint8), "atten_mask is bool or uint8")
        band = (pre_tockens, next_tockens)
        closed = _closed(sparse_mode, atten_mask, (batch, heads, queries, keys), band, prefix)
    else:
        closed = torch.zeros(queries, keys, dtype=torch.bool, device=query.device)
    out = _attend(query, key, value, scale, closed)
    out = out.transpose(1, 2).contiguous() if by_rows else out
    return out, empty, empty, empty, 0, 0, 0


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, closed: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).float() for x in (k, v))
    scores = (q.float() @ k.transpose(2, 3) * scale).masked_fill(closed, float("-inf"))
    return (scores.softmax(-1) @ v).to(q.dtype)


def _triangle(mask: Tensor) -> None:
    require(tuple(mask.shape) == (2048, 2048), f"the compressed mask is 2048 x 2048, not {tuple(mask.shape)}")
    require(
        torch.equal(mask.bool(), torch.ones_like(mask, dtype=torch.bool).triu(1)), "the mask is a triangle"
    )


def _closed(
    mode: int, mask: Tensor, shape: tuple[int, int, int, int], band: tuple[int, int], prefix: list[int] | None
) -> Tensor:
    """Return True where a key is hidden."""
    batch, heads, queries, keys = shape
    require((prefix is not None) == (mode in (5, 6)), "prefix is for modes 5 and 6")
    if mode in (0, 1):
        forms = [(queries, keys), *((b, n, queries, keys) for b in (1, batch) for n in (1, heads))]
        require(tuple(mask.shape) in forms, f"a mask of {tuple(mask.shape)}")
        require(mode == 1 or band == (2147483647, 2147483647), "mode 0 with tokens needs a mask that agrees")
        return mask.bool()
    at = torch.arange(keys, device=mask.device)
    # How far each key is before the diagonal that ends at the last query and the last key.
    last = torch.arange(queries, device=mask.device).unsqueeze(1) + keys - queries - at
    if mode == 6:
        assert prefix is not None
        require(len(prefix) == batch <= 32, "one prefix for each of at most 32 batches")
        least = 0 if queries > keys else keys - queries
        require(all(isinstance(n, int) and least <= n <= keys for n in prefix), f"prefixes {prefix}")
        require(tuple(mask.shape) == (3072, 2048), "the mask for prefixes is 3072 x 2048")
        _triangle(mask[:2048])
        require(
            not mask[2048:, :1024].any() and bool(mask[2048:, 1024:].all()), "the lower mask is a rectangle"
        )
        seen = at < torch.tensor(prefix, device=mask.device).view(-1, 1, 1, 1)
        return (last < 0) & ~seen
    _triangle(mask)
    require(mode in (2, 3, 4), f"sparse_mode {mode}")
    if mode == 4:
        before, after = band
        require(before + after >= 0 and -after < keys and -before < queries, f"a band of {band}")
        return (last > before) | (last < -after)
    return last < 0 if mode == 3 else last - (keys - queries) < 0


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    scale: float,
    mask: Tensor | None,
    mode: int,
    query_ends: list[int] | None,
    key_ends: list[int] | None,
) -> Tensor:
    require(query_ends is not None and key_ends is not None, "TND needs the ends of sequences")
    assert query_ends is not None and key_ends is not None and mask is not None
    require(
        q.dim() == 3 and heads == q.shape[1] and len(q) <= 1 << 20, "TND has 3 dimensions, at most 1M tokens"
    )
    require(len(query_ends) == len(key_ends) <= 1024, "at most 1K sequences")
    require(all(type(end) is int for end in (*query_ends, *key_ends)), "the ends are numbers")
    require(query_ends == sorted(query_ends) and query_ends[-1] == len(q), "the ends are sums of lengths")
    require(key_ends == sorted(key_ends) and key_ends[-1] == len(k) and mode == 3, "sparse_mode of sequences")
    _triangle(mask)
    parts, first, start = [], 0, 0
    for end, last in zip(query_ends, key_ends, strict=True):
        own, others, values = (
            x.transpose(0, 1).unsqueeze(0) for x in (q[first:end], k[start:last], v[start:last])
        )
        shape = (1, heads, end - first, last - start)
        closed = _closed(mode, mask, shape, (0, 0), None)
        parts.append(_attend(own, others, values, scale, closed)[0].transpose(0, 1))
        first, start = end, last
    return torch.cat(parts)


# torch_npu-npu_rotary_mul.md, for Atlas A2 and A3 with jit_compile=False. `half` takes angles 11SD, B1SD or BNSD with
# x (B, N, S, D), and 1S1D, BS1D or BSND with x (B, S, N, D); `interleave` only 11SD and 1S1D; the result has x's type.
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    _types("npu_rotary_mul", input, r1, r2)
    require(rotary_mode in ("half", "interleave") and rotate is None, "rotary_mode is half or interleave")
    require(
        input.dim() == r1.dim() == 4 and r1.shape == r2.shape, "x has four dimensions, r1 and r2 one shape"
    )
    angles, dim = tuple(r1.shape), input.shape[3]
    by_rows = angles[1] > 1 or (angles[2] == 1 and input.shape[1] == 1)
    batch, heads, rows = input.shape[0], input.shape[2 if by_rows else 1], input.shape[1 if by_rows else 2]
    require(dim < 896 and dim % 2 == 0, "D is even and below 896")
    known = [(1, 1, rows, dim)]
    if rotary_mode == "half":
        require(batch < 1000 and heads < 1000, "B and N are below 1000")
        known += [(batch, 1, rows, dim), (batch, heads, rows, dim)]
    else:
        require(batch * heads < 1000, "B times N is below 1000")
    if by_rows:
        known = [(first, third, second, last) for first, second, third, last in known]
    require(angles in known, f"angles of {angles} for x of {tuple(input.shape)}")
    require(float(r1.abs().max()) <= 1 and float(r2.abs().max()) <= 1, "r1 and r2 are from -1 to 1")
    x = input.float()
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    else:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (x * r1.float() + other * r2.float()).to(input.dtype)


# torch_npu-npu_fused_infer_attention_score.md, with one query of each text (Q_S is 1) and keys in pages: the layout BSH
# with pages of (blocknum, blocksize, H), in float16 or bfloat16; the block size is a multiple of 16.
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    _types("npu_fused_infer_attention_score", query, key, value)
    for x in (query, key, value):
        require(
            x.is_contiguous() and x.dim() == 3, "contiguous tensors (B, S, H) and (blocknum, blocksize, H)"
        )
    require(key.numel() < 2**31, "the numbers of all pages are counted in int32")
    batch, length, width = query.shape
    groups = num_key_value_heads or num_heads
    require(
        length == 1 and input_layout == "BSH" and key.shape == value.shape, "one query; k and v are alike"
    )
    require(width % num_heads == 0 and num_heads <= 256 and batch <= 65536, "heads")
    size = width // num_heads
    require(num_heads % groups == 0 and num_heads // groups <= 64 and size <= 512, "heads that share keys")
    require(key.shape[2] == groups * size <= 65535, "a page has the heads of keys side by side")
    require(block_size % 16 == 0 and 0 < block_size <= 512 and key.shape[1] == block_size, "block_size")
    lengths = actual_seq_lengths_kv
    require(
        isinstance(lengths, list) and all(type(n) is int and n > 0 for n in lengths), "lengths are numbers"
    )
    require(
        block_table is not None and block_table.dtype == torch.int32 and block_table.dim() == 2, "block_table"
    )
    assert lengths is not None and block_table is not None
    require(len(lengths) == batch == len(block_table), "a length and a row of pages for each text")
    require(block_table.shape[1] * block_size >= max(lengths), "the table has every page of the longest text")
    rows = []
    for text, count in enumerate(lengths):
        pages = block_table[text, : -(-count // block_size)].long()
        require(bool(((pages >= 0) & (pages < len(key))).all()), "a page that is not there")
        k, v = (
            x[pages].flatten(0, 1)[:count].view(1, count, groups, size).transpose(1, 2) for x in (key, value)
        )
        closed = torch.zeros(1, count, dtype=torch.bool, device=query.device)
        rows.append(_attend(query[text].view(1, num_heads, 1, size), k, v, scale, closed).view(1, 1, width))
    return torch.cat(rows), query.new_zeros(1)
