"""Decoders with a mixture of experts: one row for each family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.weights.attention import Rows
from trainer.weights.families.kind import IGNORED, Kind, family
from trainer.weights.families.names import INPUT_BIAS, LLAMA, QK_NORMS
from trainer.weights.families.rope import RopeKind
from trainer.weights.rules import rule

_EXPERTS = {
    "feed_forward.router": "mlp.gate",
    "feed_forward.up": "mlp.experts.{e}.gate_proj mlp.experts.{e}.up_proj",
    "feed_forward.down": "mlp.experts.{e}.down_proj",
}
GROUPED: dict[str, tuple[str, Any]] = {
    "experts": ("n_routed_experts num_local_experts", 128),
    "top_k": ("num_experts_per_tok", 8),
    "renormalize": ("norm_topk_prob", True),
    "expert_groups": ("n_group", 1),
    "top_groups": ("topk_group", 1),
    "routed_scale": ("routed_scaling_factor", 1.0),
    "dense_layers": ("first_k_dense_replace", 1),
    "dense_ffn": ("intermediate_size", None),
}
GROUPED_NAMES = {
    **_EXPERTS,
    "feed_forward.router.bias": "mlp.gate.e_score_correction_bias",
    "feed_forward.shared.up": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
    "feed_forward.shared.down": "mlp.shared_experts.down_proj",
    "dense feed_forward.up": LLAMA["feed_forward.up"],
    "dense feed_forward.down": LLAMA["feed_forward.down"],
}
_ALL = "our layers have all experts, or none"

MIXTRAL = family(
    "mixtral",
    "MixtralForCausalLM",
    Kind(
        keys={
            "eps": ("rms_norm_eps", 1e-5),
            "experts": ("num_local_experts num_experts", 8),
            "top_k": ("num_experts_per_tok", 2),
            "aux_loss": ("router_aux_loss_coef", 0.001),
        },
        must={"router_jitter_noise": (0.0, 0.0, "our router adds no noise")},
        window=0,
        rope=RopeKind(base=1e6),
    ),
    LLAMA
    | {
        "feed_forward.router": "block_sparse_moe.gate",
        "feed_forward.up": "block_sparse_moe.experts.{e}.w1 block_sparse_moe.experts.{e}.w3",
        "feed_forward.down": "block_sparse_moe.experts.{e}.w2",
    },
)
QWEN3_MOE = family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    Kind(
        {"qk_norm": True},
        keys={
            "experts": ("num_experts num_local_experts", 128),
            "top_k": ("num_experts_per_tok", 8),
            "aux_loss": ("router_aux_loss_coef", 0.001),
            "renormalize": ("norm_topk_prob", False),
        },
        must={"decoder_sparse_step": (1, 1, _ALL), "mlp_only_layers": ([], [], _ALL)},
        unused=("intermediate_size",),
        inner="moe_intermediate_size",
    ),
    LLAMA | QK_NORMS | _EXPERTS,
)
GLM4_MOE = family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    Kind(
        {**INPUT_BIAS, "scoring": "sigmoid", "router_bias": True, "aux_loss": 0.0},
        keys={
            "eps": ("rms_norm_eps", 1e-5),
            "qk_norm": ("use_qk_norm", False),
            **GROUPED,
        },
        unused=("num_mtp_layers", "num_nextn_predict_layers"),
        bias_key=("attention_bias", False),
        inner="moe_intermediate_size",
        shared="n_shared_experts",
        rope=RopeKind(part=0.5),
    ),
    LLAMA | QK_NORMS | GROUPED_NAMES,
    # The layer that predicts the token after the next one, which transformers ignores too.
    ignored=rf"{IGNORED}|model\.layers\.(46|92)\..*",
)

# -- gpt-oss --------------------------------------------------------------------------------------------------

_MLP, _THEIRS = "blocks.{n}.feed_forward", "model.layers.{n}.mlp"
GPT_OSS = family(
    "gpt_oss",
    "GptOssForCausalLM",
    Kind(
        {"bias": "all", "sinks": True, "expert_bias": True, "gate": "clamped"},
        keys={
            "eps": ("rms_norm_eps", 1e-5),
            "experts": ("num_local_experts num_experts", 128),
            "top_k": ("num_experts_per_tok experts_per_token", 4),
            "aux_loss": ("router_aux_loss_coef", 0.001),
        },
        must={
            "hidden_act": ("silu", "silu", "the gates of this family are limited sigmoid gates"),
            "swiglu_limit": (7.0, 7.0, "our limit is 7"),
            "swiglu_alpha": (1.702, 1.702, "our factor is 1.702"),
        },
        unused=("initial_context_length",),
        bias_key=("attention_bias", True),
        activation=("", ""),
        window=128,
        cycle=2,
        rope=RopeKind(base=150_000.0),
    ),
    {ours: name for ours, name in LLAMA.items() if not ours.startswith("feed_forward")}
    | {"feed_forward.router": "mlp.router"},
    more=[
        rule("blocks.{n}.attention.sinks", "model.layers.{n}.self_attn.sinks"),
        rule(f"{_MLP}.router.offset", f"{_THEIRS}.router.bias"),
        rule(f"{_MLP}.up.weight", f"{_THEIRS}.experts.gate_up_proj", transposed=True, rows=Rows.PAIRS),
        rule(f"{_MLP}.up.bias", f"{_THEIRS}.experts.gate_up_proj_bias", rows=Rows.PAIRS),
        rule(f"{_MLP}.down.weight", f"{_THEIRS}.experts.down_proj", transposed=True),
        rule(f"{_MLP}.down.bias", f"{_THEIRS}.experts.down_proj_bias"),
    ],
)

# -- DeepSeek and Kimi ----------------------------------------------------------------------------------------

_LATENTS = {
    "kv_rank": ("kv_lora_rank", 512),
    "q_rank": ("q_lora_rank", 1536),
    "rope_dim": ("qk_rope_head_dim", 64),
    "value_dim": ("v_head_dim", 128),
}
_LATENT_NAMES = {
    **{ours: name for ours, name in (LLAMA | GROUPED_NAMES).items() if ours.find("attention.") < 0},
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.q": "self_attn.q_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "attention.out": "self_attn.o_proj",
}
_MTP = rf"{IGNORED}|model\.layers\.(61|62)\..*"
_DEEPSEEK = Kind(
    {"scoring": "sigmoid", "router_bias": True, "aux_loss": 0.0},
    keys={**GROUPED, **_LATENTS, "dense_layers": ("first_k_dense_replace", 3)},
    must={
        "moe_layer_freq": (1, 1, _ALL),
        "rope_interleave": (True, True, "the rotation of this family is interleaved"),
        "topk_method": ("noaux_tc", "noaux_tc", "the router of this family has biases"),
        "scoring_func": ("sigmoid", "sigmoid", "the router of this family is a sigmoid"),
    },
    unused=(
        "num_key_value_heads",
        "head_dim",
        "qk_head_dim",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "ep_size",
    ),
    inner="moe_intermediate_size",
    shared="n_shared_experts",
    groups="",
    head_dim=False,
    latent=True,
    rope=RopeKind(interleaved=True, mscale=True),
)
_V2 = replace(
    _DEEPSEEK,
    fixed={"renormalize": False, "aux_loss": 0.0},
    keys={name: key for name, key in _DEEPSEEK.keys.items() if name != "renormalize"},
    must={
        "moe_layer_freq": (1, 1, _ALL),
        "norm_topk_prob": (
            False,
            False,
            "transformers does not divide the weights of this family by their sum",
        ),
        "scoring_func": ("softmax", "softmax", "the router of this family is a softmax"),
    },
    limited=True,
)
DEEPSEEK_V2 = family("deepseek_v2", "DeepseekV2ForCausalLM", _V2, _LATENT_NAMES)
DEEPSEEK_V3 = family("deepseek_v3", "DeepseekV3ForCausalLM", _DEEPSEEK, _LATENT_NAMES, ignored=_MTP)
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2")
