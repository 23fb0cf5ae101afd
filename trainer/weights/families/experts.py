"""Decoders with a mixture of experts: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.config.model import ModelConfig
from trainer.weights.families.decoders import (
    GATED,
    IGNORED,
    NORMS,
    QK_NORMS,
    Kind,
    fits_decoder,
    read_decoder,
    rules_with,
    write_decoder,
)
from trainer.weights.families.family import Family
from trainer.weights.families.rope import RopeKind
from trainer.weights.keys import Keys
from trainer.weights.rules import Rule, rule

_MIXTRAL = Kind(window=True, eps_default=1e-5, rope=RopeKind(base=1e6))
_QWEN3 = Kind(qk_norm=True)
_BLOCK = "blocks.{n}.feed_forward"


def _rules(norms: dict[str, str], part: str, ups: tuple[str, str], down: str) -> list[Rule]:
    """Return the rules of a decoder with feed-forward part `part`, which has a gate and experts."""
    theirs = f"model.layers.{{n}}.{part}"
    shared = [entry for entry in rules_with(norms, GATED, "down_proj") if _BLOCK not in entry.ours]
    return [
        *shared,
        rule(f"{_BLOCK}.router.weight", f"{theirs}.gate.weight"),
        rule(f"{_BLOCK}.up.weight", *(f"{theirs}.experts.{{e}}.{up}.weight" for up in ups)),
        rule(f"{_BLOCK}.down.weight", f"{theirs}.experts.{{e}}.{down}.weight"),
    ]


def _with_experts(model: ModelConfig, keys: Keys, experts: int, top_k: int, **more: Any) -> ModelConfig:
    if top_k > experts:
        keys.faults.append(f"num_experts_per_tok is {top_k}, but there are {experts} experts")
    aux = keys.real("router_aux_loss_coef", default=0.001)
    return replace(model, experts=experts, top_k=top_k, aux_loss=aux, **more)


def _fits(kind: Kind, model: ModelConfig) -> bool:
    return model.experts > 0 and not model.shared_ffn and fits_decoder(kind, replace(model, experts=0))


def _router(model: ModelConfig) -> dict[str, object]:
    return {
        "num_experts_per_tok": model.top_k,
        "router_aux_loss_coef": model.aux_loss,
        "output_router_logits": False,
    }


# -- Mixtral --------------------------------------------------------------------------------------------------


def _read_mixtral(keys: Keys) -> ModelConfig:
    keys.must_be("router_jitter_noise", 0, 0, "our router adds no noise")
    model = read_decoder(_MIXTRAL, keys)
    experts = keys.number("num_local_experts", "num_experts", default=8)
    return _with_experts(model, keys, experts, keys.number("num_experts_per_tok", default=2))


def _write_mixtral(model: ModelConfig) -> dict[str, object]:
    return {**write_decoder(_MIXTRAL, model), **_router(model), "num_local_experts": model.experts}


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    rules=_rules(NORMS, "block_sparse_moe", ("w1", "w3"), "w2"),
    read=_read_mixtral,
    write=_write_mixtral,
    fits=lambda model: model.renormalize and _fits(_MIXTRAL, model),
    ignored=IGNORED,
)


# -- Qwen3-MoE ------------------------------------------------------------------------------------------------


def _read_qwen3(keys: Keys) -> ModelConfig:
    keys.must_be("decoder_sparse_step", 1, 1, "our layers have all experts, or none")
    keys.must_be("mlp_only_layers", [], [], "our layers have all experts, or none")
    model = read_decoder(_QWEN3, keys)
    experts = keys.number("num_experts", "num_local_experts", default=128)
    return _with_experts(
        model,
        keys,
        experts,
        keys.number("num_experts_per_tok", default=8),
        ffn=keys.number("moe_intermediate_size", default=768),
        renormalize=keys.get("norm_topk_prob", default=False) is True,
    )


def _write_qwen3(model: ModelConfig) -> dict[str, object]:
    return {
        **write_decoder(_QWEN3, model),
        **_router(model),
        "num_experts": model.experts,
        "moe_intermediate_size": model.inner,
        "norm_topk_prob": model.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rules=_rules({**NORMS, **QK_NORMS}, "mlp", ("gate_proj", "up_proj"), "down_proj"),
    read=_read_qwen3,
    write=_write_qwen3,
    fits=lambda model: _fits(_QWEN3, model),
    ignored=IGNORED,
)
