"""The properties of a model family that imports and exports need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config.model import ModelConfig
from trainer.weights.keys import Keys
from trainer.weights.rules import Rule

# Hugging Face's names of activations, and ours.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
}


@dataclass(frozen=True)
class Family:
    """One kind of model of Hugging Face."""

    name: str
    """`model_type` in config.json."""
    architecture: str
    rules: Sequence[Rule]
    read: Callable[[Keys], ModelConfig]
    write: Callable[[ModelConfig], dict[str, object]]
    fits: Callable[[ModelConfig], bool]
    """Returns whether our model can be written as one of this family."""
    prefixes: Sequence[str] = ()
    """Prefixes that tensor names in a file may have; an export writes the first one."""
    ignored: str = r"(?!)"
    """A pattern for the names of tensors that are not weights."""
    head: str = "lm_head.weight"
