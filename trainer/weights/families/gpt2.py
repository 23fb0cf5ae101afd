"""GPT-2."""

from __future__ import annotations

from trainer.config.model import ModelConfig
from trainer.weights.families.family import ACTIVATIONS, Family
from trainer.weights.keys import Keys
from trainer.weights.rules import pairs, rule


def _read_gpt2(keys: Keys) -> ModelConfig:
    keys.must_be(
        "scale_attn_weights", True, True, "our attention always divides by the root of the head size"
    )
    keys.must_be("scale_attn_by_inverse_layer_idx", False, False, "our attention does not scale by layers")
    keys.must_be("add_cross_attention", False, False, "our GPT has no cross attention")
    positions = keys.number("n_positions", "n_ctx", "max_position_embeddings", default=1024)
    hidden = keys.number("n_embd", "hidden_size", default=768)
    return ModelConfig(
        layers=keys.layers("n_layer", "num_hidden_layers", default=12),
        hidden=hidden,
        heads=keys.number("n_head", "num_attention_heads", default=12),
        sequence=positions,
        tied=keys.get("tie_word_embeddings", default=True) is True,
        vocab=keys.number("vocab_size", default=50257),
        ffn=keys.number("n_inner", default=4 * hidden) if keys.get("n_inner") else 0,
        dropout=keys.real("resid_pdrop", default=0.1),
        attention_dropout=keys.real("attn_pdrop", default=0.1),
        activation=keys.choice("activation_function", ACTIVATIONS, "gelu_new"),
        eps=keys.real("layer_norm_epsilon", default=1e-5),
        init_std=keys.real("initializer_range", default=0.02),
    )


def _write_gpt2(model: ModelConfig) -> dict[str, object]:
    return {
        "activation_function": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
        "attn_pdrop": model.attention_dropout,
        "embd_pdrop": model.dropout,
        "initializer_range": model.init_std,
        "layer_norm_epsilon": model.eps,
        "n_ctx": model.position_rows,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn or None,
        "n_layer": model.layers,
        "n_positions": model.position_rows,
        "resid_pdrop": model.dropout,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "vocab_size": model.vocab,
    }


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    # Hugging Face's Conv1D stores a matrix as inputs x outputs.
    rules=[
        rule("tokens.weight", "wte.weight"),
        rule("positions.weight", "wpe.weight"),
        rule("output.weight", "lm_head.weight"),
        *pairs("blocks.{n}.norm_1", "h.{n}.ln_1"),
        *pairs("blocks.{n}.attention.qkv", "h.{n}.attn.c_attn", transposed=True),
        *pairs("blocks.{n}.attention.out", "h.{n}.attn.c_proj", transposed=True),
        *pairs("blocks.{n}.norm_2", "h.{n}.ln_2"),
        *pairs("blocks.{n}.feed_forward.up", "h.{n}.mlp.c_fc", transposed=True),
        *pairs("blocks.{n}.feed_forward.down", "h.{n}.mlp.c_proj", transposed=True),
        *pairs("norm", "ln_f"),
    ],
    read=_read_gpt2,
    write=_write_gpt2,
    # The files of the original models have no prefix.
    prefixes=("transformer.", ""),
    # Old files also contain the attention mask.
    ignored=r"h\.\d+\.attn\.(bias|masked_bias)",
)
