"""Rotary positions in a config.json: the old keys, the new `rope_parameters`, and which of them are supported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainer.config.model import ModelConfig
from trainer.config.rope import RopeConfig
from trainer.weights.keys import Keys

LOCAL, GLOBAL = "sliding_attention", "full_attention"
KNOWN = ("default", "linear", "dynamic", "yarn", "llama3")
# The keys of a scaling without which transformers refuses it; and those that have no effect here.
NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
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
    "truncate",
}


@dataclass(frozen=True)
class RopeKind:
    """How a family writes its rotary positions."""

    base: float = 10_000.0
    base_key: str = "rope_theta"
    part: float = 1.0
    """The fraction of a head that is rotated, if config.json does not say it; 1: the family always rotates all."""
    part_key: str = "partial_rotary_factor"
    interleaved: bool = False
    window_base: float = 0.0
    """The base in layers with a window, if config.json does not say it; 0: all layers have the same positions."""
    window_key: str = ""
    """Its older key."""
    known: tuple[str, ...] = KNOWN
    mscale: bool = False
    """Whether yarn may scale attention by `mscale` and `mscale_all_dim`."""
    any_part: bool = False
    """Whether a model may rotate any part of a head, although `part` is 1."""


WHOLE = RopeKind()


def read_rope(keys: Keys, kind: RopeKind = WHOLE) -> RopeConfig:
    """Return the rotary positions of a config.

    As in transformers: a `rope_scaling` replaces `rope_parameters`; its values have priority over the keys next to it.
    """
    given = _given(keys, kind)
    own = Keys("", given, keys.faults)
    scaling = given.get("rope_type", given.get("type", "default"))
    if scaling not in kind.known:
        keys.faults.append(f"rope_type is {scaling!r}: only {', '.join(kind.known)} can be mapped")
        scaling = "default"
    neutral = NEUTRAL | ({"mscale", "mscale_all_dim"} if kind.mscale else set())
    unknown = [key for key, value in given.items() if key not in neutral and value is not None]
    if unknown:
        keys.faults.append(f"rope_parameters has {', '.join(unknown)}: our positions have no such setting")
    missing = [name for name in NEEDED.get(scaling, ()) if given.get(name) is None]
    if missing:
        keys.faults.append(f"rope_type {scaling} needs {', '.join(missing)}")
    part = own.real("partial_rotary_factor", default=kind.part)
    if kind.part == 1.0 and part != 1.0 and not kind.any_part:
        keys.faults.append(f"{kind.part_key} is {part}: models of this family rotate whole heads")
    plain, scaled = RopeConfig(), scaling != "default"
    original = own.number("original_max_position_embeddings", default=0, least=0) if scaled else 0
    if scaling in ("dynamic", "yarn", "llama3") and not original and not keys.get("max_position_embeddings"):
        keys.faults.append(f"rope_type {scaling} needs max_position_embeddings")
    if scaling in ("linear", "dynamic") and original:
        keys.faults.append(f"original_max_position_embeddings is {original}: {scaling} scaling has none")
    elif scaled and keys.get("original_max_position_embeddings") not in (None, original):
        keys.faults.append("original_max_position_embeddings differs from the one in rope_parameters")
    return RopeConfig(
        base=own.real("rope_theta", default=kind.base),
        part=part,
        interleaved=kind.interleaved,
        scaling=scaling if scaled else "none",
        factor=own.real("factor", default=1.0) if scaled else 1.0,
        original=original,
        low_freq=own.real("low_freq_factor", default=plain.low_freq) if scaled else plain.low_freq,
        high_freq=own.real("high_freq_factor", default=plain.high_freq) if scaled else plain.high_freq,
        beta_slow=own.real("beta_slow", default=plain.beta_slow) if scaled else plain.beta_slow,
        beta_fast=own.real("beta_fast", default=plain.beta_fast) if scaled else plain.beta_fast,
        truncate=own.get("truncate", default=True) is True or not scaled,
        attention=own.real("attention_factor", default=0.0) if scaled else 0.0,
    )


def read_mscale(keys: Keys, kind: RopeKind, rope: RopeConfig, size: int) -> tuple[RopeConfig, float]:
    """Return rotary positions and attention's scale with yarn's `mscale`, for queries of width `size`; or 0."""
    given = _given(keys, kind)
    both = [given.get(name) for name in ("mscale", "mscale_all_dim")]
    if not kind.mscale or rope.scaling != "yarn" or not both[1]:
        return rope, 0.0
    if both[0] != both[1] or not isinstance(both[1], (int, float)):
        keys.faults.append(f"mscale is {both[0]!r}: only that of mscale_all_dim, {both[1]!r}, can be mapped")
        return rope, 0.0
    factor = 0.1 * both[1] * math.log(rope.factor) + 1.0
    return replace(rope, attention=1.0), factor * factor * size**-0.5


def _given(keys: Keys, kind: RopeKind) -> dict[str, object]:
    """Return the keys of rotary positions, from wherever they stand."""
    both = list[Mapping[str, object]]()
    for name in ("rope_parameters", "rope_scaling"):
        value = keys.get(name, default={})
        if isinstance(value, Mapping):
            both.append(value)
        else:
            keys.faults.append(f"{name} is {value!r}: a mapping is needed")
            both.append({})
    before, scaling = both
    if kind.window_base:
        own = before.get(GLOBAL, {})
        before = own if isinstance(own, Mapping) else {}
        scaling = {**before, **scaling} if scaling else {}
    found = dict(scaling or before)
    for ours, theirs, usual in (
        ("rope_theta", kind.base_key, kind.base),
        ("partial_rotary_factor", kind.part_key, kind.part),
    ):
        if found.get(ours) is None:
            found[ours] = keys.get(theirs)
        other = before.get(ours)
        if other is not None and other != (usual if found[ours] is None else found[ours]):
            problem = "transformers would take that of rope_scaling, or its default"
            keys.faults.append(f"{ours} is {other!r} in rope_parameters alone: {problem}; write one of both")
    return found


def read_window_base(keys: Keys, kind: RopeKind, rope: RopeConfig) -> float:
    """Return our `window_base`: 0 if layers with a window have the positions `rope` of the others."""
    given = keys.get("rope_parameters", default={})
    own = Keys("", given.get(LOCAL) or {} if isinstance(given, Mapping) else {}, keys.faults)
    usual = keys.real(kind.window_key, default=kind.window_base) if kind.window_key else kind.window_base
    own.must_be("rope_type", "default", "default", f"the positions of {LOCAL} are not scaled here")
    base = own.real("rope_theta", default=usual or rope.base)
    return 0.0 if not kind.window_base or (base == rope.base and rope.scaling == "none") else base


def write_rope(model: ModelConfig, kind: RopeKind = WHOLE) -> dict[str, object]:
    """Return the keys of a config.json, old and new."""
    rope, with_part = model.rope, kind.part != 1.0 or kind.any_part
    scaling: dict[str, object] = {"rope_type": "default"}
    if rope.scaling != "none":
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
        if rope.original:
            scaling["original_max_position_embeddings"] = rope.original
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if kind.mscale and model.attention_scale and rope.scaling == "yarn" and rope.factor > 1:
        factor = (model.attention_scale * model.attention.size**0.5) ** 0.5
        given = round((factor - 1.0) / (0.1 * math.log(rope.factor)), 9)
        scaling |= {"mscale": given, "mscale_all_dim": given}
    if rope.scaling == "yarn":
        scaling |= {"beta_slow": rope.beta_slow, "beta_fast": rope.beta_fast}
        scaling |= {} if rope.truncate else {"truncate": False}
        scaling |= {"attention_factor": rope.attention} if rope.attention else {}
    part = {"partial_rotary_factor": rope.part} if with_part else {}
    new: dict[str, object] = {"rope_theta": rope.base, **part, **scaling}
    if kind.window_base:
        own = {"rope_theta": model.window_base or rope.base, "rope_type": "default"}
        new = {GLOBAL: new, LOCAL: own}
    found: dict[str, object] = {"rope_parameters": new, kind.base_key: rope.base, "rope_theta": rope.base}
    if part:
        found |= {kind.part_key: rope.part, **part}
    if kind.window_key:
        found[kind.window_key] = model.window_base or rope.base
    return found | ({"rope_scaling": scaling} if rope.scaling != "none" else {})
