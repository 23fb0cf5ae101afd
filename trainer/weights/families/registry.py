"""All families, in the order in which an export tries them."""

from __future__ import annotations

from trainer.weights.families.decoders import GLM, GLM4, LLAMA, MISTRAL, NEOX, QWEN2, QWEN3, STARCODER2
from trainer.weights.families.gpt2 import GPT2

FAMILIES = {
    family.name: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GLM, GLM4, NEOX, STARCODER2)
}
