"""Decoders with rotary positions: one row for each family."""

from __future__ import annotations

from dataclasses import replace

from trainer.weights.attention import Rows
from trainer.weights.families.kind import Kind, family
from trainer.weights.families.names import LLAMA as USUAL
from trainer.weights.families.names import QK_NORMS
from trainer.weights.families.rope import RopeKind

_SANDWICH = {"post_norm_1": "post_self_attn_layernorm", "post_norm_2": "post_mlp_layernorm"}
_FUSED = {"attention.qkv": "self_attn.qkv_proj", "feed_forward.up": "mlp.gate_up_proj"}

LLAMA = family("llama", "LlamaForCausalLM", Kind(), USUAL)
MISTRAL = family("mistral", "MistralForCausalLM", Kind(window=4096), USUAL)
QWEN2 = family("qwen2", "Qwen2ForCausalLM", Kind({"bias": "qkv"}, head_dim=False), USUAL)
QWEN3 = family("qwen3", "Qwen3ForCausalLM", Kind({"qk_norm": True}), USUAL | QK_NORMS)
PHI3 = family(
    "phi3",
    "Phi3ForCausalLM",
    Kind(
        keys={"dropout": ("resid_pdrop embd_pdrop", 0.0), "eps": ("rms_norm_eps", 1e-5)},
        unused=("original_max_position_embeddings",),
        head_dim=False,
        window=0,
        rope=RopeKind(known=("default",), any_part=True),
    ),
    USUAL | _FUSED,
)
SMOLLM3 = family(
    "smollm3",
    "SmolLM3ForCausalLM",
    Kind(
        keys={"tied": ("tie_word_embeddings", True)},
        head_dim=False,
        unrotated=True,
        rope=RopeKind(base=2e6),
    ),
    USUAL,
)

# -- norms after attention and after the feed-forward part ---------------------------------------------------

_AFTER = {"post_norm_1": "post_attention_layernorm", "post_norm_2": "post_feedforward_layernorm"}
_OLMO_NAMES = {ours: name for ours, name in USUAL.items() if ours not in ("norm_1", "norm_2")}
_OLMO_NAMES |= QK_NORMS | _AFTER
_OLMO = Kind(
    {"qk_norm": True, "qk_norm_whole": True, "sandwich_norms": True, "input_norms": False},
    keys={"eps": ("rms_norm_eps", 1e-5)},
    head_dim=False,
)
OLMO2 = family("olmo2", "Olmo2ForCausalLM", _OLMO, _OLMO_NAMES)
OLMO3 = family(
    "olmo3",
    "Olmo3ForCausalLM",
    replace(_OLMO, window=4096, cycle=4, rope=RopeKind(base=5e5, window_base=5e5)),
    _OLMO_NAMES,
)
_GLM = Kind(
    {"bias": "qkv"},
    keys={"eps": ("rms_norm_eps", 1.5625e-7)},
    bias_key=("attention_bias", True),
    rope=RopeKind(part=0.5, interleaved=True),
)
_GLM_NAMES = USUAL | {"feed_forward.up": "mlp.gate_up_proj"}
GLM = family("glm", "GlmForCausalLM", _GLM, _GLM_NAMES)
GLM4 = family(
    "glm4",
    "Glm4ForCausalLM",
    replace(_GLM, fixed={"bias": "qkv", "sandwich_norms": True}),
    _GLM_NAMES | _SANDWICH,
)

# -- Gemma ----------------------------------------------------------------------------------------------------

_FORWARD = {"norm_2": "pre_feedforward_layernorm"}
_CAUSAL = {"use_bidirectional_attention": (False, False, "our attention is causal")}
_GEMMA2 = Kind(
    {"norm": "rms_offset", "sandwich_norms": True, "scaled_embeddings": True},
    keys={
        "tied": ("tie_word_embeddings", True),
        "attention_cap": ("attn_logit_softcapping", 50.0),
        "logit_cap": ("final_logit_softcapping", 30.0),
    },
    must=_CAUSAL,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    unused=("hidden_act",),
    scale="query_pre_attn_scalar",
    window=4096,
    cycle=2,
)
GEMMA2 = family("gemma2", "Gemma2ForCausalLM", _GEMMA2, USUAL | _AFTER | _FORWARD)
GEMMA3 = family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    replace(
        _GEMMA2,
        fixed={**_GEMMA2.fixed, "qk_norm": True},
        keys={
            "tied": ("tie_word_embeddings", True),
            "attention_cap": ("attn_logit_softcapping", 0.0),
            "logit_cap": ("final_logit_softcapping", 0.0),
        },
        cycle=6,
        rope=RopeKind(base=1e6, window_base=1e4, window_key="rope_local_base_freq"),
    ),
    USUAL | _AFTER | _FORWARD | QK_NORMS,
)

# -- layer norm and GELU --------------------------------------------------------------------------------------

_LAYER = {"norm": "layer", "swiglu": False}
STARCODER2 = family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    Kind(
        {**_LAYER, "bias": "all"},
        keys={
            "eps": ("norm_epsilon", 1e-5),
            "tied": ("tie_word_embeddings", True),
            "dropout": ("residual_dropout embedding_dropout", 0.0),
        },
        bias_key=("use_bias", True),
        activation=("hidden_act", "gelu_pytorch_tanh"),
        window=0,
        head_dim=False,
    ),
    USUAL | {"feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"},
)
_NEOX_MLP = {"feed_forward.up": "mlp.dense_h_to_4h", "feed_forward.down": "mlp.dense_4h_to_h"}
_NEOX_NAMES = {
    "tokens": "gpt_neox.embed_in",
    "output": "embed_out",
    "norm": "gpt_neox.final_layer_norm",
    "norm_1": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.out": "attention.dense",
    "norm_2": "post_attention_layernorm",
    **_NEOX_MLP,
}
NEOX = family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    Kind(
        {**_LAYER, "bias": "all"},
        keys={
            "eps": ("layer_norm_eps", 1e-5),
            "dropout": ("hidden_dropout", 0.0),
            "parallel_residual": ("use_parallel_residual", True),
        },
        groups="",
        head_dim=False,
        activation=("hidden_act", "gelu"),
        rope=RopeKind(base_key="rotary_emb_base", part=0.25, part_key="rotary_pct"),
    ),
    _NEOX_NAMES,
    layer="gpt_neox.layers.{n}",
    rows=Rows.GROUPS,
    ignored=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    head="embed_out.weight",
)
FALCON = family(
    "falcon",
    "FalconForCausalLM",
    Kind(
        {**_LAYER, "bias": "all", "parallel_residual": True},
        keys={
            "eps": ("layer_norm_epsilon", 1e-5),
            "dropout": ("hidden_dropout", 0.0),
            "tied": ("tie_word_embeddings", True),
        },
        must={
            "new_decoder_architecture": (True, False, "the older architecture has one norm for both parts"),
            "num_ln_in_parallel_attn": (2, 2, "our attention and feed-forward part have a norm each"),
            "alibi": (False, False, "our positions are rotary or learned"),
        },
        unused=("multi_query", "parallel_attn"),
        bias_key=("bias", False),
        inner="ffn_hidden_size",
        groups="num_kv_heads",
        head_dim=False,
        activation=("activation", "gelu"),
    ),
    _NEOX_NAMES
    | {"tokens": "transformer.word_embeddings", "output": "lm_head", "norm": "transformer.ln_f"}
    | {"norm_1": "ln_attn", "norm_2": "ln_mlp"}
    | {"attention.qkv": "self_attention.query_key_value", "attention.out": "self_attention.dense"},
    layer="transformer.h.{n}",
    rows=Rows.GROUPS,
)
