"""Megatron's names of tensors in both generations. Rules use the names of Megatron-core."""

from __future__ import annotations

import re

from trainer.errors import InputError

# Names of the older generation, and of Megatron-core.
RENAMED = {
    ".query_key_value.": ".linear_qkv.",
    ".self_attention.dense.": ".self_attention.linear_proj.",
    ".post_attention_layernorm.": ".pre_mlp_layernorm.",
    ".dense_h_to_4h.": ".linear_fc1.",
    ".dense_4h_to_h.": ".linear_fc2.",
}
# Fused kernels store the norm before a matrix together with the matrix.
FUSED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
IGNORED = r".*(_extra_state|inv_freq)|(.*\.)?(pooler|lm_head|word_embeddings_for_head)\..*"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# In the order of Megatron-core's modules.
IN_BLOCK = {
    "norm_1": "input_layernorm",
    "attention.out": "self_attention.linear_proj",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "norm_2": "pre_mlp_layernorm",
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
    name = re.sub(r"^(encoder|transformer)\.", "decoder.", name.removeprefix("language_model."))
    name = name.replace(".attention.", ".self_attention.")
    for older, core in RENAMED.items():
        name = name.replace(older, core)
    for norm, fused in FUSED.items():
        name = name.replace(fused, norm)
    return name


def older_name(name: str) -> str:
    """Return the older generation's name of a tensor of Megatron-core."""
    name = re.sub(r"^decoder\.", "encoder.", name)
    for older, core in RENAMED.items():
        name = name.replace(core, older)
    return name


def core_of(ours: str) -> str:
    """Return Megatron-core's name of one of our tensors."""
    stem, _, leaf = ours.rpartition(".")
    if not stem.startswith("blocks."):
        return f"{_OUTSIDE[stem]}.{leaf}"
    _, number, part = stem.split(".", 2)
    if part not in IN_BLOCK:
        raise InputError(f"Megatron has no place for {ours}", "export it to another format")
    return f"decoder.layers.{number}.{IN_BLOCK[part]}.{leaf}"


def layer_of(name: str) -> int | None:
    """Return the number of the layer in a tensor's name; None if there is none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def with_layer(name: str, number: int) -> str:
    """Return the name with another layer number."""
    return _LAYER.sub(f".layers.{number}.", name, count=1)
