"""Floating point operations a token, by each convention that rates are told in. They differ by up to a half."""

from __future__ import annotations

from trainer.models import ModelConfig

# What each counts; a figure without its convention means nothing.
CONVENTIONS = {
    "model": "as Megatron-LM counts: three passes, causal attention half, no recomputation",
    "hardware": "the same, and what recomputation does again",
    "palm": "as nanoGPT and PaLM count: 6 x parameters + 12 x layers x hidden x sequence, attention whole",
}


def layer_forward(model: ModelConfig) -> int:
    """Of one token through one block."""
    matrices = model.hidden * (model.qkv_width + model.hidden + model.up_width + model.inner)
    return 2 * matrices + attention_forward(model)


def attention_forward(model: ModelConfig) -> int:
    """Scores and mixed values of one token; a causal model sees half of the sequence on the average."""
    return (4 if model.kind == "glm" else 2) * model.sequence * model.hidden


def head_forward(model: ModelConfig, tensor: int = 1) -> int:
    """The vocabulary's scores of one token, over all tensor parallel ranks."""
    return 2 * model.padded(tensor) * model.hidden


def again(model: ModelConfig, mode: str) -> int:
    """Of one token, what recomputation does again in one block."""
    return {"none": 0, "full": layer_forward(model), "selective": attention_forward(model)}[mode]


def per_token(model: ModelConfig, recompute: str = "none") -> dict[str, int]:
    """Operations a token of training, by convention."""
    passes = 3 * (model.layers * layer_forward(model) + head_forward(model))
    return {
        "model": passes,
        "hardware": passes + model.layers * again(model, recompute),
        "palm": 6 * model.parameters() + 12 * model.layers * model.hidden * model.sequence,
    }
