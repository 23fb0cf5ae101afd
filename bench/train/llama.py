"""Peers of bench/train in the form of Llama: one written in the common way, and transformers' LlamaForCausalLM.

Like bench/train/peers.py, this module imports nothing of this repository except the description of the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.train.spec import rows


class Attention(nn.Module):
    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, self.heads, self.groups = model["hidden"], model["heads"], model["groups"]
        self.size = hidden // self.heads
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.groups) * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        each = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = each.split((self.heads, self.groups, self.groups), 1)
        mixed = F.scaled_dot_product_attention(
            turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True, enable_gqa=self.heads != self.groups
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys rotated by their positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, eps = model["hidden"], model["eps"]
        self.norm_1, self.attention = nn.RMSNorm(hidden, eps), Attention(model)
        self.norm_2, self.feed_forward = nn.RMSNorm(hidden, eps), FeedForward(hidden, model["inner"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.feed_forward(self.norm_2(x))


class Eager(nn.Module):
    """Llama as an engineer writes it by hand; forward also computes the loss, so that a compiler sees all of it.

    Its parameters have the trainer's names, so that weights can be copied in both directions.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, size = model["hidden"], model["hidden"] // model["heads"]
        self.tokens = nn.Embedding(rows(model["vocab"]), hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model["layers"]))
        self.norm = nn.RMSNorm(hidden, model["eps"])
        slow = 1.0 / model["rope_base"] ** (torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(model["sequence"]), slow).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                shrink = (2 * model["layers"]) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=model["init_std"] / shrink)

    def forward(self, batch: Tensor) -> Tensor:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        x = self.tokens(tokens)
        cos, sin = (table[: tokens.shape[1]] for table in (self.cos, self.sin))
        if torch.is_autocast_enabled("cpu"):
            # Use the type of queries and keys, like transformers: otherwise both would become fp32.
            cos, sin = cos.bfloat16(), sin.bfloat16()
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class HuggingFace(nn.Module):
    """transformers' LlamaForCausalLM with torch's attention."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=rows(model["vocab"]),
            max_position_embeddings=model["sequence"],
            hidden_size=model["hidden"],
            intermediate_size=model["inner"],
            num_hidden_layers=model["layers"],
            num_attention_heads=model["heads"],
            num_key_value_heads=model["groups"],
            rms_norm_eps=model["eps"],
            rope_parameters={"rope_type": "default", "rope_theta": model["rope_base"]},
            tie_word_embeddings=True,
            attn_implementation="sdpa",
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, batch: Tensor) -> Tensor:
        # The model's own shift by one would copy the logits, so shift the targets here.
        tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, shift_labels=targets).loss
        return loss
