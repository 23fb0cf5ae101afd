"""All families, in the order in which an export tries them."""

from __future__ import annotations

from trainer.weights.families.decoders import GLM, GLM4, LLAMA, MISTRAL, NEOX, QWEN2, QWEN3, STARCODER2
from trainer.weights.families.experts import MIXTRAL, QWEN3_MOE
from trainer.weights.families.gpt2 import GPT2

FAMILIES = {
    family.name: family
    for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GLM, GLM4, NEOX, STARCODER2, MIXTRAL, QWEN3_MOE)
}
_LATENT = "kv_lora_rank: our attention has one projection for queries, keys and values"
# Families that our layers cannot compute, and the reason.
UNMAPPED = {
    "qwen2_moe": "shared_expert_gate: our shared expert has no gate of its own",
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "gpt_oss": "sinks: our attention has no sinks",
}
