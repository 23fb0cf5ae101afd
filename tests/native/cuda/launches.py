"""Calls of every op at the sizes of a training, whose launches are compiled without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from native.cuda.adamw import adamw
from native.cuda.cross_entropy import cross_entropy
from native.cuda.dropout_add import dropout_add
from native.cuda.gelu import bias_gelu, gelu
from native.cuda.grouped_linear import grouped_linear
from native.cuda.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from native.cuda.paged_attention import paged_attention, store_in_pages
from native.cuda.rotary import rotary
from native.cuda.square_sum import square_sum
from native.cuda.swiglu import swiglu
from native.cuda.vocabulary_cross_entropy import vocabulary_cross_entropy
from native.paging import Reach
from native.update import AdamWStep
from native.vocabulary import VocabularyPart

TYPES = (torch.bfloat16, torch.float32)
# Hidden sizes of a small GPT and of the largest models.
WIDTHS = (768, 4096, 16384)


def calls(types: Sequence[torch.dtype] = TYPES, widths: Sequence[int] = WIDTHS) -> None:
    """Run each op forward and backward."""
    for dtype in types:
        for width in widths:
            x = torch.randn(32, width, dtype=dtype, requires_grad=True)
            weight, bias = torch.ones(2, width, requires_grad=True).unbind()
            layer_norm(x, weight, bias).sum().backward()
            rms_norm(x, weight).sum().backward()
            sum(each.sum() for each in add_layer_norm(x, x, weight, bias)).backward()
            sum(each.sum() for each in add_rms_norm(x, x, weight)).backward()
            bias_gelu(x, bias, "tanh").sum().backward()
            for added in (None, bias, bias[: width - 2]):
                own = x if added is None else x[:, : len(added)]
                dropout_add(own, own, added, torch.tensor([1 << 40, 3]), 0.1).sum().backward()
        x = torch.randn(32, 768, dtype=dtype, requires_grad=True)
        gelu(x, "tanh").sum().backward()
        gelu(x).sum().backward()
        bias_gelu(x, bias[:768]).sum().backward()
        swiglu(x).sum().backward()
        for heads, groups, dim, half in ((12, 12, 64, 32), (32, 8, 128, 64), (8, 2, 96, 16)):
            q, k = torch.randn(2, heads, 4, dim, dtype=dtype), torch.randn(2, groups, 4, dim, dtype=dtype)
            angles = torch.ones(1, 1, 4, half)
            for interleaved in (False, True):
                rotary(q.requires_grad_(), k, angles, angles, interleaved)[0].sum().backward()
        targets = torch.zeros(8, dtype=torch.int64)
        cross_entropy(torch.randn(8, 50304, dtype=dtype, requires_grad=True), targets).backward()
        logits = torch.randn(8, 25152, dtype=dtype, requires_grad=True)
        vocabulary_cross_entropy(logits, targets, VocabularyPart(50304, 0, 25152), 0.1).backward()
        matrices = torch.randn(4, 2048, 768, dtype=dtype, requires_grad=True)
        grouped_linear(x, matrices, torch.tensor([8, 0, 20, 4])).sum().backward()
        square_sum([x.detach()])
        for heads, groups, size in ((12, 12, 64), (32, 8, 128), (8, 1, 256)):
            q, pages = torch.ones(2, heads, size, dtype=dtype), torch.ones(9, 16, groups, size, dtype=dtype)
            tables, places = torch.zeros(2, 20, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
            paged_attention(q, pages, pages, Reach(tables, places, places, (300, 40)))
            paged_attention(q, pages, pages, Reach(tables[:, :9], places, places, (100, 40)))
            store_in_pages(pages, pages, q[:, :groups], q[:, :groups], places)
        held, average, square = torch.ones(3, 4096).unbind()
        low = torch.ones(4096, dtype=dtype) if dtype != torch.float32 else None
        gradient = held.to(dtype)
        numbers = ([0.1], 1, 1e-3, (0.9, 0.95), 1e-8)
        adamw(AdamWStep([held], [gradient], [average], [square], [low], *numbers))
        rest = torch.zeros(4096, dtype=torch.int16)
        whole = ([held.bfloat16()], [gradient], [average], [square], [None])
        adamw(AdamWStep(*whole, *numbers, remainders=[rest]))
