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

from native.masks import Dropout, Mask

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
    """The result of an op for a case: its value and the gradient of every input that has one.

    Several values are joined in one row.
    """

    value: Tensor
    gradients: tuple[Tensor, ...]


def run(case: Case, op: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Result:
    """Return value and gradients of `op`, which gets copies of the inputs."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    # A backend may overwrite its inputs, so each call gets copies that are not leaves.
    value = op(*(x.clone() if x.requires_grad else x for x in leaves), **case.arguments)
    values = value if isinstance(value, tuple) else (value,)
    torch.autograd.backward(values, [_upstream(each, seed) for seed, each in enumerate(values, 1)])
    gradients = tuple(x.grad for x in leaves if x.grad is not None)
    return Result(values[0].detach() if len(values) == 1 else _joined(values), gradients)


def meaning(case: Case, reference: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Result:
    """Return the reference's result in fp64."""
    return run(case, reference, tuple(x.double() if x.is_floating_point() else x for x in inputs))


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected value; infinity if NaN and infinities differ.

    Where zero is expected everywhere, as for the gradient of a query that has one key, it is the largest difference.
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


def _joined(values: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([each.detach().flatten() for each in values])


def _upstream(value: Tensor, seed: int) -> Tensor:
    """Return an upstream gradient that is not 1, so that a backend that ignores it fails.

    It is the same for every type of value.
    """
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.5).to(_BF16).to(value.dtype)


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
    """Return rows with what the case's name says."""
    if case.name == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if case.name == "huge rows":
        return x * 1e15
    if case.name in _WRONG:
        x.view(-1)[3] = _WRONG[case.name]
    return x


def _dropout_add(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    x, residual = torch.randn(2, *case.shape, generator=generator).to(case.dtype)
    bias = torch.randn(case.shape[-1], generator=generator).to(case.dtype)
    # The counter's low word overflows within the tensor.
    return _edited(case, x), residual, bias, torch.tensor([0x123456789ABCDEF, (1 << 32) - 2])


def _rotary(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    batch, heads, groups, rows, dim, pairs = case.shape
    # As views of one projection.
    mixed = torch.randn(batch, rows, (heads + groups) * dim, generator=generator).to(case.dtype)
    q, k = (
        part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in mixed.split([heads * dim, groups * dim], -1)
    )
    angles = 6.3 * torch.rand(batch if case.name == "samples" else 1, 1, rows, pairs, generator=generator)
    return q, k, angles.cos(), angles.sin()


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
    ("add_layer_norm", _FP32): (2e-6, 2e-6),
    # The sum is rounded before its norm is computed.
    ("add_layer_norm", _BF16): (8e-3, 8e-3),
    ("add_rms_norm", _FP32): (2e-6, 2e-6),
    ("add_rms_norm", _BF16): (8e-3, 8e-3),
    ("gelu", _FP32): (1e-6, 1e-6),
    ("gelu", _BF16): (4e-3, 8e-3),
    ("bias_gelu", _FP32): (1e-6, 1e-6),
    # torch rounds the sum too.
    ("bias_gelu", _BF16): (8e-3, 1.2e-2),
    ("swiglu", _FP32): (1e-6, 1e-6),
    # torch rounds silu(gate) too.
    ("swiglu", _BF16): (8e-3, 8e-3),
    ("dropout_add", _FP32): (1e-6, 2e-6),
    ("dropout_add", _BF16): (4e-3, 4e-3),
    ("rotary", _FP32): (1e-6, 1e-6),
    # torch rounds cosines, sines and products too.
    ("rotary", _BF16): (1.2e-2, 1.2e-2),
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
_DROPOUT = Dropout(0.3, torch.tensor(-(2**61) + 12345), 2, 9)
# Rows of 150 keys in documents of several lengths.
_DOCUMENTS = torch.stack(
    [torch.arange(150) // 13, (torch.arange(150) > 63).long() + (torch.arange(150) > 128)]
)
_LARGE_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "gelu": {"approximate": "tanh"},
    "bias_gelu": {"approximate": "tanh"},
    "dropout_add": {"probability": 0.1},
    "linear_cross_entropy": {"vocabulary": 50257},
}
_NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
_LARGE: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    *((op, "1,024 x 768", (1024, 768)) for op in _NORMS),
    ("gelu", "1,024 x 3,072", (1024, 3072)),
    ("bias_gelu", "1,024 x 3,072", (1024, 3072)),
    ("swiglu", "1,024 x 4,096", (1024, 4096)),
    ("dropout_add", "1,024 x 768", (1024, 768)),
    ("rotary", "1 x 12 x 1,024 x 64", (1, 12, 12, 1024, 64, 32)),
    *((op, "2,048 x 2,048", (2048, 2048)) for op in (*_NORMS, "dropout_add")),
    ("gelu", "2,048 x 8,192", (2048, 8192)),
    ("bias_gelu", "2,048 x 8,192", (2048, 8192)),
    ("swiglu", "2,048 x 11,264", (2048, 11264)),
    ("rotary", "1 x 16 x 2,048 x 128", (1, 16, 16, 2048, 128, 64)),
    ("cross_entropy", "512 x 2,048", (512, 2048)),
    ("cross_entropy", "1,024 x 50,304", (1024, 50304)),
    ("linear_cross_entropy", "1,024 x 768 x 50,257", (1024, 768, 50304, 50257)),
    ("attention", "8 x 6 x 256 x 64", (8, 6, 256, 256, 64)),
    ("attention", "1 x 12 x 1,024 x 64", (1, 12, 1024, 1024, 64)),
    ("attention", "1 x 16 x 2,048 x 128", (1, 16, 2048, 2048, 128)),
)
_WRONG = {"a NaN": float("nan"), "an infinity": float("inf")}
_ROWS = (*_NORMS, "gelu", "bias_gelu", "swiglu")
_EDGES = {"empty": (0, 64), "transposed": (6, 5, 34), "huge rows": (3, 64), **dict.fromkeys(_WRONG, (3, 64))}
_SHAPES: tuple[tuple[str, str, tuple[int, ...], Mapping[str, Any]], ...] = (
    # torch's own exact GELU of infinity is not a number in fp32.
    *((op, name, shape, _LARGE_ARGUMENTS.get(op, _NONE)) for op in _ROWS for name, shape in _EDGES.items()),
    ("layer_norm", "small", (3, 5, 64), _NONE),
    ("layer_norm", "odd", (7, 129), {"eps": 1e-3}),
    # The weight's gradient is a sum over 1,024 rows.
    ("layer_norm", "rows", (1024, 96), _NONE),
    ("rms_norm", "small", (3, 5, 64), _NONE),
    ("rms_norm", "odd", (7, 129), {"eps": 1e-3}),
    ("rms_norm", "rows", (1024, 96), _NONE),
    ("add_layer_norm", "small", (3, 5, 64), _NONE),
    ("add_layer_norm", "odd", (7, 129), {"eps": 1e-3}),
    ("add_layer_norm", "rows", (1024, 96), _NONE),
    ("add_rms_norm", "small", (3, 5, 64), _NONE),
    ("add_rms_norm", "odd", (7, 129), {"eps": 1e-3}),
    ("add_rms_norm", "rows", (1024, 96), _NONE),
    ("gelu", "exact", (33, 65), _NONE),
    ("gelu", "tanh", (33, 65), {"approximate": "tanh"}),
    ("gelu", "threads", (90, 513), {"approximate": "tanh"}),
    ("bias_gelu", "exact", (33, 65), _NONE),
    ("bias_gelu", "tanh", (33, 65), {"approximate": "tanh"}),
    ("bias_gelu", "threads", (90, 513), {"approximate": "tanh"}),
    ("swiglu", "small", (3, 5, 64), _NONE),
    ("swiglu", "odd", (33, 130), _NONE),
    ("swiglu", "threads", (90, 514), _NONE),
    ("dropout_add", "small", (3, 5, 64), {"probability": 0.1}),
    ("dropout_add", "odd", (7, 1291), {"probability": 0.5}),
    ("dropout_add", "threads", (90, 514), {"probability": 0.1}),
    ("dropout_add", "transposed", (6, 5, 34), {"probability": 0.1}),
    ("dropout_add", "empty", (0, 64), {"probability": 0.1}),
    ("rotary", "small", (2, 3, 3, 5, 8, 4), _NONE),
    ("rotary", "partial", (2, 4, 2, 7, 13, 3), _NONE),
    ("rotary", "neighbours", (2, 4, 2, 7, 13, 3), {"interleaved": True}),
    ("rotary", "samples", (3, 2, 1, 5, 8, 4), _NONE),
    ("rotary", "threads", (2, 4, 4, 70, 32, 16), {"interleaved": True}),
    ("rotary", "empty", (2, 4, 4, 0, 32, 16), _NONE),
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
    ("attention", "window", (1, 2, 200, 200, 16), {"mask": Mask(70)}),
    ("attention", "window of two", (1, 1, 70, 70, 8), {"mask": Mask(2)}),
    ("attention", "documents", (2, 2, 150, 150, 8), {"mask": Mask(documents=_DOCUMENTS)}),
    ("attention", "documents, window, cached", (2, 1, 85, 150, 8), {"mask": Mask(40, _DOCUMENTS)}),
    ("attention", "source", (3, 2, 140, 140, 8), {"mask": Mask(source=torch.tensor([0, 65, 140]))}),
    ("attention", "groups", (2, 6, 90, 130, 24, 2), _NONE),
    ("attention", "dropout", (2, 2, 130, 130, 16), {"dropout": _DROPOUT}),
    (
        "attention",
        "dropout, documents, groups",
        (2, 4, 99, 150, 8, 1),
        {"mask": Mask(0, _DOCUMENTS), "dropout": _DROPOUT},
    ),
)
