"""Every key of config.json: a changed value is read, refused, or known to change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.weights import logits_of
from tests.trainer.weights import test_families as families
from trainer.errors import CheckpointError
from trainer.weights.convert import import_weights
from trainer.weights.families.registry import FAMILIES
from trainer.weights.keys import HARMLESS, Keys

ROOT = Path(__file__).resolve().parents[2]
# What transformers 5.24 writes for small models.
CONFIGS: dict[str, dict[str, Any]] = json.loads((ROOT / "cases/weights/config_keys.json").read_text())
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, **families.LLAMA_3}
SCALINGS: tuple[dict[str, Any], ...] = (
    {"type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12},
    {"rope_type": "yarn"},
    {"rope_type": "llama3", "factor": 8.0},
    LLAMA_3,
    {"rope_type": "dynamic", "factor": 2.0},
)
# Keys that users and other versions of transformers add.
MORE: dict[str, tuple[Any, ...]] = {
    "rope_scaling": SCALINGS,
    "rope_theta": (5000.0,),
    "partial_rotary_factor": (0.5,),
    "rotary_pct": (0.5,),
    "rotary_emb_base": (500,),
    "head_dim": (8, 16, 32),
    "layer_types": (
        ["sliding_attention", "full_attention"],
        ["sliding_attention"] * 2,
        ["full_attention"] * 2,
    ),
    "sliding_window": (3,),
    "use_sliding_window": (True,),
    "attention_bias": (True,),
    "mlp_bias": (True,),
    "mlp_only_layers": ([0],),
    "decoder_sparse_step": (2,),
    "tie_word_embeddings": (True, False),
    "num_key_value_heads": (1, 2),
    "scale_attn_weights": (False,),
    "original_max_position_embeddings": (16,),
}
# Keys that a family writes and does not use: a window that is turned off, the size of layers without experts.
UNUSED = {
    "qwen2": {"sliding_window"},
    "qwen3": {"sliding_window"},
    "qwen3-moe": {"sliding_window", "intermediate_size"},
    "gpt-neox": {"num_key_value_heads"},
}
ABSENT = object()


def others(value: Any) -> list[Any]:
    """Return other values for a key."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2]
    if isinstance(value, float):
        return [value * 2 + 0.5, value / 2]
    if isinstance(value, str):
        return ["relu", "gelu"]
    if isinstance(value, list):
        return [value[::-1] + value[:1]]
    return [1, [0]] if value is None else []


def changes(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and their changed values; ABSENT for a key that is left out."""
    for key, value in config.items():
        if key in ("architectures", "dtype", "model_type"):
            continue
        yield from ((key, other) for other in [*others(value), ABSENT])
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from ((key, {**value, name: other}) for other in others(inner))
                yield key, {each: own for each, own in value.items() if each != name}
            for name in ("partial_rotary_factor", "mscale", "attention_factor", "truncate"):
                yield key, {**value, name: 0.5}
            yield from ((key, {**value, **scaling}) for scaling in SCALINGS)
    yield from ((key, value) for key, values in MORE.items() for value in values if config.get(key) != value)


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return {name: own for name, own in {**config, key: value}.items() if own is not ABSENT}


def outcome(config: dict[str, Any]) -> str:
    """Return the model that a config means, or the faults."""
    keys = Keys("config.json", config)
    model = FAMILIES[config["model_type"]].read(keys)
    return "\n".join(keys.faults) or json.dumps(asdict(model))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_changed_key_is_read_refused_or_harmless(name: str) -> None:
    config = CONFIGS[name]
    same, seen = outcome(config), set[str]()
    for key, value in changes(config):
        if value is not ABSENT and outcome(changed(config, key, value)) != same:
            seen.add(key)
    assert "{" in same
    silent = {key for key in config if key not in seen} - HARMLESS - UNUSED.get(name, set())
    assert not silent
    assert not seen & HARMLESS


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "llama3 needs low_freq_factor",
        ),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "yarn needs factor"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "linear needs factor"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "rotate whole heads"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_theta is 500000.0 in rope_parameters alone",
        ),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("gpt-neox", {"head_dim": 8}, "head_dim is 8"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    name: str, change: dict[str, Any], message: str
) -> None:
    assert message in outcome({**CONFIGS[name], **change})


def test_rope_scaling_replaces_rope_parameters() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
    rope = json.loads(outcome({**CONFIGS["qwen2"], "rope_scaling": scaling}))["rope"]
    assert (rope["scaling"], rope["factor"], rope["original"]) == ("yarn", 4.0, 12)
    given = {**CONFIGS["qwen2"], "rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e6}
    rope = json.loads(outcome({**given, "rope_scaling": scaling}))["rope"]
    assert (rope["scaling"], rope["base"]) == ("yarn", 1e6)


def test_the_familys_own_defaults_apply() -> None:
    without = {key: value for key, value in CONFIGS["mixtral"].items() if not key.startswith("rope")}
    assert json.loads(outcome(without))["rope"]["base"] == 1e6
    without = {key: value for key, value in CONFIGS["mistral"].items() if key != "sliding_window"}
    assert json.loads(outcome(without))["window"] == 4096
    assert json.loads(outcome({**without, "sliding_window": None}))["window"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if name in families.CASES or name == "gpt2"])
def test_no_changed_key_computes_something_else_than_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.logging.set_verbosity_error()
    # transformers' own check of the types in config.json.
    refused = pytest.importorskip("huggingface_hub.errors").StrictDataclassError
    config, folder = CONFIGS[name], tmp_path / "hf"
    torch.manual_seed(5)
    kind = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokens = torch.randint(0, 128, (1, 40), generator=torch.Generator().manual_seed(2))
    wrong, compared = list[str](), 0
    for number, (key, value) in enumerate(changes(config)):
        (folder / "config.json").write_text(json.dumps(changed(config, key, value)))
        try:
            import_weights(folder, tmp_path / f"ours-{number}")
        except CheckpointError:
            continue
        try:
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
            with torch.no_grad():
                expected = theirs(tokens).logits
        except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError, refused):
            continue
        compared += 1
        if not torch.allclose(logits_of(tmp_path / f"ours-{number}", tokens), expected, atol=1e-3):
            wrong.append(f"{key}: {value}")
    assert not wrong
    assert compared > 10
