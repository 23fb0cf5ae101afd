"""The same figures for Hugging Face's transformers: `generate` with a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.field import timed

PROMPT, NEW, ROUNDS = 32, 64, 2
Now = Callable[[], float]


def figures(only: str, clock: Now = time.perf_counter) -> Iterator[dict[str, Any]]:
    """Yield each figure whose name contains `only`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        torch.manual_seed(1)
        model = GPT2LMHeadModel(GPT2Config()).to(dtype).eval()
        for texts in (1, 8):
            figure = f"decode {texts} {name}"
            if only in figure:
                yield {
                    "figure": figure,
                    "peer": "transformers",
                    "tokens_per_second": decode(model, texts, clock),
                }
        if only in (figure := f"prefill 512 {name}"):
            seconds = generate(model, torch.randint(0, 50257, (1, 512)), 1, clock)
            yield {"figure": figure, "peer": "transformers", "tokens_per_second": 512 / seconds}


def decode(model: Any, texts: int, clock: Now) -> float:
    """Return tokens per second after the first token of each text."""
    ids = torch.randint(0, 50257, (texts, PROMPT))
    first = generate(model, ids, 1, clock)
    return texts * (NEW - 1) / (generate(model, ids, NEW, clock) - first)


def generate(model: Any, ids: torch.Tensor, new: int, clock: Now) -> float:
    """Return the least seconds in which so many tokens are generated."""
    return min(timed(lambda: exactly(model, ids, new), clock) for _ in range(ROUNDS))


@torch.no_grad()
def exactly(model: Any, ids: torch.Tensor, new: int, **more: str) -> object:
    """Generate this number of tokens, the most likely ones."""
    exact = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **exact, **more)
