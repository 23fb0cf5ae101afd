"""The model families of Hugging Face: for each the names of its tensors, and its config.json in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError
from trainer.weights.rules import Rule, rule

JSON = Mapping[str, Any]
MOST_LAYERS = 10_000
# Their spelling of GELU, and ours.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
}


class Keys:
    """A config.json whose keys are read one by one; it collects what cannot be mapped, and names it all at once."""

    def __init__(self, source: str, document: JSON) -> None:
        self._source, self._document = source, document
        self.faults: list[str] = []

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that is given."""
        for name in names:
            if self._document.get(name) is not None:
                return self._document[name]
        return default

    def number(self, *names: str, default: int | None = None, least: int = 1, most: int = 1 << 24) -> int:
        """Return a whole number."""
        value = self.get(*names, default=default)
        if type(value) is not int or not least <= value <= most:
            self.faults.append(f"{names[0]} is {value!r}: a whole number from {least} to {most:,} is needed")
            return 1
        return value

    def layers(self, *names: str, default: int | None = None) -> int:
        """Return a number of layers."""
        return self.number(*names, default=default, most=MOST_LAYERS)

    def real(self, *names: str, default: float) -> float:
        """Return a number of at least 0."""
        value = self.get(*names, default=default)
        if type(value) not in (int, float) or not 0 <= value < 1e12:
            self.faults.append(f"{names[0]} is {value!r}: a number is needed")
            return default
        return float(value)

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Return what a key's value means for us."""
        value = self.get(name, default=default)
        if not isinstance(value, str) or value not in choices:
            self.faults.append(f"{name} is {value!r}: only {', '.join(choices)} can be mapped")
            return next(iter(choices.values()))
        return choices[value]

    def must_be(self, name: str, wanted: object, default: object, reason: str) -> None:
        """Note a fault where a key has another value than the one that can be mapped."""
        value = self.get(name, default=default)
        if value != wanted:
            self.faults.append(f"{name} is {value!r}: {reason}")

    def check(self) -> None:
        """Raise a CheckpointError with all faults."""
        if self.faults:
            problem = "\n".join(f"{self._source}: {fault}" for fault in self.faults)
            raise CheckpointError(problem, "this variant of the model cannot be mapped to ours")


@dataclass(frozen=True)
class Family:
    """One kind of model of Hugging Face."""

    name: str
    """`model_type` in config.json."""
    architecture: str
    rules: Sequence[Rule]
    read: Callable[[Keys], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    fits: Callable[[ModelConfig], bool]
    """Whether a model of ours can be written as one of this family."""
    prefixes: Sequence[str] = ()
    """What may stand before every name of the rules in a file; the first is written."""
    ignored: str = r"(?!)"
    """Tensors that are no weights."""
    head: str = "lm_head.weight"


def _read_gpt2(keys: Keys) -> ModelConfig:
    keys.must_be(
        "scale_attn_weights", True, True, "our attention always divides by the root of the head size"
    )
    keys.must_be("scale_attn_by_inverse_layer_idx", False, False, "our attention does not scale by layers")
    keys.must_be("add_cross_attention", False, False, "our GPT has no cross attention")
    keys.must_be("tie_word_embeddings", True, True, "our GPT has one table for input and output")
    positions = keys.number("n_positions", "n_ctx", "max_position_embeddings", default=1024)
    hidden = keys.number("n_embd", "hidden_size", default=768)
    return ModelConfig(
        layers=keys.layers("n_layer", "num_hidden_layers", default=12),
        hidden=hidden,
        heads=keys.number("n_head", "num_attention_heads", default=12),
        sequence=positions,
        vocab=keys.number("vocab_size", default=50257),
        ffn=keys.number("n_inner", default=4 * hidden) if keys.get("n_inner") else 0,
        dropout=keys.real("resid_pdrop", default=0.1),
        attention_dropout=keys.real("attn_pdrop", default=0.1),
        activation=keys.choice("activation_function", ACTIVATIONS, "gelu_new"),
        eps=keys.real("layer_norm_epsilon", default=1e-5),
        init_std=keys.real("initializer_range", default=0.02),
    )


def _write_gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
        "attn_pdrop": model.attention_dropout,
        "embd_pdrop": model.dropout,
        "initializer_range": model.init_std,
        "layer_norm_epsilon": model.eps,
        "n_ctx": model.position_rows,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn or None,
        "n_layer": model.layers,
        "n_positions": model.position_rows,
        "resid_pdrop": model.dropout,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "vocab_size": model.vocab,
    }


def _fits_gpt2(model: ModelConfig) -> bool:
    return model.kind == "gpt" and not model.rotary and not model.swiglu and model.groups == model.heads


def _pairs(ours: str, theirs: str, transposed: bool = False) -> list[Rule]:
    """Return the rules of a weight and its bias."""
    return [
        rule(f"{ours}.weight", f"{theirs}.weight", transposed=transposed),
        rule(f"{ours}.bias", f"{theirs}.bias"),
    ]


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    # Hugging Face's Conv1D stores a matrix as inputs x outputs.
    rules=[
        rule("tokens.weight", "wte.weight"),
        rule("positions.weight", "wpe.weight"),
        *_pairs("blocks.{n}.norm_1", "h.{n}.ln_1"),
        *_pairs("blocks.{n}.attention.qkv", "h.{n}.attn.c_attn", transposed=True),
        *_pairs("blocks.{n}.attention.out", "h.{n}.attn.c_proj", transposed=True),
        *_pairs("blocks.{n}.norm_2", "h.{n}.ln_2"),
        *_pairs("blocks.{n}.feed_forward.up", "h.{n}.mlp.c_fc", transposed=True),
        *_pairs("blocks.{n}.feed_forward.down", "h.{n}.mlp.c_proj", transposed=True),
        *_pairs("norm", "ln_f"),
    ],
    read=_read_gpt2,
    write=_write_gpt2,
    fits=_fits_gpt2,
    # The files of the original models have no prefix.
    prefixes=("transformer.", ""),
    # The mask of the attention, which old files hold.
    ignored=r"h\.\d+\.attn\.(bias|masked_bias)",
)

FAMILIES = {family.name: family for family in (GPT2,)}
