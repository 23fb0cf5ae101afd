"""Rotary positions in a config.json: the old keys, the new `rope_parameters`, and which of them are supported."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.config.model import ModelConfig
from trainer.config.rope import RopeConfig
from trainer.weights.keys import Keys

KNOWN = ("default", "linear", "dynamic", "yarn", "llama3")
# Keys of a scaling that have no effect here.
NEUTRAL = {
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_slow",
    "beta_fast",
    "attention_factor",
}


def read_rope(keys: Keys, part: float = 1.0, interleaved: bool = False) -> RopeConfig:
    """Return the rotary positions of a config; `part`: the family's default fraction of a head that is rotated."""
    given = keys.get("rope_parameters", "rope_scaling", default={})
    if not isinstance(given, Mapping):
        keys.faults.append(f"rope_parameters is {given!r}: a mapping is needed")
        given = {}
    base = Keys("", {**keys.document, **given}, keys.faults)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in KNOWN:
        keys.faults.append(f"rope_type is {kind!r}: only {', '.join(KNOWN)} are supported")
        kind = "default"
    unknown = [key for key, value in given.items() if key not in NEUTRAL and value is not None]
    if unknown:
        keys.faults.append(f"rope_parameters has {', '.join(unknown)}: our positions have no such setting")
    scaled = kind != "default"
    plain = RopeConfig()
    return RopeConfig(
        base=base.real("rope_theta", "rotary_emb_base", default=plain.base),
        part=base.real("partial_rotary_factor", "rotary_pct", default=part),
        interleaved=interleaved,
        scaling=kind if scaled else "none",
        factor=base.real("factor", default=1.0) if scaled else 1.0,
        original=base.number("original_max_position_embeddings", default=0, least=0) if scaled else 0,
        low_freq=base.real("low_freq_factor", default=plain.low_freq) if scaled else plain.low_freq,
        high_freq=base.real("high_freq_factor", default=plain.high_freq) if scaled else plain.high_freq,
        beta_slow=base.real("beta_slow", default=plain.beta_slow) if scaled else plain.beta_slow,
        beta_fast=base.real("beta_fast", default=plain.beta_fast) if scaled else plain.beta_fast,
        attention=base.real("attention_factor", default=0.0) if scaled else 0.0,
    )


def write_rope(model: ModelConfig, with_part: bool = False) -> dict[str, object]:
    """Return the keys of a config.json, old and new."""
    rope = model.rope
    scaling: dict[str, object] = {"rope_type": "default"}
    if rope.scaling != "none":
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
        if rope.original:
            scaling["original_max_position_embeddings"] = rope.original
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if rope.scaling == "yarn":
        scaling |= {"beta_slow": rope.beta_slow, "beta_fast": rope.beta_fast}
        scaling |= {"attention_factor": rope.attention} if rope.attention else {}
    part = {"partial_rotary_factor": rope.part} if with_part else {}
    found: dict[str, object] = {"rope_parameters": {"rope_theta": rope.base, **part, **scaling}}
    found |= {"rope_theta": rope.base, **part}
    return found | ({"rope_scaling": scaling} if rope.scaling != "none" else {})
