"""How the next token is drawn from what a model thinks of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 or top_k 1 takes the likeliest; top_k 0 draws from all."""

    max_tokens: int = 64
    """In a text that goes on, and in each blank that is filled in."""
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 1234

    def check(self) -> None:
        faults = []
        if self.max_tokens < 1:
            faults.append(f"--max-tokens is {self.max_tokens}; at least 1 is needed")
        if not 0 <= self.temperature <= 100:
            faults.append(f"--temperature is {self.temperature}; 0 to 100 is needed")
        if self.top_k < 0:
            faults.append(f"--top-k is {self.top_k}; at least 0 is needed")
        if faults:
            raise InputError("\n".join(faults))

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def pick(self, logits: Tensor, generator: torch.Generator) -> int:
        """An id, from the logits of all of them."""
        if self.temperature == 0 or self.top_k == 1:
            return int(logits.argmax().item())
        logits = logits / self.temperature
        if 0 < self.top_k < len(logits):
            least = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < least, float("-inf"))
        return int(torch.multinomial(torch.softmax(logits, dim=0), 1, generator=generator).item())
