"""Convert the arguments of a training with Megatron to our config of a model, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from clusterctl.wire.requests import ExportRequest, ImportRequest
from trainer.config.model import ModelConfig
from trainer.config.norm import NORMS
from trainer.config.rope import RopeConfig
from trainer.config.rules import model_faults
from trainer.errors import CheckpointError, InputError
from trainer.weights.contents import Contents
from trainer.weights.families.kind import LONGEST_SAMPLE
from trainer.weights.keys import Keys
from trainer.weights.known_sizes import heads_for, vocab_for
from trainer.weights.lazy import DTYPES, Lazy
from trainer.weights.megatron.names import OUTPUT, layer_of


def model_of(
    source: str, arguments: Mapping[str, object], found: Mapping[str, Sequence[Lazy]], request: ImportRequest
) -> tuple[ModelConfig, list[str]]:
    """Return the model's config from the arguments of the training, or from the shapes if there are no arguments."""
    keys = Keys(f"{source}: args", arguments)
    tables = [found.get(f"embedding.{name}.weight") for name in ("word_embeddings", "position_embeddings")]
    if tables[0] is None:
        raise CheckpointError(f"{source}: contains no embedding.word_embeddings.weight")
    padded_rows = sum(part.rows for part in tables[0])
    layers = 1 + max((layer_of(name) or 0 for name in found), default=0)
    hidden = tables[0][0].shape[1]
    notes: list[str] = []
    recorded = keys.number("num_attention_heads") if arguments else 0
    if request.heads and recorded not in (0, request.heads):
        raise InputError(f"--heads is {request.heads}, and {source} records {recorded}", "leave out --heads")
    heads = request.heads or recorded
    if not heads:
        heads, notes = heads_for(source, "gpt", layers, hidden, 0)
    real = request.vocab or keys.number("vocab_size", default=0, least=0)
    vocab, more = vocab_for("gpt", padded_rows, real if real <= padded_rows else 0)
    positions = tables[1][0].rows if tables[1] else keys.number("max_position_embeddings", default=1024)
    model = from_arguments(keys, layers, hidden, heads, vocab, positions, found)
    keys.faults += [str(fault) for fault in model_faults(model)] if not keys.faults else []
    keys.check()
    return model, notes + more


def from_arguments(
    keys: Keys,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    positions: int,
    found: Mapping[str, Sequence[Lazy]],
) -> ModelConfig:
    """Return the config that Megatron's arguments describe."""
    rotary = "embedding.position_embeddings.weight" not in found
    swiglu = keys.get("swiglu", default=False) is True
    up = found.get("decoder.layers.0.mlp.linear_fc1.weight", [])
    inner = sum(part.rows for part in up) // (2 if swiglu else 1)
    for name, reason in UNMAPPED.items():
        keys.must_be(name, keys.get(name) if not keys.get(name) else None, None, reason)
    tanh = keys.get("openai_gelu", default=False) or keys.get("bias_gelu_fusion", default=True)
    groups = keys.number("num_query_groups", default=heads) if keys.get("group_query_attention") else heads
    size = keys.number("kv_channels", default=0, least=0)
    norms = {kind.megatron: name for name, kind in NORMS.items() if kind.megatron}
    block = "decoder.layers.0."
    return ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        query_groups=0 if groups == heads else groups,
        head_dim=0 if size * heads == hidden else size,
        sequence=min(positions, LONGEST_SAMPLE),
        positions=positions if positions > LONGEST_SAMPLE else 0,
        rotary=rotary,
        rope=_rope(keys) if rotary else RopeConfig(),
        norm=keys.choice("normalization", norms, "LayerNorm"),
        qk_norm=f"{block}self_attention.q_layernorm.weight" in found,
        bias=_bias({name.removeprefix(block) for name in found}),
        tied=OUTPUT not in found or not keys.get("untie_embeddings_and_output_weights", default=False),
        vocab=vocab,
        ffn=0 if inner == 4 * hidden and not swiglu else inner,
        swiglu=swiglu,
        dropout=keys.real("hidden_dropout", default=0.0),
        attention_dropout=keys.real("attention_dropout", default=0.0),
        activation="gelu_tanh" if tanh or swiglu else "gelu",
        eps=keys.real("norm_epsilon", "layernorm_epsilon", default=1e-5),
        init_std=keys.real("init_method_std", default=0.02),
    )


