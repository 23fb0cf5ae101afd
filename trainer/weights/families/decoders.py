"""Decoders with rotary positions: Llama, Mistral, Qwen, GLM-4, StarCoder2 and GPT-NeoX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from trainer.config.model import ModelConfig
from trainer.weights.attention import Rows
from trainer.weights.families.family import ACTIVATIONS, Family, is_like
from trainer.weights.families.rope import WHOLE, RopeKind, read_rope, write_rope
from trainer.weights.keys import Keys
from trainer.weights.rules import Rule, pairs, rule

# The longest sample of a training; models for longer texts keep their length in `positions`.
LONGEST_SAMPLE = 8192


@dataclass(frozen=True)
class Kind:
    """The properties in which the config of one family differs from those of others."""

    bias: str = "none"
    """The value of our field `bias` if config.json does not contain it."""
    bias_key: str = ""
    """The key that turns these biases on or off."""
    qk_norm: bool = False
    sandwich_norms: bool = False
    window: bool = False
    """Whether every layer may have an attention window."""
    usual_window: int = 0
    """The window if config.json does not contain the key."""
    rope: RopeKind = WHOLE
    gated: bool = True
    eps: str = "rms_norm_eps"
    eps_default: float = 1e-6
    activation: str = "silu"
    tied: bool = False
    head_dim: bool = True
    """Whether the config can contain the size of a head."""
    dropout: str = ""
    """The key of the activations' dropout."""

    @property
    def norm(self) -> str:
        """Return the value of our field `norm`."""
        return "rms" if self.gated else "layer"


