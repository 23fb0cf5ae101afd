"""The named model sizes. Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from trainer.config.families import FAMILIES
from trainer.config.model import ModelConfig as ModelConfig

GPT2_VOCAB = 50257
# GPT-2's and nine special tokens.
GLM_VOCAB = 50266


def _gpt(layers: int, hidden: int, heads: int, sequence: int, init_std: float = 0.02) -> ModelConfig:
    return ModelConfig(
        layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocab=GPT2_VOCAB, init_std=init_std
    )


def _glm(layers: int, hidden: int, heads: int, positions: int) -> ModelConfig:
    return ModelConfig(
        "glm", layers, hidden, heads, sequence=512, positions=positions, vocab=GLM_VOCAB, dropout=0.1
    )


SIZES: dict[str, ModelConfig] = {
    # About 1.07 million parameters: trains in a minute on two CPU cores.
    "gpt-tiny": ModelConfig(),
    # The same as 124M: 117M is how the paper counted it.
    "gpt2-117M": _gpt(12, 768, 12, 1024),
    "gpt2-124M": _gpt(12, 768, 12, 1024),
    # The same as 355M, for the same reason.
    "gpt2-345M": _gpt(24, 1024, 16, 1024),
    "gpt2-355M": _gpt(24, 1024, 16, 1024),
    "gpt2-774M": _gpt(36, 1280, 20, 1024),
    "gpt2-1.5B": _gpt(48, 1600, 25, 1024),
    # One node of eight devices: 2 x 4 x 1.
    "gpt2-1536x16": _gpt(16, 1536, 16, 2048),
    "gpt2-1.3B": _gpt(24, 2048, 16, 1024),
    # Four nodes of eight devices: 2 x 4 x 4.
    "gpt2-2304x24": _gpt(24, 2304, 24, 2048),
    "gpt2-2.7B": _gpt(32, 2560, 32, 2048),
    "gpt2-3.7B": _gpt(32, 3072, 32, 2048),
    "gpt2-13B": _gpt(40, 5120, 40, 1024),
    "gpt2-52B": _gpt(64, 8192, 32, 1024),
    # GPT-3's sizes, with the deviation of their first weights.
    "gpt3-125M": _gpt(12, 768, 12, 2048),
    "gpt3-350M": _gpt(24, 1024, 16, 2048, 0.018),
    "gpt3-760M": _gpt(24, 1536, 16, 2048, 0.015),
    "gpt3-1.3B": _gpt(24, 2048, 16, 2048, 0.013),
    "gpt3-2.7B": _gpt(32, 2560, 32, 2048, 0.011),
    "gpt3-6.7B": _gpt(32, 4096, 32, 2048, 0.009),
    "gpt3-13B": _gpt(40, 5120, 40, 2048, 0.008),
    "gpt3-175B": _gpt(96, 12288, 96, 2048, 0.005),
    "glm-tiny": ModelConfig("glm"),
    "glm-base": _glm(12, 768, 12, 512),
    "glm-large": _glm(24, 1024, 16, 512),
    "glm-10B": _glm(48, 4096, 64, 1024),
    **FAMILIES,
}


_BY_LETTERS = {name.casefold(): name for name in SIZES}


def size_name(name: object) -> str:
    """Return the size that a text names in large or small letters; "" if there is none."""
    return _BY_LETTERS.get(str(name).casefold(), "")


def sized(name: str, **changes: object) -> ModelConfig:
    """Return a named size with some of its fields changed."""
    return replace(SIZES[name], **changes)  # type: ignore[arg-type]
