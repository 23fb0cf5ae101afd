"""Read and write the config.json of decoders with rotary positions, whose families are rows in other modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.model import ModelConfig
from trainer.weights.families.family import ACTIVATIONS, GATES, Family
from trainer.weights.families.layers import read_rotated, read_window
from trainer.weights.families.names import rules_for
from trainer.weights.families.rope import (
    GLOBAL,
    LOCAL,
    WHOLE,
    RopeKind,
    read_mscale,
    read_rope,
    read_window_base,
    write_rope,
)
from trainer.weights.keys import MOST_LAYERS, Keys

# The longest sample of a training; models for longer texts keep their length in `positions`.
LONGEST_SAMPLE = 8192
# The key of each of our fields, and its default; None: it is needed. Of several keys the first one is read.
USUAL: dict[str, tuple[str, Any]] = {
    "layers": ("num_hidden_layers", None),
    "hidden": ("hidden_size", None),
    "heads": ("num_attention_heads", None),
    "vocab": ("vocab_size", None),
    "attention_dropout": ("attention_dropout", 0.0),
    "eps": ("rms_norm_eps", 1e-6),
    "init_std": ("initializer_range", 0.02),
    "tied": ("tie_word_embeddings", False),
}
# Fields whose 0 is a null in config.json.
NULL = ("attention_cap", "logit_cap", "q_rank")
LIMITED = {"greedy": "greedy", "group_limited_greedy": "group_limited_greedy"}
BIASES = ("mlp_bias", "attention_bias", "use_bias")
IGNORED = r".*\.rotary_emb\.inv_freq"


@dataclass(frozen=True)
class Kind:
    """The properties in which the config of one family differs from those of others."""

    fixed: Mapping[str, object] = field(default_factory=dict)
    """Our fields that have the same value in all models of the family."""
    keys: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """As USUAL, for fields with another key or default and for more fields."""
    must: Mapping[str, tuple[object, object, str]] = field(default_factory=dict)
    """Keys of which one value can be mapped: this value, the default, and the reason."""
    unused: Sequence[str] = ()
    """Keys that transformers writes and does not use."""
    bias_key: tuple[str, bool] = ("", True)
    """The key that turns the biases of `fixed` on or off, and its default."""
    inner: str = "intermediate_size"
    shared: str = ""
    """The key of the number of shared experts, which are one of ours as wide as all of them together."""
    groups: str = "num_key_value_heads"
    head_dim: bool = True
    """Whether the config can contain the size of a head."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    scale: str = ""
    """The key of 1 / square of attention's scale."""
    window: int | None = None
    """The attention window if config.json does not contain the key; None: the family has no windows."""
    cycle: int = 0
    """Every layer of this number attends to all tokens if config.json has no `layer_types`; 0: all layers are alike."""
    latent: bool = False
    """Whether attention is latent; `qk_nope_head_dim` is then our `head_dim`."""
    limited: bool = False
    """Whether `topk_method` says if a token's experts are in a few groups."""
    unrotated: bool = False
    """Whether `no_rope_layers` says which layers rotate."""
    rope: RopeKind = WHOLE

    @property
    def table(self) -> dict[str, tuple[list[str], Any]]:
        """Return the keys and the default of each of our fields that has one."""
        return {ours: (names.split(), usual) for ours, (names, usual) in {**USUAL, **self.keys}.items()}

    def read(self, keys: Keys) -> ModelConfig:
        """Return our config; what cannot be mapped becomes a fault of `keys`."""
        keys.get(*self.unused)
        values: Any = {"norm": "rms", "swiglu": True, **self.fixed}
        values |= {ours: _value(keys, ours, *key) for ours, key in self.table.items()}
        hidden, heads, layers = values["hidden"], values["heads"], values["layers"]
        gated = values["swiglu"]
        groups = keys.number(self.groups, default=heads) if self.groups else heads
        positions = keys.number("max_position_embeddings", default=2048)
        size = keys.number("head_dim", default=0, least=0)
        if not self.head_dim and not self.latent and size not in (0, hidden // heads):
            reason = "heads of this family are hidden_size / num_attention_heads"
            keys.faults.append(f"head_dim is {size}: {reason}")
        for name, (value, usual, reason) in self.must.items():
            keys.must_be(name, value, usual, reason)
        if self.activation[0]:
            kinds = GATES if gated else ACTIVATIONS
            values["gate" if gated else "activation"] = keys.choice(
                self.activation[0], kinds, self.activation[1]
            )
        values |= {
            "query_groups": 0 if groups == heads else groups,
            "head_dim": 0 if size * heads == hidden else size,
            "ffn": keys.number(self.inner, default=None if gated else 4 * hidden),
            "bias": self._bias(keys),
            "sequence": min(positions, LONGEST_SAMPLE),
            "positions": positions if positions > LONGEST_SAMPLE else 0,
            "rope": (rope := read_rope(keys, self.rope)),
            "rotated": read_rotated(keys, layers) if self.unrotated else (),
            "attention_scale": self._scale(keys, size or hidden // heads),
        }
        if self.shared:
            values["shared_ffn"] = values["ffn"] * keys.number(self.shared, default=1, least=0)
        if self.latent:
            size = keys.number("qk_nope_head_dim", default=128)
            width = size + values["rope_dim"]
            values |= {"query_groups": 0, "head_dim": 0 if size * heads == hidden else size}
            if self.limited and keys.choice("topk_method", LIMITED, "greedy") == "greedy":
                values |= {"expert_groups": 1, "top_groups": 1}
            values["rope"], values["attention_scale"] = read_mscale(keys, self.rope, rope, width)
        values["window"], windowed = read_window(keys, layers, self.window, self.cycle)
        values |= {
            "windowed": windowed,
            "window_base": read_window_base(keys, self.rope, rope) if windowed else 0.0,
        }
        return ModelConfig(rotary=True, **values)

    def write(self, model: ModelConfig) -> dict[str, object]:
        """Return the config.json of a model of this family."""
        found: dict[str, object] = {name: value for name, (value, *_) in self.must.items()}
        for ours, (names, _) in self.table.items():
            value = getattr(model, ours)
            found |= dict.fromkeys(names, None if ours in NULL and not value else value)
        found |= {self.inner: model.inner, "max_position_embeddings": model.context}
        activation = model.gate if model.swiglu else model.activation
        by_tanh = "gelu_new" if self.activation[1] == "gelu" else "gelu_pytorch_tanh"
        if self.activation[0]:
            found[self.activation[0]] = by_tanh if activation == "gelu_tanh" else activation
        found |= write_rope(model, self.rope)
        if self.shared:
            found[self.shared] = model.shared_ffn // model.inner
        if self.groups:
            found[self.groups] = model.groups
        if self.latent:
            found["qk_nope_head_dim"] = model.head_size
        if self.limited:
            found["topk_method"] = "group_limited_greedy" if model.expert_groups > 1 else "greedy"
        if self.head_dim:
            found["head_dim"] = model.head_size
        if self.bias_key[0]:
            found[self.bias_key[0]] = model.bias != "none"
        if self.scale:
            square = model.attention_scale**-2 if model.attention_scale else model.head_size
            found[self.scale] = round(square) if abs(square - round(square)) < 1e-6 else square
        if self.window is not None:
            found["sliding_window"] = model.window or (model.context if self.cycle else None)
        if self.cycle:
            found["layer_types"] = [LOCAL if layer.window else GLOBAL for layer in model.each_layer]
        if self.unrotated:
            found["no_rope_layers"] = [int(layer.rotary) for layer in model.each_layer]
        return found

    def _bias(self, keys: Keys) -> str:
        bias = str(self.fixed.get("bias", "none"))
        name, usual = self.bias_key
        for key in BIASES:
            if key != name:
                present = bias == "all" and key != "mlp_bias"
                keys.must_be(key, present, present, "our matrices of this family have other biases")
        return bias if not name or keys.get(name, default=usual) is True else "none"

    def _scale(self, keys: Keys, size: int) -> float:
        given = keys.real(self.scale, default=256.0) if self.scale else size
        return 0.0 if given == size else given**-0.5


def _value(keys: Keys, ours: str, names: Sequence[str], usual: Any) -> Any:
    if isinstance(usual, bool):
        return keys.get(*names, default=usual) is True
    if isinstance(usual, float):
        return keys.real(*names, default=0.0 if ours in NULL and names[0] in keys.document else usual)
    if ours in NULL and names[0] in keys.document:
        usual = 0
    least, most = (
        int(ours not in NULL and ours != "dense_layers"),
        MOST_LAYERS if ours.endswith("layers") else 1 << 24,
    )
    return keys.number(*names, default=usual, least=least, most=most)


def family(name: str, architecture: str, kind: Kind, names: Mapping[str, str], **more: Any) -> Family:
    """Return a family whose modules have these names; `more`: where the others are, as in `rules_for` and Family."""
    placed = {key: more.pop(key) for key in ("layer", "rows", "more") if key in more}
    return Family(
        name, architecture, rules_for(names, **placed), kind.read, kind.write, **{"ignored": IGNORED, **more}
    )
