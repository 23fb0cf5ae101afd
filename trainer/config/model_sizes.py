"""The named model sizes, with the figures of the published configurations. Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from trainer.config.model import ModelConfig as ModelConfig
from trainer.config.rope import RopeConfig

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


def _llama(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int = 128_256, sequence: int = 8192
) -> ModelConfig:
    """Return the shape that Llama, Mistral and Qwen share: root mean square, gates, rotary positions, no biases."""
    return ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        query_groups=groups,
        ffn=ffn,
        vocab=vocab,
        sequence=sequence,
        rotary=True,
        rope=RopeConfig(base=500_000.0),
        norm="rms",
        bias="none",
        tied=False,
        swiglu=True,
    )


def _llama_2(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> ModelConfig:
    return replace(_llama(layers, hidden, heads, groups, ffn, 32_000, 4096), rope=RopeConfig())


def _llama_3_1(model: ModelConfig, factor: float = 8.0, tied: bool = False) -> ModelConfig:
    """Return a model stretched from 8,192 to 131,072 positions."""
    rope = RopeConfig(500_000.0, scaling="llama3", factor=factor, original=8192)
    return replace(model, rope=rope, positions=131_072, tied=tied)


def _qwen_2(
    layers: int,
    hidden: int,
    heads: int,
    groups: int,
    ffn: int,
    vocab: int = 151_936,
    tied: bool = False,
    eps: float = 1e-6,
    positions: int = 131_072,
) -> ModelConfig:
    model = _llama(layers, hidden, heads, groups, ffn, vocab)
    rope = RopeConfig(1_000_000.0)
    return replace(model, rope=rope, bias="qkv", tied=tied, eps=eps, positions=positions)


def _qwen_3(layers: int, hidden: int, heads: int, groups: int, ffn: int, tied: bool = False) -> ModelConfig:
    model = _qwen_2(layers, hidden, heads, groups, ffn, tied=tied, positions=40_960)
    return replace(model, bias="none", head_dim=128, qk_norm=True)


def _neox(layers: int, hidden: int, heads: int, vocab: int = 50_304, activation: str = "gelu") -> ModelConfig:
    return ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        sequence=2048,
        rotary=True,
        rope=RopeConfig(part=0.25),
        parallel_residual=True,
        tied=False,
        vocab=vocab,
        activation=activation,
    )


def _starcoder_2(
    layers: int, hidden: int, heads: int, groups: int, base: float, tied: bool = True
) -> ModelConfig:
    return ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        query_groups=groups,
        sequence=4096,
        positions=16_384,
        rotary=True,
        rope=RopeConfig(base),
        window=4096,
        vocab=49_152,
        tied=tied,
        dropout=0.1,
        attention_dropout=0.1,
    )


def _glm_4(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    eps: float = 1e-5,
    sandwich: bool = True,
    bias: str = "qkv",
) -> ModelConfig:
    model = _llama(layers, hidden, heads, 2, ffn, 151_552)
    rope = RopeConfig(part=0.5, interleaved=True)
    return replace(
        model, rope=rope, head_dim=128, bias=bias, eps=eps, sandwich_norms=sandwich, positions=32_768
    )


_MISTRAL = _llama(32, 4096, 32, 8, 14_336, 32_000)

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
    "llama-tiny": _llama(4, 128, 4, 2, 384, 2048, 128),
    # GPT-2's 124M in Llama's form: as many layers, heads and tokens.
    "llama-124M": replace(_llama(12, 768, 12, 12, 2048, 50_257, 1024), tied=True, rope=RopeConfig()),
    "llama2-7B": _llama_2(32, 4096, 32, 32, 11_008),
    "llama2-13B": _llama_2(40, 5120, 40, 40, 13_824),
    "llama2-70B": _llama_2(80, 8192, 64, 8, 28_672),
    "llama3-8B": _llama(32, 4096, 32, 8, 14_336),
    "llama3-70B": _llama(80, 8192, 64, 8, 28_672),
    "llama3.1-8B": _llama_3_1(_llama(32, 4096, 32, 8, 14_336)),
    "llama3.1-70B": _llama_3_1(_llama(80, 8192, 64, 8, 28_672)),
    "llama3.1-405B": _llama_3_1(_llama(126, 16_384, 128, 8, 53_248)),
    "llama3.2-1B": _llama_3_1(_llama(16, 2048, 32, 8, 8192), 32.0, tied=True),
    "llama3.2-3B": _llama_3_1(_llama(28, 3072, 24, 8, 8192), 32.0, tied=True),
    "mistral-7B-v0.1": replace(_MISTRAL, rope=RopeConfig(), window=4096, positions=32_768),
    "mistral-7B-v0.3": replace(_MISTRAL, rope=RopeConfig(1_000_000.0), vocab=32_768, positions=32_768),
    "qwen2.5-0.5B": _qwen_2(24, 896, 14, 2, 4864, tied=True, positions=32_768),
    "qwen2.5-1.5B": _qwen_2(28, 1536, 12, 2, 8960, tied=True),
    "qwen2.5-3B": _qwen_2(36, 2048, 16, 2, 11_008, tied=True, positions=32_768),
    "qwen2.5-7B": _qwen_2(28, 3584, 28, 4, 18_944, 152_064),
    "qwen2.5-14B": _qwen_2(48, 5120, 40, 8, 13_824, 152_064, eps=1e-5),
    "qwen2.5-32B": _qwen_2(64, 5120, 40, 8, 27_648, 152_064, eps=1e-5),
    "qwen2.5-72B": _qwen_2(80, 8192, 64, 8, 29_568, 152_064, eps=1e-5),
    "qwen3-0.6B": _qwen_3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7B": _qwen_3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4B": _qwen_3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8B": _qwen_3(36, 4096, 32, 8, 12_288),
    "qwen3-14B": _qwen_3(40, 5120, 40, 8, 17_408),
    "qwen3-32B": _qwen_3(64, 5120, 64, 8, 25_600),
    "mixtral-8x7B": replace(_MISTRAL, rope=RopeConfig(1_000_000.0), positions=32_768, experts=8),
    "qwen3-30B-A3B": replace(_qwen_3(48, 2048, 32, 4, 768), experts=128, top_k=8, aux_loss=0.001),
    "qwen3-235B-A22B": replace(_qwen_3(94, 4096, 64, 4, 1536), experts=128, top_k=8, aux_loss=0.001),
    "pythia-70M": _neox(6, 512, 8),
    "pythia-160M": _neox(12, 768, 12),
    "pythia-410M": _neox(24, 1024, 16),
    "pythia-1B": _neox(16, 2048, 8),
    "pythia-1.4B": _neox(24, 2048, 16),
    "pythia-2.8B": _neox(32, 2560, 32),
    "pythia-6.9B": _neox(32, 4096, 32, 50_432),
    "pythia-12B": _neox(36, 5120, 40, 50_688),
    "gpt-neox-20B": _neox(44, 6144, 64, 50_432, "gelu_tanh"),
    "starcoder2-3B": _starcoder_2(30, 3072, 24, 2, 999_999.4420358813),
    "starcoder2-7B": _starcoder_2(32, 4608, 36, 4, 1_000_000.0),
    "starcoder2-15B": _starcoder_2(40, 6144, 48, 4, 100_000.0, tied=False),
    "glm4-9B": replace(_glm_4(40, 4096, 32, 13_696, eps=1.5625e-7, sandwich=False), positions=8192),
    "glm4-9B-0414": _glm_4(40, 4096, 32, 13_696),
    "glm4-32B-0414": _glm_4(61, 6144, 48, 23_040, bias="none"),
}


_BY_LETTERS = {name.casefold(): name for name in SIZES}


def size_name(name: object) -> str:
    """Return the size that a text names in large or small letters; "" if there is none."""
    return _BY_LETTERS.get(str(name).casefold(), "")


def sized(name: str, **changes: object) -> ModelConfig:
    """Return a named size with some of its fields changed."""
    return replace(SIZES[name], **changes)  # type: ignore[arg-type]
