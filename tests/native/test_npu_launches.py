"""What a card must do for each op of the NPU path: kernels that are launched, and tensors that are copied.

CANN's kernels count as one launch each, forward and backward; a tensor with gaps that one of them gets is copied before
it. Everything else is counted by torch's dispatcher. Masks and the like that an op makes once are not counted.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from native import paging
from native.npu import layer_norm as npu_layer_norm
from native.npu import library
from native.update import AdamWStep
from tests.support.npu_node import documented_kernels as documented

# Ops of torch that start nothing on a device.
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty_strided", "scalar_tensor", "detach", "alias", "lift_fresh",
    "view", "_unsafe_view", "_reshape_alias", "transpose", "t", "permute", "slice", "select", "split", "unbind",
    "split_with_sizes", "unsqueeze", "squeeze", "expand", "as_strided", "is_same_size", "_local_scalar_dense",
}  # fmt: skip
COPIES = {"clone", "copy_", "_to_copy", "cat", "stack", "index_select", "contiguous", "repeat"}


class Card(TorchDispatchMode):
    """Counts what torch and CANN's kernels start."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name not in FREE:
            self.counted["copy" if name in COPIES else "launch"] += 1
        return func(*args, **(kwargs or {}))

    def kernel(self, name: str) -> Callable[..., Any]:
        """Return a kernel of the stand-in that counts as one launch in each direction."""

        def call(*given: Any, **named: Any) -> Any:
            leaves, form = tree_flatten((given, named))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

            def run(*own: Tensor) -> list[Any]:
                left = iter(own)
                filled = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                words, options = tree_unflatten(filled, form)
                made = getattr(documented, name)(*words, **options)
                self.out_form = tree_flatten(made)
                return self.out_form[0]

            # Products take a transposed matrix as it lies (torch_npu-npu_grouped_matmul.md).
            products = name == "npu_grouped_matmul"
            self.note([x for x in tensors if not (products and x.dim() > 1 and x.mT.is_contiguous())])
            made = _Kernel.apply(self, run, *tensors)
            parts = iter(made)
            whole, out_form = self.out_form
            return tree_unflatten(
                [next(parts) if isinstance(part, Tensor) else part for part in whole], out_form
            )

        return call

    def note(self, tensors: list[Tensor | None]) -> None:
        self.counted["launch"] += 1
        self.counted["copy"] += sum(not x.is_contiguous() for x in tensors if x is not None)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, card: Card, run: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        with _disable_current_modes(), torch.enable_grad():
            ctx.leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
            ctx.made = [part for part in run(*ctx.leaves) if isinstance(part, Tensor)]
        ctx.card = card
        ctx.set_materialize_grads(False)
        return tuple(part.detach() for part in ctx.made)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        pairs = zip(ctx.made, upstream, strict=True)
        outs, slopes = zip(*((out, given) for out, given in pairs if given is not None), strict=True)
        ctx.card.note(list(slopes))
        with _disable_current_modes():
            own = [part.contiguous() for part in torch.autograd.grad(outs, wanted, slopes)]
        found = dict(zip(map(id, wanted), own, strict=True))
        return None, None, *(found.get(id(leaf)) for leaf in ctx.leaves)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    made = Card()
    names = [name for name in dir(documented) if name.startswith("npu_")]
    monkeypatch.setitem(
        sys.modules, "torch_npu", SimpleNamespace(**{name: made.kernel(name) for name in names})
    )
    monkeypatch.setattr(npu_layer_norm, "F", SimpleNamespace(layer_norm=made.kernel("layer_norm")))
    library.chips.cache_clear()
    yield made
    library.chips.cache_clear()


BATCH, ROWS, HEADS, GROUPS, SIZE, VOCABULARY = 2, 8, 4, 2, 16, 50
HIDDEN = HEADS * SIZE


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, gradient: bool = True) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_(gradient)


def heads() -> tuple[Tensor, ...]:
    """Queries, keys and values as a model cuts them out of one product."""
    mixed = numbers(BATCH, ROWS, HEADS + 2 * GROUPS, SIZE)
    return tuple(part.transpose(1, 2) for part in mixed.split_with_sizes((HEADS, GROUPS, GROUPS), -2))


def turned() -> tuple[Tensor, ...]:
    """Queries, keys and values after rotary positions, which leave tensors of their own, row by row."""
    return tuple(numbers(BATCH, ROWS, count, SIZE).transpose(1, 2) for count in (HEADS, GROUPS, GROUPS))


