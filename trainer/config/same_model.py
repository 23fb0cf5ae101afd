"""Compare two models: whether one can start with the weights of the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from trainer.config.model import ModelConfig
from trainer.errors import Fault


def init_faults(own: ModelConfig, theirs: ModelConfig, extends: bool) -> Iterator[Fault]:
    """Yield each key of the model in which the weights of `theirs` do not fit; `extends`: the vocabulary may grow."""
    needed = _facts(theirs)
    for key, value in _facts(own).items():
        # A key that only one model has follows from another key that differs.
        if key in needed and value != needed[key]:
            wanted = _text(needed[key])
            problem = f"is {_text(value)}, and the weights of train.init are of a model with {wanted}"
            yield Fault(f"train.model.{key}", problem, f"use {wanted}")
    if own.vocab == theirs.vocab or (extends and own.vocab > theirs.vocab):
        return
    problem = f"is {own.vocab}, and the weights of train.init are of a model with {theirs.vocab}"
    remedy = f"use {theirs.vocab}"
    if own.vocab > theirs.vocab:
        remedy += ", or add extend_vocabulary: true to train.init"
    yield Fault("train.model.vocab", problem, remedy)


# What changes no tensor of a model and nothing that it computes from them: settings of training and lengths.
_TRAINING = (
    *("sequence", "positions", "vocab", "vocab_multiple", "dropout", "attention_dropout", "label_smoothing"),
    *("init_std", "capacity", "aux_loss", "window", "rope"),
)


def _facts(model: ModelConfig) -> dict[str, object]:
    """Return by key of the config the values that determine a model's tensors and their computation."""
    facts = {item.name: getattr(model, item.name) for item in fields(model) if item.name not in _TRAINING}
    facts |= {"query_groups": model.groups, "head_dim": model.head_size, "ffn": model.inner}
    for name in ("gate",) if not model.swiglu else ("activation",):
        del facts[name]
    if not model.experts:
        facts = {name: value for name, value in facts.items() if name not in ("top_k", "renormalize")}
    if model.rotary:
        rope = model.rope
        facts |= {"rope.base": rope.base, "rope.part": rope.part, "rope.interleaved": rope.interleaved}
    else:
        # GLM's tables have one more row, which is not counted.
        facts["positions"] = model.positions or model.sequence
    return facts


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
