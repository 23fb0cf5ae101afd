"""Rotary positions: the angles of each model family and scaling, and the rotation of queries and keys."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

import native
from trainer.config.model import ModelConfig
from trainer.config.rope import RopeConfig
from trainer.model.attention.sight import Sight
from trainer.parallel.tensor import ALONE, Parallel

# Cosines and sines of rotary positions, each (batch or 1, 1, sequence, rotated numbers / 2).
Turns = tuple[Tensor, Tensor]


def sight_of(
    config: ModelConfig,
    at: Tensor,
    documents: Tensor | None = None,
    context: Parallel = ALONE,
    aux_weight: float | Tensor = 0.0,
    length: int = 0,
) -> Sight:
    """Return what the blocks share for tokens at positions `at`, (sequence,) or (batch, sequence).

    `documents`: as in `native.Mask`. `length`: that of the samples; 0: a decoder's cache hides what a window does.
    """
    final = length or config.sequence
    turning = turns(at, config, final) if config.rotary else None
    window = config.window if config.window < length else 0
    every = Sight(native.Mask(0 if config.windowed else window, documents), turning, context, aux_weight)
    if not config.windowed:
        return every
    if config.rotary and config.window_base:
        turning = turns(at, config.decided(), final)
    return replace(every, windowed=replace(every, mask=native.Mask(window, documents), turns=turning))


def turns(at: Tensor, config: ModelConfig, length: int = 0) -> Turns:
    """Return cosines and sines for the positions `at`, (sequence,) or (batch, sequence).

    `length`: the final length of the sequences, which dynamic scaling depends on; 0: the largest position.
    """
    rope = config.rope
    if rope.scaling == "dynamic" and not length:
        length = int(at.max().item()) + 1
    angles = at.float().unsqueeze(-1) * frequencies(
        rope, config.rotary_size, config.context, length, at.device
    )
    angles = angles.view(-1, 1, *angles.shape[-2:])
    cosines, sines = angles.cos(), angles.sin()
    if rope.scaling == "yarn":
        factor = rope.attention or 0.1 * math.log(rope.factor) + 1.0
        return cosines * factor, sines * factor
    return cosines, sines


def frequencies(rope: RopeConfig, size: int, context: int, length: int, device: torch.device) -> Tensor:
    """Return the rotation angle per position of each pair, (size / 2,)."""
    original = rope.original or context
    base = rope.base
    if rope.scaling == "dynamic" and length > original:
        base *= (rope.factor * length / original - (rope.factor - 1)) ** (size / (size - 2))
    pairs = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    plain = torch.exp(pairs * (-math.log(base) / size))
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        # How many full turns a pair makes over the original positions.
        turns_made = plain * (original / (2 * math.pi))
        fast = ((turns_made - rope.low_freq) / (rope.high_freq - rope.low_freq)).clamp(0.0, 1.0)
        return plain * (fast + (1.0 - fast) / rope.factor)
    if rope.scaling == "yarn":
        fast = _unscaled_part(rope, size, original, device)
        return plain * (fast + (1.0 - fast) / rope.factor)
    return plain


def _unscaled_part(rope: RopeConfig, size: int, original: int, device: torch.device) -> Tensor:
    """Return for each pair 1 if yarn keeps its frequency, 0 if yarn divides it by the factor, or a value between."""

    def pair_of(turns_made: float) -> float:
        return size * math.log(original / (turns_made * 2 * math.pi)) / (2 * math.log(rope.base))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first if last != first else 0.001
    ramp = (torch.arange(size // 2, device=device, dtype=torch.float32) - first) / width
    return 1.0 - ramp.clamp(0.0, 1.0)