def read_decoder(kind: Kind, keys: Keys) -> ModelConfig:
    hidden = keys.number("hidden_size")
    heads = keys.number("num_attention_heads")
    groups = keys.number("num_key_value_heads", default=heads)
    positions = keys.number("max_position_embeddings", default=2048)
    size = keys.number("head_dim", default=0, least=0)
    if not kind.head_dim and size not in (0, hidden // heads):
        keys.faults.append(f"head_dim is {size}: heads of this family are hidden_size / num_attention_heads")
    activation = _activation(kind, keys)
    for key in ("mlp_bias", "attention_bias", "use_bias"):
        if key != kind.bias_key:
            usual = kind.bias == "all" and key != "mlp_bias"
            keys.must_be(key, usual, usual, "our matrices of this family have other biases")
    bias = kind.bias
    if kind.bias_key:
        bias = kind.bias if keys.get(kind.bias_key, default=kind.bias != "none") is True else "none"
    return ModelConfig(
        layers=keys.layers("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        query_groups=0 if groups == heads else groups,
        head_dim=0 if size * heads == hidden else size,
        sequence=min(positions, LONGEST_SAMPLE),
        positions=positions if positions > LONGEST_SAMPLE else 0,
        rotary=True,
        rope=read_rope(keys, kind.rope),
        window=_window(kind, keys),
        norm=kind.norm,
        qk_norm=kind.qk_norm,
        sandwich_norms=kind.sandwich_norms,
        bias=bias,
        tied=keys.get("tie_word_embeddings", default=kind.tied) is True,
        vocab=keys.number("vocab_size"),
        ffn=keys.number("intermediate_size"),
        swiglu=kind.gated,
        dropout=keys.real(kind.dropout, default=0.0) if kind.dropout else 0.0,
        attention_dropout=keys.real("attention_dropout", default=0.0),
        activation=activation,
        eps=keys.real(kind.eps, default=kind.eps_default),
        init_std=keys.real("initializer_range", default=0.02),
    )


def _activation(kind: Kind, keys: Keys) -> str:
    if kind.gated:
        keys.must_be("hidden_act", "silu", "silu", "our gated layers use silu")
        return "gelu_tanh"
    return keys.choice("hidden_act", ACTIVATIONS, kind.activation)


def _window(kind: Kind, keys: Keys) -> int:
    """Return the attention window of all layers, or 0; it is a fault if the layers differ."""
    given = keys.get("layer_types", default=[])
    kinds = {str(each) for each in given} if isinstance(given, list) else {"?"}
    # Only an explicit null is no window.
    usual = 0 if "sliding_window" in keys.document else kind.usual_window
    window = keys.number("sliding_window", default=usual, least=0) if kind.window else 0
    wanted = {"sliding_attention"} if window else {"full_attention"}
    if kinds - wanted or (not kind.window and keys.get("use_sliding_window", default=False)):
        keys.faults.append("layer_types or use_sliding_window: our layers all have the same window")
    return window


def write_decoder(kind: Kind, model: ModelConfig) -> dict[str, object]:
    found = {
        "attention_dropout": model.attention_dropout,
        "hidden_act": "silu" if kind.gated else _gelu(model),
        "hidden_size": model.hidden,
        "initializer_range": model.init_std,
        "intermediate_size": model.inner,
        "max_position_embeddings": model.context,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.groups,
        "vocab_size": model.vocab,
        kind.eps: model.eps,
        **write_rope(model, with_part=kind.rope.part != 1.0),
    }
    if kind.head_dim:
        found["head_dim"] = model.head_size
    if kind.bias_key:
        found[kind.bias_key] = model.bias != "none"
    if kind.window:
        found["sliding_window"] = model.window or None
    if kind.dropout:
        found |= {kind.dropout: model.dropout, "embedding_dropout": model.dropout}
    return found


def _gelu(model: ModelConfig) -> str:
    return "gelu_pytorch_tanh" if model.activation == "gelu_tanh" else "gelu"


def fits_decoder(kind: Kind, model: ModelConfig) -> bool:
    biases = (kind.bias, "none") if kind.bias_key else (kind.bias,)
    free = ("bias", "window", "groups", "head_dim")
    same = {"qk_norm": kind.qk_norm, "sandwich_norms": kind.sandwich_norms, "swiglu": kind.gated}
    return (
        is_like(model, *free, rotary=True, norm=kind.norm, **same)
        and model.bias in biases
        and model.rope.interleaved == kind.rope.interleaved
        and (kind.rope.part != 1.0 or model.rope.part == 1.0)
        and (kind.window or not model.window)
        and (kind.head_dim or model.attention.width == model.hidden)
    )


def rules_with(norms: Mapping[str, str], ups: tuple[str, ...], down: str) -> list[Rule]:
    """Return the names that these families share, for all biases and norms that a model may have."""
    block, theirs = "blocks.{n}", "model.layers.{n}"
    found = [
        rule("tokens.weight", "model.embed_tokens.weight"),
        rule("output.weight", "lm_head.weight"),
        *pairs("norm", "model.norm"),
        *pairs(f"{block}.attention.out", f"{theirs}.self_attn.o_proj"),
        *pairs(f"{block}.feed_forward.down", f"{theirs}.mlp.{down}"),
    ]
    for ours, name in norms.items():
        found += pairs(f"{block}.{ours}", f"{theirs}.{name}")
    qkv = pairs(f"{block}.attention.qkv", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"))
    up = pairs(f"{block}.feed_forward.up", *(f"{theirs}.mlp.{up}" for up in ups))
    return [*found, qkv[0], up[0], qkv[1], up[1]]


NORMS = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
SANDWICH = {"post_norm_1": "post_self_attn_layernorm", "post_norm_2": "post_mlp_layernorm"}
GATED = ("gate_proj", "up_proj")
IGNORED = r".*\.rotary_emb\.inv_freq"


def _family(name: str, architecture: str, kind: Kind, rules: list[Rule]) -> Family:
    read: Callable[[Keys], ModelConfig] = partial(read_decoder, kind)
    return Family(
        name,
        architecture,
        rules,
        read,
        partial(write_decoder, kind),
        partial(fits_decoder, kind),
        ignored=IGNORED,
    )


LLAMA = _family("llama", "LlamaForCausalLM", Kind(), rules_with(NORMS, GATED, "down_proj"))
MISTRAL = _family(
    "mistral",
    "MistralForCausalLM",
    Kind(window=True, usual_window=4096),
    rules_with(NORMS, GATED, "down_proj"),
)
QWEN2 = _family(
    "qwen2", "Qwen2ForCausalLM", Kind(bias="qkv", head_dim=False), rules_with(NORMS, GATED, "down_proj")
)
QWEN3 = _family(
    "qwen3",
    "Qwen3ForCausalLM",
    Kind(bias="none", qk_norm=True),
    rules_with({**NORMS, **QK_NORMS}, GATED, "down_proj"),
)
STARCODER2 = _family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    Kind(
        bias="all",
        bias_key="use_bias",
        window=True,
        gated=False,
        eps="norm_epsilon",
        eps_default=1e-5,
        activation="gelu_pytorch_tanh",
        tied=True,
        head_dim=False,
        dropout="residual_dropout",
    ),
    rules_with(NORMS, ("c_fc",), "c_proj"),
)
_GLM = Kind(
    bias="qkv",
    bias_key="attention_bias",
    rope=RopeKind(part=0.5, interleaved=True),
    eps_default=1.5625e-7,
    tied=False,
)
GLM = _family("glm", "GlmForCausalLM", _GLM, rules_with(NORMS, ("gate_up_proj",), "down_proj"))
GLM4 = _family(
    "glm4",
    "Glm4ForCausalLM",
    replace(_GLM, sandwich_norms=True),
    rules_with({**NORMS, **SANDWICH}, ("gate_up_proj",), "down_proj"),
)


# -- GPT-NeoX -------------------------------------------------------------------------------------------------


def _read_neox(keys: Keys) -> ModelConfig:
    hidden, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    positions = keys.number("max_position_embeddings", default=2048)
    keys.must_be("attention_bias", True, True, "our matrices of this family have biases")
    usual = hidden // heads
    keys.must_be("head_dim", usual, usual, "heads of this family are hidden_size / num_attention_heads")
    inner = keys.number("intermediate_size", default=4 * hidden)
    return ModelConfig(
        layers=keys.layers("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        sequence=min(positions, LONGEST_SAMPLE),
        positions=positions if positions > LONGEST_SAMPLE else 0,
        rotary=True,
        rope=read_rope(keys, RopeKind(base_key="rotary_emb_base", part=0.25, part_key="rotary_pct")),
        parallel_residual=keys.get("use_parallel_residual", default=True) is True,
        tied=keys.get("tie_word_embeddings", default=False) is True,
        vocab=keys.number("vocab_size"),
        ffn=0 if inner == 4 * hidden else inner,
        dropout=keys.real("hidden_dropout", default=0.0),
        attention_dropout=keys.real("attention_dropout", default=0.0),
        activation=keys.choice("hidden_act", ACTIVATIONS, "gelu"),
        eps=keys.real("layer_norm_eps", default=1e-5),
        init_std=keys.real("initializer_range", default=0.02),
    )


def _write_neox(model: ModelConfig) -> dict[str, object]:
    return {
        "attention_bias": True,
        "attention_dropout": model.attention_dropout,
        "hidden_act": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
        "hidden_dropout": model.dropout,
        "hidden_size": model.hidden,
        "initializer_range": model.init_std,
        "intermediate_size": model.inner,
        "layer_norm_eps": model.eps,
        "max_position_embeddings": model.context,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "rotary_emb_base": model.rope.base,
        "rotary_pct": model.rope.part,
        "use_parallel_residual": model.parallel_residual,
        "vocab_size": model.vocab,
        **write_rope(model, with_part=True),
    }


def _fits_neox(model: ModelConfig) -> bool:
    return is_like(model, "parallel_residual", "experts", rotary=True) and not model.rope.interleaved


NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    rules=[
        rule("tokens.weight", "gpt_neox.embed_in.weight"),
        rule("output.weight", "embed_out.weight"),
        *pairs("norm", "gpt_neox.final_layer_norm"),
        *pairs("blocks.{n}.norm_1", "gpt_neox.layers.{n}.input_layernorm"),
        *pairs("blocks.{n}.norm_2", "gpt_neox.layers.{n}.post_attention_layernorm"),
        *pairs(
            "blocks.{n}.attention.qkv",
            "gpt_neox.layers.{n}.attention.query_key_value",
            rows=Rows.GROUPS,
        ),
        *pairs("blocks.{n}.attention.out", "gpt_neox.layers.{n}.attention.dense"),
        *pairs("blocks.{n}.feed_forward.up", "gpt_neox.layers.{n}.mlp.dense_h_to_4h"),
        *pairs("blocks.{n}.feed_forward.down", "gpt_neox.layers.{n}.mlp.dense_4h_to_h"),
    ],
    read=_read_neox,
    write=_write_neox,
    fits=_fits_neox,
    ignored=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    head="embed_out.weight",
)
