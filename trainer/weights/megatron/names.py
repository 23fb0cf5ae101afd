"""Megatron's names of tensors in both generations. Rules use the names of Megatron-core."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from trainer.errors import CheckpointError, InputError
from trainer.weights.lazy import Lazy

DEEPEST = 12
"""The most levels of dicts in a state dict."""
# Names of the older generation, and of Megatron-core.
RENAMES = (
    (r"^language_model\.", ""),
    (r"^(encoder|transformer)\.", "decoder."),
    (r"\.attention\.", ".self_attention."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
    # Fused kernels store the norm before a matrix together with the matrix.
    (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
)
# The way back, for a checkpoint of the older generation.
OLDER = (
    (r"^decoder\.", "encoder."),
    (r"\.linear_qkv\.", ".query_key_value."),
    (r"\.self_attention\.linear_proj\.", ".self_attention.dense."),
    (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
    (r"\.linear_fc1\.", ".dense_h_to_4h."),
    (r"\.linear_fc2\.", ".dense_4h_to_h."),
)
IGNORED = r".*(_extra_state|inv_freq)|(.*\.)?(pooler|lm_head|word_embeddings_for_head)\..*"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_IN_BLOCK = {
    "norm_1": "input_layernorm",
    "norm_2": "pre_mlp_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.out": "self_attention.linear_proj",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "feed_forward.up": "mlp.linear_fc1",
    "feed_forward.down": "mlp.linear_fc2",
}
_OUTSIDE = {
    "tokens": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "block_positions": "embedding.block_position_embeddings",
    "output": "output_layer",
    "norm": "decoder.final_layernorm",
}
OUTPUT = "output_layer.weight"


def core_name(name: str) -> str:
    """Return Megatron-core's name of a tensor of either generation."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def older_name(name: str) -> str:
    """Return the older generation's name of a tensor of Megatron-core."""
    for pattern, replacement in OLDER:
        name = re.sub(pattern, replacement, name)
    return name


def core_of(ours: str) -> str:
    """Return Megatron-core's name of one of our tensors."""
    stem, _, leaf = ours.rpartition(".")
    if not stem.startswith("blocks."):
        return f"{_OUTSIDE[stem]}.{leaf}"
    _, number, part = stem.split(".", 2)
    if part not in _IN_BLOCK:
        raise InputError(f"Megatron has no place for {ours}", "export it to another format")
    return f"decoder.layers.{number}.{_IN_BLOCK[part]}.{leaf}"


def layer_of(name: str) -> int | None:
    """Return the number of the layer in a tensor's name; None if there is none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def with_layer(name: str, number: int) -> str:
    """Return the name with another layer number."""
    return _LAYER.sub(f".layers.{number}.", name, count=1)


def flat(document: object, folder: Path, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Lazy]]:
    """Yield every tensor in nested dicts with its keys, joined by dots."""
    if depth > DEEPEST:
        raise CheckpointError(f"{folder}: its dicts contain each other")
    if not isinstance(document, dict):
        raise CheckpointError(f"{folder}: the state of the model is not a dict")
    for key, value in document.items():
        if isinstance(value, Lazy):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from flat(value, folder, f"{prefix}{key}.", depth + 1)