# Arguments that change the model in a way that ours does not support.
UNMAPPED = {
    "apply_residual_connection_post_layernorm": "our blocks add before the norm",
    "apply_layernorm_1p": "our norms multiply by the weight itself",
    "num_experts": "a mixture of experts is not read from Megatron",
    "squared_relu": "our feed-forward part is a GELU, or gated by silu",
    "multi_latent_attention": "our attention has one projection for queries, keys and values",
    "window_size": "Megatron counts windows in another way",
    "use_rope_scaling": "the scaling of rotary positions is not recorded completely",
    "rotary_seq_len_interpolation_factor": "name the scaling in our config instead",
}


def _rope(keys: Keys) -> RopeConfig:
    return RopeConfig(
        base=keys.real("rotary_base", default=10_000.0),
        part=keys.real("rotary_percent", default=1.0),
        interleaved=keys.get("rotary_interleaved", default=False) is True,
    )


def _bias(names: Set[str]) -> str:
    """Return the value of our field `bias` for a block with tensors of these names."""
    if "mlp.linear_fc1.bias" in names:
        return "all"
    return "qkv" if "self_attention.linear_qkv.bias" in names else "none"


# The settings that Megatron has with our default alone.
_UNKNOWN = (
    *("window", "sandwich_norms", "parallel_residual", "input_norms", "qk_norm_whole", "rotated", "gate"),
    *("kv_rank", "attention_scale", "attention_cap", "sinks", "scaled_embeddings", "logit_cap"),
)
_PLAIN = ModelConfig()


def check_fits(model: ModelConfig, wanted: ExportRequest) -> None:
    """Refuse a model that Megatron cannot build, and numbers of ranks or stages that do not divide it."""
    odd = {
        f"kind {model.kind}": model.kind != "gpt",
        f"norm {model.norm}": not NORMS[model.norm].megatron,
        **{name: getattr(model, name) != getattr(_PLAIN, name) for name in _UNKNOWN},
        f"rope scaling {model.rope.scaling}": model.rope.scaling != "none",
    }
    if any(odd.values()):
        settings = ", ".join(name for name, given in odd.items() if given)
        raise InputError(f"Megatron has no model with {settings}", "export it to another format")
    checks = {
        "heads": model.heads,
        "query groups": model.groups,
        "rows of the feed-forward part": model.inner,
    }
    faults = [
        f"--tensor {wanted.tensor} does not divide {value} {name}"
        for name, value in checks.items()
        if value % wanted.tensor
    ]
    if model.layers % wanted.pipeline:
        faults.append(f"--pipeline {wanted.pipeline} does not divide {model.layers} layers")
    if faults:
        raise InputError("\n".join(faults), "use sizes that divide them")


def arguments_for(contents: Contents, wanted: ExportRequest) -> dict[str, object]:
    """Return the arguments from which Megatron builds this model."""
    model = contents.model
    return {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.inner,
        "num_attention_heads": model.heads,
        "kv_channels": model.head_size,
        "group_query_attention": model.groups != model.heads,
        "num_query_groups": model.groups,
        "seq_length": model.sequence,
        "max_position_embeddings": model.context,
        "position_embedding_type": "rope" if model.rotary else "learned_absolute",
        "use_rotary_position_embeddings": model.rotary,
        "rotary_base": model.rope.base,
        "rotary_percent": model.rope.part,
        "rotary_interleaved": model.rope.interleaved,
        "normalization": NORMS[model.norm].megatron,
        "qk_layernorm": model.qk_norm,
        "add_bias_linear": model.bias == "all",
        "add_qkv_bias": model.bias != "none",
        "untie_embeddings_and_output_weights": not model.tied,
        "vocab_size": model.vocab,
        "padded_vocab_size": model.padded(wanted.tensor),
        "make_vocab_size_divisible_by": model.vocab_multiple,
        "swiglu": model.swiglu,
        "openai_gelu": False,
        "bias_gelu_fusion": model.activation == "gelu_tanh" and not model.swiglu,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "layernorm_epsilon": model.eps,
        "norm_epsilon": model.eps,
        "init_method_std": model.init_std,
        "tensor_model_parallel_size": wanted.tensor,
        "pipeline_model_parallel_size": wanted.pipeline,
        "params_dtype": DTYPES[wanted.dtype],
        "bf16": wanted.dtype == "bf16",
        "fp16": wanted.dtype == "fp16",
        "iteration": 0,
        "consumed_train_samples": 0,
    }
