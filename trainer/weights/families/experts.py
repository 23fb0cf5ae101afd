"""Decoders with a mixture of experts: one row for each family."""

from __future__ import annotations

from trainer.weights.families.kind import Kind, family
from trainer.weights.families.names import LLAMA, QK_NORMS
from trainer.weights.families.rope import RopeKind

_EXPERTS = {
    "feed_forward.router": "mlp.gate",
    "feed_forward.up": "mlp.experts.{e}.gate_proj mlp.experts.{e}.up_proj",
    "feed_forward.down": "mlp.experts.{e}.down_proj",
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
