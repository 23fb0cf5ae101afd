"""Define the test cases of every op, and how much a backend may differ from the reference.

The tests (for values and gradients) and the benchmark use them; shapes and allowed errors are defined only here. The
expected result of a case is the reference in fp64 for the same, already rounded inputs. An error is the largest
difference divided by the largest absolute expected value, so that it has the same meaning for losses and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from native.bounds import BF16, ERRORS, FP32
from tests.support.op_shapes import LARGE, LARGE_ARGUMENTS, NONE, SHAPES, TORCH_ERRORS, WRONG


@dataclass(frozen=True)
class Case:
    """One call of an op: a function below makes its inputs from `shape`; `arguments` are passed to the op unchanged."""

    op: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    value_error: float
    gradient_error: float
    """The largest error allowed for this project's backends; `allowed` also covers torch's."""
    arguments: Mapping[str, object]

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def value_type(self) -> torch.dtype:
        """Return the type of the op's results."""
        is_wide = self.op.endswith("cross_entropy") or self.op == "route"
        return torch.float32 if is_wide else self.dtype

    def allowed(self, backend: str) -> tuple[float, float]:
        """Return the largest allowed errors of value and gradients for `backend`."""
        own = (self.value_error, self.gradient_error)
        return TORCH_ERRORS.get((self.op, self.dtype), own) if backend == "reference" else own

    def inputs(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Return new inputs; they are always the same for the same seed."""
        return _MAKERS[self.op](self, torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Result:
    """The result of an op for a case: its value, and the gradient of every input that has one.

    Several values are joined to one row.
    """

    value: Tensor
    gradients: tuple[Tensor, ...]


def run(case: Case, op: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Result:
    """Return value and gradients of `op`, which gets copies of the inputs."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    # A backend may overwrite its inputs, so each call gets copies that are not leaves.
    value = op(*(x.clone() if x.requires_grad else x for x in leaves), **case.arguments)
    values = value if isinstance(value, tuple) else (value,)
    with_gradient = [
        (each, _upstream(each, seed)) for seed, each in enumerate(values, 1) if each.requires_grad
    ]
    torch.autograd.backward([each for each, _ in with_gradient], [slope for _, slope in with_gradient])
    gradients = tuple(x.grad for x in leaves if x.grad is not None)
    return Result(values[0].detach() if len(values) == 1 else _joined(values), gradients)


def meaning(case: Case, reference: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Result:
    """Return the reference's result in fp64."""
    return run(case, reference, tuple(x.double() if x.is_floating_point() else x for x in inputs))


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected value; infinity if NaNs or infinities differ.

    If zero is expected everywhere, as for the gradient of a query with only one key, return the largest difference.
    """
    actual, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    if not torch.allclose(actual[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    if not actual[finite].isfinite().all():
        return float("inf")
    # The inputs are about 1.
    scale = float(expected[finite].abs().max()) or 1.0
    return float((actual[finite] - expected[finite]).abs().max() / scale)


def large_cases() -> Iterator[Case]:
    """Yield the sizes that the benchmark measures: those of GPTs with 124 million and with 1.3 billion parameters."""
    for op, name, shape in LARGE:
        for dtype in (FP32, BF16):
            arguments = LARGE_ARGUMENTS.get(op, NONE)
            yield Case(op, name, dtype, shape, *ERRORS[op, dtype], arguments)


def cases(op: str | None = None) -> Iterator[Case]:
    """Yield all cases, or those of one op."""
    for case_op, name, shape, arguments in SHAPES:
        if op in (None, case_op):
            for dtype in (FP32, BF16):
                value_error, gradient_error = ERRORS[case_op, dtype]
                yield Case(case_op, name, dtype, shape, value_error, gradient_error, arguments)


def _joined(values: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([each.detach().flatten() for each in values])


def _upstream(value: Tensor, seed: int) -> Tensor:
    """Return an upstream gradient other than 1, so that a backend that ignores it fails.

    It is the same for every type of value.
    """
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.5).to(BF16).to(value)


def _layer_norm(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    *_, width = case.shape  # (..., hidden)
    x = _edited(case, 3 * torch.randn(case.shape, generator=generator) + 1)
    weight, bias = torch.randn(2, width, generator=generator)
    return x.to(case.dtype), weight.to(case.dtype), bias.to(case.dtype)


def _rms_norm(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    return _layer_norm(case, generator)[:2]


def _add_layer_norm(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    x, weight, bias = _layer_norm(case, generator)
    residual = 2 * torch.randn(case.shape, generator=generator)
    return x, residual.to(case.dtype), weight, bias


def _add_rms_norm(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    return _add_layer_norm(case, generator)[:3]


def _gelu(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (_edited(case, 4 * torch.randn(case.shape, generator=generator)).to(case.dtype),)


def _bias_gelu(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    bias = torch.randn(case.shape[-1], generator=generator)
    return *_gelu(case, generator), bias.to(case.dtype)


def _swiglu(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (_edited(case, 3 * torch.randn(case.shape, generator=generator)).to(case.dtype),)


def _edited(case: Case, x: Tensor) -> Tensor:
    """Return the rows with the change that the case's name describes."""
    if case.name == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if case.name == "huge rows":
        return x * 1e15
    if case.name in WRONG:
        x.view(-1)[3] = WRONG[case.name]
    return x


def _dropout_add(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    x, residual = torch.randn(2, *case.shape, generator=generator).to(case.dtype)
    bias = torch.randn(case.shape[-1], generator=generator).to(case.dtype)
    # The counter's low word overflows within the tensor.
    return _edited(case, x), residual, bias, torch.tensor([0x123456789ABCDEF, (1 << 32) - 2])


def _rotary(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    batch, heads, groups, rows, dim, pairs = case.shape
    # Queries and keys are views of one projection.
    mixed = torch.randn(batch, rows, (heads + groups) * dim, generator=generator).to(case.dtype)
    q, k = (
        part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in mixed.split([heads * dim, groups * dim], -1)
    )
    angles = 6.3 * torch.rand(batch if case.name == "samples" else 1, 1, rows, pairs, generator=generator)
    return q, k, angles.cos(), angles.sin()


def _cross_entropy(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens, vocabulary, *_ = case.shape
    logits = 4 * torch.randn(tokens, vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    if case.name in _EDITS:
        _EDITS[case.name](logits, targets)
    return logits.to(case.dtype), targets


def _linear_cross_entropy(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens, hidden, rows, vocabulary = case.shape
    x = torch.randn(tokens, hidden, generator=generator)
    weight = 4 * hidden**-0.5 * torch.randn(rows, hidden, generator=generator)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    if case.name in _EDITS:
        _EDITS[case.name](x, targets)
    return x.to(case.dtype), weight.to(case.dtype), targets


def _vocabulary_cross_entropy(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens, _, vocabulary = case.shape
    logits, _ = _cross_entropy(case, generator)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    if case.name in _EDITS:
        _EDITS[case.name](logits, targets)
    return logits.to(case.dtype), targets


def _embedding(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    *shape, rows, width = case.shape
    ids = torch.randint(0, rows, shape, generator=generator)
    if case.name == "one row":
        ids[:] = rows - 1
    return ids, torch.randn(rows, width, generator=generator).to(case.dtype)


def _route(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    logits = 3 * torch.randn(case.shape, generator=generator)
    if case.name == "equal":
        logits = logits.round()
    return (logits.to(case.dtype),)


def _linear(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    rows, inputs, outputs, *with_bias = case.shape
    x = torch.randn(rows, inputs, generator=generator)
    weight = max(1, inputs) ** -0.5 * torch.randn(outputs, inputs, generator=generator)
    if case.name in WRONG and rows:
        x[1, 1] = WRONG[case.name]
    bias = [torch.randn(outputs, generator=generator)] if with_bias else []
    return tuple(each.to(case.dtype) for each in (x, weight, *bias))


def _grouped_linear(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    inputs, outputs, *sizes = case.shape
    x = torch.randn(sum(sizes), inputs, generator=generator)
    weight = inputs**-0.5 * torch.randn(len(sizes), outputs, inputs, generator=generator)
    return x.to(case.dtype), weight.to(case.dtype), torch.tensor(sizes)


def _attention(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    batch, heads, queries, keys, dim, *groups = case.shape
    q = torch.randn(batch, heads, queries, dim, generator=generator)
    k, v = torch.randn(2, batch, *(groups or [heads]), keys, dim, generator=generator)
    return q.to(case.dtype), k.to(case.dtype), v.to(case.dtype)


def _ignore_some(logits: Tensor, targets: Tensor) -> None:
    targets[::3] = -100


def _ignore_all(logits: Tensor, targets: Tensor) -> None:
    targets[:] = -100


def _ignore_zero(logits: Tensor, targets: Tensor) -> None:
    targets[::2] = 0


def _huge(logits: Tensor, targets: Tensor) -> None:
    logits[0] *= 1e4
    logits[1] += 3e38 / 4
    logits[2] = -1e30


def _masked(logits: Tensor, targets: Tensor) -> None:
    logits[:, 1::2] = float("-inf")
    targets[:] = targets // 2 * 2


def _masked_target(logits: Tensor, targets: Tensor) -> None:
    logits[1, targets[1]] = float("-inf")


def _all_masked(logits: Tensor, targets: Tensor) -> None:
    logits[1] = float("-inf")


def _infinite(logits: Tensor, targets: Tensor) -> None:
    logits[1, 0] = float("inf")


def _not_a_number(logits: Tensor, targets: Tensor) -> None:
    logits[2, 1] = float("nan")


_MAKERS: Mapping[str, Callable[[Case, torch.Generator], tuple[Tensor, ...]]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "add_layer_norm": _add_layer_norm,
    "add_rms_norm": _add_rms_norm,
    "gelu": _gelu,
    "bias_gelu": _bias_gelu,
    "swiglu": _swiglu,
    "dropout_add": _dropout_add,
    "rotary": _rotary,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "vocabulary_cross_entropy": _vocabulary_cross_entropy,
    "embedding": _embedding,
    "route": _route,
    "linear": _linear,
    "grouped_linear": _grouped_linear,
    "attention": _attention,
}

_EDITS: Mapping[str, Callable[[Tensor, Tensor], None]] = {
    "some ignored": _ignore_some,
    "all ignored": _ignore_all,
    "ignore index 0": _ignore_zero,
    "huge": _huge,
    "masked": _masked,
    "masked target": _masked_target,
    "all masked": _all_masked,
    "infinite": _infinite,
    "not a number": _not_a_number,
}


def gradients_alone(module: Any, op: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the gradient of an activation's input by the module's function for it, and by torch's graph."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 80, generator=generator).to(dtype).requires_grad_()
    rest = ("tanh",) if op == "gelu" else ()
    out = getattr(module, op)(x, *rest)
    upstream = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(upstream)
    assert x.grad is not None
    return getattr(module, f"{op}_backward")(x.detach(), upstream, *rest), x.grad
