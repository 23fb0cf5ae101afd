"""What imports and exports need to know of one family of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config.model import ModelConfig
from trainer.weights.keys import Keys
from trainer.weights.rules import Rule, rule

# Their spelling of GELU, and ours.
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
    """Whether a model of ours can be written as one of this family."""
    prefixes: Sequence[str] = ()
    """Prefixes that names in a file may have before those of the rules; an export writes the first."""
    ignored: str = r"(?!)"
    """A pattern for tensors that are no weights."""
    head: str = "lm_head.weight"


def pairs(ours: str, theirs: str, transposed: bool = False) -> list[Rule]:
    """Return the rules of a weight and its bias."""
    return [
        rule(f"{ours}.weight", f"{theirs}.weight", transposed=transposed),
        rule(f"{ours}.bias", f"{theirs}.bias"),
    ]
