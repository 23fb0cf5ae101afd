"""The names of tensors in files of Hugging Face, for each module of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.weights.attention import Rows
from trainer.weights.rules import Rule, pairs, rule

WITH_GATE = "mlp.gate_proj mlp.up_proj"
LLAMA = {
    "tokens": "model.embed_tokens",
    "output": "lm_head",
    "norm": "model.norm",
    "norm_1": "input_layernorm",
    "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "norm_2": "post_attention_layernorm",
    "feed_forward.up": WITH_GATE,
    "feed_forward.down": "mlp.down_proj",
}
QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
# Our setting for biases of queries, keys and values alone.
INPUT_BIAS = {"bias": "qkv"}
OF_MODEL = ("tokens", "output", "norm")


def rules_for(
    names: Mapping[str, str],
    layer: str = "model.layers.{n}",
    rows: Rows = Rows.SECTIONS,
    more: Sequence[Rule] = (),
) -> list[Rule]:
    """Return the rules for our modules and their names in a file, which in a block begin with `layer`.

    A key that begins with `dense` is that of layers without experts in a model with experts. A name of several modules
    is that of their rows, one after the other. `rows`: the order in the matrix of queries, keys and values.
    """
    found = list(more)
    for key, theirs in names.items():
        ours = key.removeprefix("dense ")
        if ours in OF_MODEL:
            found += pairs(ours, theirs)
        elif ours.endswith(".bias"):
            found.append(rule(f"blocks.{{n}}.{ours}", f"{layer}.{theirs}"))
        elif f"{ours}.bias" in names:
            found.append(rule(f"blocks.{{n}}.{ours}.weight", f"{layer}.{theirs}.weight"))
        elif ".experts." in theirs:
            found.append(
                rule(f"blocks.{{n}}.{ours}.weight", *(f"{layer}.{name}.weight" for name in theirs.split()))
            )
        else:
            order = rows if ours == "attention.qkv" else Rows.SECTIONS
            both = pairs(f"blocks.{{n}}.{ours}", *(f"{layer}.{name}" for name in theirs.split()), rows=order)
            found += [replace(each, dense=key != ours) for each in both]
    return found
