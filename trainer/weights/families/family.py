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


# Keys of the model that a family has no setting for, unless it says so.
_PLAIN = ("kind", "rotary", "norm", "bias", "swiglu", "window", "experts", "head_dim")
_MORE = ("qk_norm", "sandwich_norms", "parallel_residual")


def is_like(model: ModelConfig, *free: str, **values: object) -> bool:
    """Return whether a model has these values, and in other keys our defaults; `free` keys may have any value."""
    plain = ModelConfig()
    wanted = {name: getattr(plain, name) for name in (*_PLAIN, *_MORE) if name not in free} | values
    shares = model.groups != model.heads and "groups" not in free
    return not shares and all(getattr(model, name) == value for name, value in wanted.items())


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

    def full_name(self, name: str) -> str:
        """Return the name of a tensor in a file that we write."""
        return name if name == self.head else f"{next(iter(self.prefixes), '')}{name}"
