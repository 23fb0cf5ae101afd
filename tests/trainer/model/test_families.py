"""The families compute what transformers computes: the same logits from the same random weights, in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import native
from trainer.config.model import ModelConfig
from trainer.config.model_sizes import SIZES
from trainer.config.rope import RopeConfig
from trainer.model.gpt import GPT

SMALL = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 128, "sequence": 48}
SHARED = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 48,
    "attn_implementation": "eager",
    # Above the vocabulary, so that no embedding is a row of zeros.
    "pad_token_id": None,
}
# Our field of each module of a block, and the names of transformers in every family but GPT-NeoX.
NORMS = {
    "norm_1": ["input_layernorm"],
    "norm_2": ["post_attention_layernorm"],
    "attention.q_norm": ["self_attn.q_norm"],
    "attention.k_norm": ["self_attn.k_norm"],
}
SANDWICH = {
    **NORMS,
    "post_norm_1": ["post_self_attn_layernorm"],
    "post_norm_2": ["post_mlp_layernorm"],
}


def rope_of(family: str, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": SIZES[family].rope.base, "rope_type": "default", **scaling}}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "llama2": ("llama2-7B", {}, {}, "Llama"),
    "llama3.1": (
        "llama3.1-8B",
        {"query_groups": 2, "rope": RopeConfig(500_000.0, scaling="llama3", factor=8.0, original=16)},
        rope_of(
            "llama3.1-8B",
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
        "Llama",
    ),
    "llama linear": (
        "llama2-7B",
        {"rope": RopeConfig(scaling="linear", factor=2.0)},
        rope_of("llama2-7B", rope_type="linear", factor=2.0),
        "Llama",
    ),
    "llama dynamic": (
        "llama2-7B",
        {"rope": RopeConfig(scaling="dynamic", factor=2.0, original=32)},
        {**rope_of("llama2-7B", rope_type="dynamic", factor=2.0), "max_position_embeddings": 32},
        "Llama",
    ),
    "llama yarn": (
        "llama2-7B",
        {"rope": RopeConfig(scaling="yarn", factor=4.0, original=12)},
        rope_of("llama2-7B", rope_type="yarn", factor=4.0, original_max_position_embeddings=12),
        "Llama",
    ),
    "llama3.2 tied": (
        "llama3.2-1B",
        {"query_groups": 1, "head_dim": 32, "rope": RopeConfig(500_000.0)},
        {**rope_of("llama3-8B"), "tie_word_embeddings": True, "head_dim": 32},
        "Llama",
    ),
    "mistral window": (
        "mistral-7B-v0.1",
        {"query_groups": 2, "window": 7},
        {**rope_of("mistral-7B-v0.1"), "sliding_window": 7},
        "Mistral",
    ),
    "qwen2.5": ("qwen2.5-7B", {"query_groups": 2}, rope_of("qwen2.5-7B"), "Qwen2"),
    "qwen3": (
        "qwen3-8B",
        {"query_groups": 2, "head_dim": 24},
        {**rope_of("qwen3-8B"), "head_dim": 24},
        "Qwen3",
    ),
    "mixtral": (
        "mixtral-8x7B",
        {"query_groups": 2, "experts": 4},
        {**rope_of("mixtral-8x7B"), "num_local_experts": 4},
        "Mixtral",
    ),
    "qwen3-moe": (
        "qwen3-30B-A3B",
        {"query_groups": 2, "head_dim": 24, "experts": 6, "top_k": 3},
        {
            **rope_of("qwen3-30B-A3B"),
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
        "Qwen3Moe",
    ),
    "gpt-neox": (
        "pythia-70M",
        {"rope": RopeConfig(part=0.25)},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25}},
        "GPTNeoX",
    ),
    "starcoder2": (
        "starcoder2-7B",
        {"query_groups": 2, "window": 9},
        {**rope_of("starcoder2-7B"), "sliding_window": 9, "tie_word_embeddings": True},
        "Starcoder2",
    ),
    "glm4": (
        "glm4-9B",
        {"query_groups": 2, "head_dim": 16},
        {
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
            "head_dim": 16,
            "attention_bias": True,
        },
        "Glm",
    ),
    "glm4-0414": (
        "glm4-9B-0414",
        {"query_groups": 2, "head_dim": 16},
        {
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
            "head_dim": 16,
            "attention_bias": True,
        },
        "Glm4",
    ),
}


def peer_of(name: str) -> tuple[Any, ModelConfig]:
    """Return a model of transformers with random weights and the config of ours."""
    transformers = pytest.importorskip("transformers")
    family, changes, theirs, kind = CASES[name]
    own = replace(SIZES[family], **{**SMALL, "query_groups": 4, "positions": 0, "head_dim": 0, **changes})
    eps = {"layer_norm_eps": own.eps, "norm_epsilon": own.eps, "rms_norm_eps": own.eps}
    given = {"num_key_value_heads": own.groups, "tie_word_embeddings": own.tied, **SHARED, **eps, **theirs}
    if kind == "GPTNeoX":
        given["rotary_pct"] = 0.25
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**given))
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms too: zeros and ones would hide a mistake.
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval(), own


def tensors_of(peer: dict[str, Tensor], own: ModelConfig, kind: str) -> dict[str, Tensor]:
    """Return the tensors of a model of transformers under our names."""
    found: dict[str, Tensor] = {}

    def put(name: str, *theirs: str) -> None:
        for leaf in ("weight", "bias"):
            parts = [peer[f"{source}.{leaf}"] for source in theirs if f"{source}.{leaf}" in peer]
            if parts:
                found[f"{name}.{leaf}"] = torch.cat(parts)

    neox = kind == "GPTNeoX"
    stem = "gpt_neox" if neox else "model"
    put("tokens", "gpt_neox.embed_in" if neox else "model.embed_tokens")
    put("norm", "gpt_neox.final_layer_norm" if neox else "model.norm")
    if not own.tied:
        put("output", "embed_out" if neox and "embed_out.weight" in peer else "lm_head")
    for i in range(own.layers):
        block, theirs = f"blocks.{i}", f"{stem}.layers.{i}"
        for name, sources in SANDWICH.items():
            put(f"{block}.{name}", *(f"{theirs}.{source}" for source in sources))
        if kind == "Glm4":
            # Its norm before the feed-forward part has the usual name.
            put(f"{block}.norm_2", f"{theirs}.post_attention_layernorm")
        if neox:
            put(f"{block}.attention.qkv", f"{theirs}.attention.query_key_value")
            for leaf in ("weight", "bias"):
                mixed = found[f"{block}.attention.qkv.{leaf}"]
                apart = mixed.unflatten(0, (own.heads, 3, own.head_size)).transpose(0, 1).flatten(0, 2)
                found[f"{block}.attention.qkv.{leaf}"] = apart
            put(f"{block}.attention.out", f"{theirs}.attention.dense")
            put(f"{block}.feed_forward.up", f"{theirs}.mlp.dense_h_to_4h")
            put(f"{block}.feed_forward.down", f"{theirs}.mlp.dense_4h_to_h")
            continue
        put(f"{block}.attention.qkv", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"))
        put(f"{block}.attention.out", f"{theirs}.self_attn.o_proj")
        if own.experts:
            put(f"{block}.feed_forward.router", f"{theirs}.mlp.gate")
            for ours, name in (("up", "gate_up_proj"), ("down", "down_proj")):
                found[f"{block}.feed_forward.{ours}.weight"] = peer[f"{theirs}.mlp.experts.{name}"]
            continue
        ups = ("gate_up_proj", "gate_proj", "up_proj", "c_fc")
        put(f"{block}.feed_forward.up", *(f"{theirs}.mlp.{part}" for part in ups))
        put(f"{block}.feed_forward.down", *(f"{theirs}.mlp.{part}" for part in ("down_proj", "c_proj")))
    return found


def load(own: GPT, tensors: dict[str, Tensor]) -> None:
    parameters = dict(own.named_parameters())
    assert set(parameters) == set(tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            # The token tables are padded by rows.
            parameters[name][: len(tensor)].copy_(tensor)


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_transformers(name: str) -> None:
    peer, config = peer_of(name)
    own = GPT(config, native.choose("cpu")).eval()
    load(own, tensors_of(dict(peer.state_dict()), config, CASES[name][3]))
    tokens = torch.randint(0, config.vocab, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, found = peer(tokens).logits, own(tokens)
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # Longer than a window and than the positions before a scaling: the cases differ from those without.
    assert own(tokens, tokens).isfinite()


# The counts of the published checkpoints.
PUBLISHED = {
    "llama2-7B": 6_738_415_616,
    "llama2-13B": 13_015_864_320,
    "llama2-70B": 68_976_648_192,
    "llama3-8B": 8_030_261_248,
    "llama3-70B": 70_553_706_496,
    "llama3.1-405B": 405_853_388_800,
    "llama3.2-1B": 1_235_814_400,
    "llama3.2-3B": 3_212_749_824,
    "mistral-7B-v0.1": 7_241_732_096,
    "mistral-7B-v0.3": 7_248_023_552,
    "qwen2.5-0.5B": 494_032_768,
    "qwen2.5-1.5B": 1_543_714_304,
    "qwen2.5-3B": 3_085_938_688,
    "qwen2.5-7B": 7_615_616_512,
    "qwen2.5-14B": 14_770_033_664,
    "qwen2.5-32B": 32_763_876_352,
    "qwen2.5-72B": 72_706_203_648,
    "qwen3-0.6B": 596_049_920,
    "qwen3-1.7B": 1_720_574_976,
    "qwen3-4B": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
    "qwen3-14B": 14_768_307_200,
    "qwen3-32B": 32_762_123_264,
    "mixtral-8x7B": 46_702_792_704,
    "qwen3-30B-A3B": 30_532_122_624,
    "qwen3-235B-A22B": 235_093_634_560,
    "pythia-70M": 70_426_624,
    "pythia-160M": 162_322_944,
    "pythia-410M": 405_334_016,
    "pythia-1B": 1_011_781_632,
    "pythia-1.4B": 1_414_647_808,
    "pythia-2.8B": 2_775_208_960,
    "pythia-6.9B": 6_857_302_016,
    "pythia-12B": 11_846_072_320,
    "gpt-neox-20B": 20_554_567_680,
    "starcoder2-3B": 3_030_371_328,
    "starcoder2-7B": 7_173_923_840,
    "starcoder2-15B": 15_957_889_024,
    "glm4-9B": 9_399_951_360,
    "glm4-9B-0414": 9_400_279_040,
    "glm4-32B-0414": 32_566_081_536,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_named_sizes_have_the_published_parameter_counts(name: str) -> None:
    assert SIZES[name].parameters() == PUBLISHED[name]


def test_a_token_uses_the_published_number_of_parameters() -> None:
    assert SIZES["mixtral-8x7B"].active_parameters() == 12_879_925_248
    assert SIZES["qwen3-30B-A3B"].active_parameters() / 1e9 == pytest.approx(3.35, abs=0.01)
    assert SIZES["llama3-8B"].active_parameters() == SIZES["llama3-8B"].parameters()


@pytest.mark.parametrize(
    "name", ["mixtral-8x7B", "llama3.2-1B", "qwen3-8B", "pythia-70M", "starcoder2-3B", "glm4-9B-0414"]
)
def test_a_models_parameters_are_as_many_as_its_config_says(name: str) -> None:
    config = replace(SIZES[name], layers=2, vocab=1280)
    with torch.device("meta"):
        model = GPT(config, native.choose("cpu", "reference"))
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters()
