"""All families, in the order in which an export tries them."""

from __future__ import annotations

from trainer.weights.families import decoders, experts
from trainer.weights.families.family import Family
from trainer.weights.families.gpt2 import GPT2

FAMILIES = {
    family.name: family
    for family in (GPT2, *vars(decoders).values(), *vars(experts).values())
    if isinstance(family, Family)
}
# Families that our layers cannot compute, and the reason.
UNMAPPED = {
    "qwen2_moe": "shared_expert_gate: our shared expert has no gate of its own",
    "deepseek_v32": "index_topk: our latent attention sees all tokens, and none that an index chooses",
    "kimi_linear": "linear_attn_config: our attention is not linear",
}
