"""The properties of a model family that imports and exports need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config.model import ModelConfig
from trainer.config.same_model import init_faults
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


# Hugging Face's names of the functions of a gate, and ours.
GATES = {"silu": "silu", "swish": "silu", **ACTIVATIONS}


@dataclass(frozen=True)
class Family:
    """One kind of model of Hugging Face."""

    name: str
    """`model_type` in config.json."""
    architecture: str
    rules: Sequence[Rule]
    read: Callable[[Keys], ModelConfig]
    write: Callable[[ModelConfig], dict[str, object]]
    prefixes: Sequence[str] = ()
    """Prefixes that tensor names in a file may have; an export writes the first one."""
    ignored: str = r"(?!)"
    """A pattern for the names of tensors that are not weights."""
    head: str = "lm_head.weight"

    def full_name(self, name: str) -> str:
        """Return the name of a tensor in a file that we write."""
        return name if name == self.head else f"{next(iter(self.prefixes), '')}{name}"

    def fits(self, model: ModelConfig) -> bool:
        """Return whether our model can be written as one of this family: then it is read as the same model."""
        keys = Keys("", {**self.write(model), "tie_word_embeddings": model.tied})
        again = self.read(keys)
        if keys.faults or again.window != model.window:
            return False
        return not list(init_faults(again, model, extends=False))
