"""Define the test cases of every op, and how far a backend may be from the reference.

The tests (for values and gradients) and the benchmark use them; shapes and allowed errors are defined only
here. The expected result of a case is the reference in fp64 on the same, already rounded, inputs. An error
is the largest difference divided by the largest absolute value expected, so that it means the same for
losses and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# One rounding to bf16 is an error of 2^-9 = 0.002; sums of rounded products and a second rounding add to
# it.
_FP32, _BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One call of an op: a maker below creates its inputs from `shape`; `arguments` are passed to the op unchanged."""

    op: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    value_error: float
    gradient_error: float
    """The largest error allowed for this project's backends; `allowed` also covers torch's."""
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{str(self.dtype).removeprefix('torch.')}"

    def allowed(self, backend: str) -> tuple[float, float]:
        """Return the largest errors of value and gradients that `backend` may have."""
        own = (self.value_error, self.gradient_error)
        return _TORCH_ERRORS.get((self.op, self.dtype), own) if backend == "reference" else own

    def inputs(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Return new inputs, always the same for one seed."""
        return _MAKERS[self.op](self, torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Result:
    """The result of an op for a case: its value and the gradient of every input that has one."""

    value: Tensor
    gradients: tuple[Tensor, ...]


def run(case: Case, op: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Result:
    """Return value and gradients of `op`, which gets copies of the inputs."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    # A backend may overwrite its inputs, so each call gets copies that are not leaves.
    value = op(*(x.clone() if x.requires_grad else x for x in leaves), **case.arguments)
    value.backward(_upstream(value))
    gradients = tuple(x.grad for x in leaves if x.grad is not None)
    return Result(value.detach(), gradients)


def meaning(case: Case, reference: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Result:
    """Return the reference's result in fp64."""
    return run(case, reference, tuple(x.double() if x.is_floating_point() else x for x in inputs))


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected value; infinity if NaN and infinities differ."""
    actual, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    if not torch.allclose(actual[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    if not actual[finite].isfinite().all():
        return float("inf")
    scale = expected[finite].abs().max().clamp_min(1e-30)
    return float((actual[finite] - expected[finite]).abs().max() / scale)


def large_cases() -> Iterator[Case]:
    """Yield the sizes that the benchmark measures: those of a small GPT and of one with 124 million parameters."""
    for op, name, shape in _LARGE:
        for dtype in (_FP32, _BF16):
            arguments = _LARGE_ARGUMENTS.get(op, _NONE)
            yield Case(op, name, dtype, shape, *_ERRORS[op, dtype], arguments)


def cases(op: str | None = None) -> Iterator[Case]:
    """Yield all cases, or those of one op."""
    for case_op, name, shape, arguments in _SHAPES:
        if op in (None, case_op):
            for dtype in (_FP32, _BF16):
                value_error, gradient_error = _ERRORS[case_op, dtype]
                yield Case(case_op, name, dtype, shape, value_error, gradient_error, arguments)


def _upstream(value: Tensor) -> Tensor:
    """Return an upstream gradient that is not 1, so that a backend that ignores it fails.

    It is the same for every type of value.
    """
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.5).to(_BF16).to(value.dtype)


def _layer_norm(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    *_, width = case.shape  # (..., hidden)
    x = 3 * torch.randn(case.shape, generator=generator) + 1
    weight, bias = torch.randn(2, width, generator=generator)
    return x.to(case.dtype), weight.to(case.dtype), bias.to(case.dtype)


def _rms_norm(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    return _layer_norm(case, generator)[:2]


def _gelu(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    return ((4 * torch.randn(case.shape, generator=generator)).to(case.dtype),)


def _swiglu(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    return ((3 * torch.randn(case.shape, generator=generator)).to(case.dtype),)


def _cross_entropy(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens, vocabulary = case.shape
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


def _attention(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    batch, heads, queries, keys, dim = case.shape
    q = torch.randn(batch, heads, queries, dim, generator=generator)
    k, v = torch.randn(2, batch, heads, keys, dim, generator=generator)
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
    "gelu": _gelu,
    "swiglu": _swiglu,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
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

# (op, type) -> allowed error of the value and of the gradients.
_ERRORS = {
    ("layer_norm", _FP32): (2e-6, 2e-6),
    ("layer_norm", _BF16): (4e-3, 4e-3),
    ("rms_norm", _FP32): (2e-6, 2e-6),
    ("rms_norm", _BF16): (4e-3, 4e-3),
    ("gelu", _FP32): (1e-6, 1e-6),
    ("gelu", _BF16): (4e-3, 8e-3),
    ("swiglu", _FP32): (1e-6, 1e-6),
    # torch rounds silu(gate) too.
    ("swiglu", _BF16): (8e-3, 8e-3),
    ("cross_entropy", _FP32): (1e-6, 2e-6),
    # The loss is fp32 in both backends; the gradient is rounded twice.
    ("cross_entropy", _BF16): (1e-6, 6e-3),
    ("linear_cross_entropy", _FP32): (1e-6, 4e-6),
    # The logits are rounded.
    ("linear_cross_entropy", _BF16): (4e-3, 2e-2),
    ("attention", _FP32): (2e-6, 4e-6),
    ("attention", _BF16): (2e-2, 2e-2),
}

# Errors allowed for torch's own fp32 kernels where they are less exact than this project's: over 50,257
# columns the gradient of torch's cross-entropy is 3.9e-6 off on a processor without AVX-512.
_TORCH_ERRORS = {("cross_entropy", _FP32): (1e-6, 6e-6)}

_NONE: Mapping[str, Any] = {}
_LARGE_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "gelu": {"approximate": "tanh"},
    "linear_cross_entropy": {"vocabulary": 50257},
}
_LARGE: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("layer_norm", "1,024 x 768", (1024, 768)),
    ("rms_norm", "1,024 x 768", (1024, 768)),
    ("gelu", "1,024 x 3,072", (1024, 3072)),
    ("swiglu", "1,024 x 4,096", (1024, 4096)),
    ("cross_entropy", "512 x 2,048", (512, 2048)),
    ("cross_entropy", "1,024 x 50,304", (1024, 50304)),
    ("linear_cross_entropy", "1,024 x 768 x 50,257", (1024, 768, 50304, 50257)),
    ("attention", "8 x 6 x 256 x 64", (8, 6, 256, 256, 64)),
    ("attention", "1 x 12 x 1,024 x 64", (1, 12, 1024, 1024, 64)),
)
_SHAPES: tuple[tuple[str, str, tuple[int, ...], Mapping[str, Any]], ...] = (
    ("layer_norm", "small", (3, 5, 64), _NONE),
    ("layer_norm", "odd", (7, 129), {"eps": 1e-3}),
    # The weight's gradient is a sum over 1,024 rows.
    ("layer_norm", "rows", (1024, 96), _NONE),
    ("rms_norm", "small", (3, 5, 64), _NONE),
    ("rms_norm", "odd", (7, 129), {"eps": 1e-3}),
    ("rms_norm", "rows", (1024, 96), _NONE),
    ("gelu", "exact", (33, 65), _NONE),
    ("gelu", "tanh", (33, 65), {"approximate": "tanh"}),
    ("gelu", "threads", (90, 513), {"approximate": "tanh"}),
    ("swiglu", "small", (3, 5, 64), _NONE),
    ("swiglu", "odd", (33, 130), _NONE),
    ("swiglu", "threads", (90, 514), _NONE),
    ("cross_entropy", "one token", (1, 2), _NONE),
    ("cross_entropy", "one word", (3, 1), _NONE),
    ("cross_entropy", "odd", (5, 1009), _NONE),
    ("cross_entropy", "GPT-2", (4, 50257), _NONE),
    ("cross_entropy", "threads", (96, 2053), _NONE),
    ("cross_entropy", "some ignored", (7, 130), _NONE),
    ("cross_entropy", "all ignored", (4, 33), _NONE),
    ("cross_entropy", "ignore index 0", (6, 33), {"ignore_index": 0}),
    ("cross_entropy", "huge", (4, 300), _NONE),
    ("cross_entropy", "masked", (4, 64), _NONE),
    ("cross_entropy", "masked target", (4, 64), _NONE),
    ("cross_entropy", "all masked", (4, 64), _NONE),
    ("cross_entropy", "infinite", (4, 64), _NONE),
    ("cross_entropy", "not a number", (4, 64), _NONE),
    ("linear_cross_entropy", "padded", (40, 24, 384, 301), {"vocabulary": 301}),
    ("linear_cross_entropy", "full", (7, 16, 128, 128), {"vocabulary": 128}),
    ("linear_cross_entropy", "some ignored", (9, 16, 128, 65), {"vocabulary": 65}),
    ("linear_cross_entropy", "all ignored", (9, 16, 128, 65), {"vocabulary": 65}),
    ("attention", "small", (2, 3, 16, 16, 8), _NONE),
    ("attention", "one", (1, 1, 1, 1, 4), _NONE),
    # Longer than a block, and not a multiple of it.
    ("attention", "blocks", (1, 2, 300, 300, 16), _NONE),
    ("attention", "both ways", (1, 2, 40, 40, 16), {"causal": False}),
    # Fewer queries than keys.
    ("attention", "cached", (2, 2, 3, 20, 8), _NONE),
    ("attention", "cached blocks", (1, 2, 150, 190, 8), _NONE),
)