def angles() -> tuple[Tensor, Tensor]:
    turns = torch.rand(1, 1, ROWS, SIZE // 2)
    return turns.cos(), turns.sin()


def weight(size: int = HIDDEN) -> Tensor:
    return numbers(size, dtype=torch.float32)


def rows() -> Tensor:
    return numbers(BATCH, ROWS, HIDDEN)


# An op, its inputs, and launches and copies forward, then backward. A figure that rises is work that every step gets.
COUNTS = {
    "layer_norm, fp32 weight": ("layer_norm", lambda: (rows(), weight(), weight()), (1, 0), (1, 0)),
    "rms_norm, fp32 weight": ("rms_norm", lambda: (rows(), weight()), (1, 0), (1, 0)),
    "add_layer_norm, fp32 weight": (
        "add_layer_norm",
        lambda: (rows(), rows(), weight(), weight()),
        (2, 0),
        (2, 0),
    ),
    "add_rms_norm, fp32 weight": ("add_rms_norm", lambda: (rows(), rows(), weight()), (2, 0), (2, 0)),
    "add_rms_norm, own weight": ("add_rms_norm", lambda: (rows(), rows(), numbers(HIDDEN)), (1, 0), (2, 1)),
    "gelu": ("gelu", lambda: (rows(),), (1, 0), (1, 0)),
    "bias_gelu": ("bias_gelu", lambda: (rows(), weight()), (2, 1), (2, 1)),
    "swiglu": ("swiglu", lambda: (rows(),), (1, 0), (1, 0)),
    # Angles are widened once for queries and keys; both are cut out of a product, with gaps between rows.
    "rotary": ("rotary", lambda: (*heads()[:2], *angles()), (2, 6), (3, 4)),
    "attention, cut out of a product": ("attention", heads, (1, 3), (1, 0)),
    "attention, after rotary": ("attention", turned, (1, 0), (1, 0)),
    "cross_entropy": (
        "cross_entropy",
        lambda: (numbers(ROWS, VOCABULARY), torch.arange(ROWS)),
        (7, 1),
        (3, 1),
    ),
    "grouped_linear": (
        "grouped_linear",
        lambda: (numbers(ROWS, 16), numbers(2, 12, 16), torch.tensor([3, 5])),
        (2, 0),
        (2, 0),
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_launches_and_copies_of_an_op(name: str, card: Card) -> None:
    op, inputs, forward, backward = COUNTS[name]
    function = getattr(importlib.import_module(f"native.npu.{op}"), op)
    given = inputs()
    # What is made once, such as masks, is made here.
    function(*given)
    card.counted.clear()
    with card:
        made = function(*given)
    found = (card.counted["launch"], card.counted["copy"])
    outs = [out for out in (made if isinstance(made, tuple) else (made,)) if out.requires_grad]
    upstream = [torch.ones_like(out) for out in outs]
    card.counted.clear()
    with card:
        torch.autograd.grad(outs, [x for x in given if x.requires_grad], upstream)
    assert (found, (card.counted["launch"], card.counted["copy"])) == (forward, backward)


def test_the_result_of_attention_is_joined_without_a_copy(card: Card) -> None:
    """Attention row by row: its heads are one tensor of rows for the matrix behind it."""
    from native.npu.attention import attention

    out = attention(*turned())
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


def test_launches_of_an_update_and_of_a_decoded_token(card: Card) -> None:
    from native.npu.adamw import adamw
    from native.npu.paged_attention import paged_attention

    parts = [[numbers(3, 4, dtype=torch.float32, gradient=False) for _ in range(5)] for _ in range(4)]
    none = [None] * 5
    with card:
        adamw(AdamWStep(*parts, none, [0.1] * 5, step=1, rate=0.1, betas=(0.9, 0.9), eps=1e-8))
    assert (card.counted["launch"], card.counted["copy"]) == (5, 0), "one call for each tensor"
    card.counted.clear()
    pages = [numbers(3, paging.PAGE, GROUPS, SIZE, gradient=False) for _ in range(2)]
    tables, first, last = (
        torch.zeros(1, 2, dtype=torch.int32),
        *torch.tensor([[0], [20]], dtype=torch.int32),
    )
    q, reach = numbers(1, HEADS, SIZE, gradient=False), paging.Reach(tables, first, last, (20,))
    with card:
        paged_attention(q, *pages, reach)
    assert (card.counted["launch"], card.counted["copy"]) == (1, 0)


def test_a_copy_that_is_added_is_counted(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    from native.npu import attention

    given = turned()
    monkeypatch.setattr(attention.library, "by_rows", lambda x: False)
    attention.attention(*given)
    card.counted.clear()
    with card:
        attention.attention(*given)
    assert card.counted["copy"] == 3, "the layout BNSD transposes queries, keys and values"
