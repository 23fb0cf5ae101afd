"""The step `ops`: time of the device and of the host, and starts of work, next to plain torch, its compiler and Liger.

Both directions of each op at the shapes of a model with 1.3 billion parameters, in bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

import native
from bench.hardware.step import emit, part
from bench.train.activities import spent
from bench.train.op_peers import peers_of
from native.update import AdamWStep
from tests.support import op_cases as cases

TABLE = "ops, both directions"
BF16 = torch.bfloat16
# Rows and width.
SIZES = {"cuda": (8192, 2048), "npu": (8192, 2048), "cpu": (64, 64)}
ROUNDS = 10
# The largest error of another project's gradients in bf16.
FAR = 0.05
Gradients = tuple[Tensor | None, ...]
# Layers and width of the model whose weights are updated.
UPDATED = {"cuda": (24, 1024), "npu": (24, 1024), "cpu": (2, 64)}


@dataclass(frozen=True)
class Work:
    """One op and its inputs; those in floating point have a gradient."""

    op: str
    inputs: Sequence[Tensor]
    arguments: dict[str, object] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    """What `peers_of` asks for."""


def works(device: str) -> list[Work]:
    """Return the ops that are measured."""
    rows, width = SIZES[device]
    words, rest = (50304, 50257) if rows > 64 else (384, 301)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=device) * scale).to(BF16)

    x, weight, bias = drawn(rows, width), torch.ones(width, device=device), torch.zeros(width, device=device)
    tanh: dict[str, object] = {"approximate": "tanh"}
    targets = torch.randint(0, rest, (rows,), device=device)
    heads = drawn(8, width // 32, rows // 8, 32)
    angles = torch.rand(1, 1, rows // 8, 16, device=device)
    state, sizes = torch.tensor([1, 2], device=device), torch.full((8,), rows // 8, device=device)
    return [
        Work("layer_norm", (x, weight, bias), shape=(rows, width)),
        Work("rms_norm", (x, weight), shape=(rows, width)),
        Work("add_layer_norm", (x, x.clone(), weight, bias), shape=(rows, width)),
        Work("add_rms_norm", (x, x.clone(), weight), shape=(rows, width)),
        Work("gelu", (drawn(rows, 4 * width),), tanh),
        Work("bias_gelu", (drawn(rows, 4 * width), drawn(4 * width)), tanh),
        Work("swiglu", (drawn(rows, 5 * width + width // 2),)),
        Work("dropout_add", (x, x.clone(), drawn(width), state), {"probability": 0.1}),
        Work("rotary", (heads, heads.clone(), angles.cos(), angles.sin())),
        Work("cross_entropy", (drawn(rows, words), targets)),
        Work("linear_cross_entropy", (x, drawn(words, width, scale=0.02), targets), {"vocabulary": rest}),
        Work("attention", tuple(drawn(8, width // 64, rows // 8, 64) for _ in range(3))),
        Work("grouped_linear", (x, drawn(8, 4 * width, width, scale=0.02), sizes)),
    ]


def both_ways(run: Callable[..., object], work: Work, *, copies: bool = False) -> Callable[[], Gradients]:
    """Return a function that calls an op and computes the gradients of its inputs.

    copies: keep the inputs, which some ops overwrite, and draw the gradients of the results.
    """
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in work.inputs]
    if work.op == "rotary":
        leaves[2:] = work.inputs[2:]
    wanted = [x for x in leaves if x.requires_grad]

    def once() -> Gradients:
        # In a model an op's inputs are not leaves.
        given = (x.clone() if copies else x.view_as(x) for x in leaves)
        value = run(*given, **work.arguments)
        values = [x for x in (value if isinstance(value, tuple) else (value,)) if x.requires_grad]
        slopes = [torch.rand_like(x) if copies or not x.dim() else x.detach() for x in values]
        return torch.autograd.grad(values, wanted, slopes, allow_unused=True)

    return once


def check(run: Callable[[], Gradients], plain: Callable[[], Gradients]) -> None:
    """Raise an error if a function of another project gives other gradients than plain torch."""
    found = []
    for each in (run, plain):
        torch.manual_seed(1)
        found.append(each())
    pairs = [(own, right) for own, right in zip(*found, strict=True) if own is not None and right is not None]
    worst = max(cases.error(own, right) for own, right in pairs)
    if worst > FAR:
        raise ArithmeticError(f"off by {worst:.1e} of the largest number, not measured")


def show(op: str, kind: str, device: str, run: Callable[[], object]) -> None:
    """Measure one function and print its row."""
    with part(TABLE, op=op, by=kind):
        host, found = spent(device, run, ROUNDS)
        cells = {"device us": found.busy / ROUNDS * 1e6 or None, "host us": host * 1e6}
        counts = {"activities": found.count / ROUNDS or None, "starts": found.starts / ROUNDS or None}
        emit(TABLE, op=op, by=kind, **cells, **counts, waits=found.waits / ROUNDS or None)


def updates(device: str) -> None:
    """Measure the update of all weights and the norm of their gradients."""
    layers, width = UPDATED[device]
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    shapes = [*matrices, *[(width,)] * (12 * layers), (50304 if layers > 2 else 384, width)]
    held = [torch.randn(shape, device=device) for shape in shapes]
    gradients, averages, squares = (
        [fill(x) for x in held] for fill in (torch.randn_like, torch.zeros_like, torch.zeros_like)
    )
    update = AdamWStep(
        held,
        gradients,
        averages,
        squares,
        [x.to(BF16) for x in held],
        [0.1] * len(held),
        10,
        1e-4,
        (0.9, 0.95),
        1e-8,
    )
    for kind, ops in (("ours", native.choose(device)), ("plain torch", native.choose(device, "reference"))):
        show("adamw", kind, device, partial(ops.adamw, update))
        show("square_sum", kind, device, partial(ops.square_sum, gradients))
    weights = [torch.nn.Parameter(x) for x in held]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    fused = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.95), fused=True)
    show("adamw", "torch fused, no bf16 copy", device, fused.step)
    show("square_sum", "torch foreach", device, lambda: torch.stack(torch._foreach_norm(gradients)).norm())


def main() -> None:
    device = sys.argv[1]
    ours, plain = native.choose(device), native.choose(device, "reference")
    measured = works(device)
    for work in measured:
        show(work.op, "ours", device, both_ways(getattr(ours, work.op), work))
        show(work.op, "plain torch", device, both_ways(getattr(plain, work.op), work))
        for name, run in peers_of(work.op, work.shape).items():
            with part(TABLE, op=work.op, by=name):
                theirs, right = (
                    both_ways(each, work, copies=True) for each in (run, getattr(plain, work.op))
                )
                check(theirs, right)
                show(work.op, name, device, both_ways(run, work))
    updates(device)
    # The compiler takes seconds for each op, so it comes last.
    for work in measured:
        torch.compiler.reset()
        compiled = torch.compile(getattr(plain, work.op), dynamic=False)
        show(work.op, "torch.compile", device, both_ways(compiled, work))


if __name__ == "__main__":
    main()
