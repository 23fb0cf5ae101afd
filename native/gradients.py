"""Custom ops that the CPU and CUDA backends share: their schemas, the shapes of their results, and their gradients.

Each function takes a backend's `register` and kernels, and returns the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from native.chunked import TokenLoss, loss_in_pieces
from native.divided import ColumnKernels

Op = Callable[..., Any]
Gradients = tuple[Tensor | None, ...]


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


# ---- rotary


def rotary_op(register: Op, compute: Op) -> Op:
    """Register the rotation of queries and keys; its gradient is the opposite rotation."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, _, cosines, sines, ctx.interleaved, ctx.back = inputs
        ctx.save_for_backward(cosines, sines)

    def gradient(ctx: Any, of_q: Tensor, of_k: Tensor) -> Gradients:
        return *op(of_q, of_k, *ctx.saved_tensors, ctx.interleaved, not ctx.back), None, None, None, None

    op: Op = register(
        "rotary(Tensor q, Tensor k, Tensor cosines, Tensor sines, bool interleaved, bool back) "
        "-> (Tensor, Tensor)",
        compute,
        rotated_shapes,
        keep,
        gradient,
    )
    return op


def rotated_shapes(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return empty tensors with memory order (batch, rows, heads, dim)."""
    made = []
    for x in (q, k):
        heads, rows, dim = x.shape[1:]
        made.append(x.new_empty_strided(x.shape, (rows * heads * dim, dim, heads * dim, 1)))
    return made[0], made[1]


# ---- cross_entropy


def cross_entropy_op(register: Op, compute: Op) -> Op:
    """Register the loss with its gradient in new memory; `compute` returns both."""

    def shapes(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        return logits.new_empty((), dtype=torch.float32), _like(logits)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, found = output
        ctx.mark_non_differentiable(found)
        ctx.save_for_backward(found)

    def gradient(ctx: Any, upstream: Tensor, _: Tensor) -> Gradients:
        (found,) = ctx.saved_tensors
        return (found * upstream).to(found.dtype), None, None

    schema = "cross_entropy(Tensor logits, Tensor targets, int ignore_index) -> (Tensor, Tensor)"
    op: Op = register(schema, compute, shapes, keep, gradient)
    return op


# ---- vocabulary_cross_entropy


def column_kernels(
    register: Op, sums: Op, slopes: Op, scale: Callable[[Tensor, Tensor], None]
) -> ColumnKernels:
    """Register both kernels of a cross-entropy with divided columns; they have no gradient."""

    return ColumnKernels(
        register(
            "column_sums(Tensor logits, Tensor columns, int own, float of_target, float of_all) -> Tensor",
            sums,
            three_of_each_token,
        ),
        register(
            "column_slopes_(Tensor(a!) logits, Tensor columns, Tensor factors, int own, float of_target, "
            "float of_all) -> ()",
            slopes,
            no_result,
        ),
        scale,
    )


def no_result(*_: object) -> None:
    """Return the result of an op that only overwrites its inputs."""


def three_of_each_token(logits: Tensor, *_: object) -> Tensor:
    """Return an empty tensor for the three numbers of each token."""
    return logits.new_empty(3, logits.shape[0], dtype=torch.float32)


# ---- dropout_add


def dropout_add_op(register: Op, forward: Op, backward: Op) -> Op:
    """Register dropout of x + bias, added to a residual; the gradient recomputes the mask."""

    def shapes(upstream: Tensor, state: Tensor, probability: float, biased: bool) -> tuple[Tensor, Tensor]:
        # Without a bias, its gradient is empty.
        return _like(upstream), upstream.new_empty(upstream.shape[-1] if biased else 0, dtype=torch.float32)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, bias, state, ctx.probability = inputs
        ctx.save_for_backward(state)
        ctx.bias_type = None if bias is None else bias.dtype

    def gradient(ctx: Any, upstream: Tensor) -> Gradients:
        (state,) = ctx.saved_tensors
        own, sums = back(upstream, state, ctx.probability, ctx.bias_type is not None)
        return own, upstream, None if ctx.bias_type is None else sums.to(ctx.bias_type), None, None

    back: Op = register(
        "dropout_add_backward(Tensor upstream, Tensor state, float probability, bool biased) "
        "-> (Tensor, Tensor)",
        backward,
        shapes,
    )
    op: Op = register(
        "dropout_add(Tensor x, Tensor residual, Tensor? bias, Tensor state, float probability) -> Tensor",
        forward,
        _like,
        keep,
        gradient,
    )
    return op


# ---- gelu


def gelu_ops(register: Op, forward: Op, backward: Op) -> tuple[Op, Op]:
    """Register GELU of x, or of x + bias, and its gradient, which also sums that of the bias in fp32."""

    def shapes(upstream: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
        # Without a bias, its gradient is empty.
        return _like(x), x.new_empty(0 if bias is None else x.shape[-1], dtype=torch.float32)

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor | None, bool], output: Tensor) -> None:
        x, bias, ctx.tanh = inputs
        ctx.save_for_backward(x, bias)

    def gradient(ctx: Any, upstream: Tensor) -> Gradients:
        x, bias = ctx.saved_tensors
        own, sums = back(upstream, x, bias, ctx.tanh)
        return own, None if bias is None else sums.to(bias.dtype), None

    schema = "gelu_backward(Tensor upstream, Tensor x, Tensor? bias, bool tanh) -> (Tensor, Tensor)"
    back: Op = register(schema, backward, shapes)
    op: Op = register("gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor", forward, _like, keep, gradient)
    return op, back


# ---- swiglu


def swiglu_ops(register: Op, run: Callable[[Tensor, Tensor | None], Tensor]) -> tuple[Op, Op]:
    """Register SwiGLU and its gradient; `run` returns the gradient if it gets an upstream gradient, else the value."""

    def gradient(ctx: Any, upstream: Tensor) -> Tensor:
        found: Tensor = back(*ctx.saved_tensors, upstream)
        return found

    back: Op = register("swiglu_backward(Tensor x, Tensor upstream) -> Tensor", run, _like)
    op: Op = register(
        "swiglu(Tensor x) -> Tensor", lambda x: run(x, None), half_as_wide, _keep_inputs, gradient
    )
    return op, back


def half_as_wide(x: Tensor) -> Tensor:
    """Return an empty tensor with half as many columns."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


# ---- norms


def norm_ops(register: Op, forward: Op, backward: Op) -> tuple[Op, Op]:
    """Register layer norm and RMS norm, alone or with the addition before; return both ops.

    An op returns the norm, the sum of x and the residual (empty without a residual), and one or two numbers of each row
    for the backward pass, (numbers, rows). forward: writes these three, given them, the inputs, and whether it is a
    layer norm. backward: returns the gradient of x, and in fp32 those of the weight and, if there is one, the bias.
    """
    return _norm_op(register, forward, backward, True), _norm_op(register, forward, backward, False)


def _norm_op(register: Op, forward: Op, backward: Op, centre: bool) -> Op:
    def shapes(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.numel() // max(1, x.shape[-1])
        total = x.new_empty(0) if residual is None else _like(residual)
        return _like(x), total, x.new_empty(2 if centre else 1, rows, dtype=torch.float32)

    def compute(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        made = shapes(x, residual)
        forward(made, x, residual, *rest, centre)
        return made

    def gradient_shapes(
        upstream: Tensor, of_total: Tensor | None, x: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        *_, learned, biased = rest
        sums = (2 if biased else 1, x.shape[-1]) if learned else 0
        return _like(x), x.new_empty(sums, dtype=torch.float32)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, residual, weight, bias, _ = inputs
        _, total, facts = output
        ctx.mark_non_differentiable(facts, *(() if residual is not None else (total,)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if residual is None else total, weight, facts)
        ctx.summed, ctx.biased, ctx.type = residual is not None, bias is not None, weight.dtype

    def gradient(ctx: Any, upstream: Tensor | None, of_total: Tensor | None, _: None) -> Gradients:
        of_total = of_total if ctx.summed else None
        if upstream is None:
            return of_total, of_total, None, None, None
        learned = any(ctx.needs_input_grad[2:4])
        own, sums = back(upstream, of_total, *ctx.saved_tensors, learned, ctx.biased)
        of_weight, of_bias = (*sums.to(ctx.type).unbind(), None, None)[:2]
        return own, own if ctx.summed else None, of_weight, of_bias, None

    name = "layer_norm" if centre else "rms_norm"
    back: Op = register(
        f"{name}_backward(Tensor upstream, Tensor? of_total, Tensor x, Tensor weight, Tensor facts, bool learned, "
        "bool biased) -> (Tensor, Tensor)",
        lambda *given: backward(*given, centre),
        gradient_shapes,
    )
    schema = (
        "(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)"
    )
    op: Op = register(f"{name}{schema}", compute, shapes, keep, gradient)
    return op


# ---- grouped_linear


def grouped_linear_op(register: Op, forward: Op, backward: Op) -> Op:
    """Register the products of each group's rows with its matrix; `groups` tells which rows belong to which group."""

    def shape(x: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[1])

    def gradient_shapes(
        upstream: Tensor, x: Tensor, weight: Tensor, groups: Tensor, of_x: bool, of_weight: bool
    ) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape if of_x else 0), weight.new_empty(weight.shape if of_weight else 0)

    def gradient(ctx: Any, upstream: Tensor) -> Gradients:
        of_x, of_weight = ctx.needs_input_grad[:2]
        first, second = back(upstream, *ctx.saved_tensors, of_x, of_weight)
        return first if of_x else None, second if of_weight else None, None

    back: Op = register(
        "grouped_linear_backward(Tensor upstream, Tensor x, Tensor weight, Tensor groups, bool of_x, "
        "bool of_weight) -> (Tensor, Tensor)",
        backward,
        gradient_shapes,
    )
    schema = "grouped_linear(Tensor x, Tensor weight, Tensor groups) -> Tensor"
    op: Op = register(schema, forward, shape, _keep_inputs, gradient)
    return op


# ---- linear_cross_entropy

# Takes targets, the vocabulary and the index to ignore; returns the checked targets and their TokenLoss.
MakeLoss = Callable[[Tensor, int, int], tuple[Tensor, TokenLoss]]


def linear_cross_entropy_op(register: Op, make_loss: MakeLoss, scale: Callable[[Tensor, Tensor], None]) -> Op:
    """Register a model's last matrix with its cross-entropy; the gradients are computed together with the loss."""

    def shapes(
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocabulary: int,
        ignore_index: int,
        of_x: bool,
        of_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # A gradient that is not needed is empty.
        dx = _like(x) if of_x else x.new_empty(0)
        dw = _like(weight) if of_weight else x.new_empty(0)
        return x.new_empty((), dtype=torch.float32), dx, dw

    def compute(
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocabulary: int,
        ignore_index: int,
        of_x: bool,
        of_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        targets, token_loss = make_loss(targets, vocabulary, ignore_index)
        _, dx, dw = shapes(x, weight, targets, vocabulary, ignore_index, of_x, of_weight)
        given = dx if of_x else None, dw if of_weight else None
        return loss_in_pieces(x, weight, targets, token_loss, *given), dx, dw

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, dx, dw = output
        ctx.mark_non_differentiable(dx, dw)
        # Else torch fills zeros of the size of the matrix for the results without a gradient.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dx, dw)
        ctx.has = inputs[-2:]

    def gradient(ctx: Any, upstream: Tensor, *_: Tensor) -> Gradients:
        gradients = ctx.saved_tensors
        if type(upstream) is not Tensor:
            # torch.compile traces this, so it may not read a number, and saved tensors stay unchanged.
            gradients = tuple((each * upstream).to(each.dtype) for each in gradients)
        else:
            for each in gradients:
                scale(each, upstream)
        dx, dw = (each if has else None for each, has in zip(gradients, ctx.has, strict=True))
        return dx, dw, None, None, None, None, None

    op: Op = register(
        "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, int vocabulary, int ignore_index, "
        "bool of_x, bool of_weight) -> (Tensor, Tensor, Tensor)",
        compute,
        shapes,
        keep,
        gradient,
    )
    return op
