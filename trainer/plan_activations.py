"""Bytes of activations that the models keep for the backward pass, counted tensor by tensor as the layers make them.

Not a published formula: those are of other kernels. A test holds every count to what torch really keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.models import ModelConfig

WIDE = 4  # bytes of a number of the residual stream, which stays fp32
QUERIES = 128  # a block of the CPU's attention (native.cpu.attention)


@dataclass(frozen=True)
class Pass:
    """One micro-batch on one rank."""

    model: ModelConfig
    samples: int
    width: int
    """Bytes of a number that matrices compute with: 2 in bf16 and fp16."""
    kind: str = "cpu"
    """The device, which chooses the kernels."""
    tensor: int = 1
    sequence: bool = False

    @property
    def tokens(self) -> int:
        return self.samples * self.model.sequence

    @property
    def own_tokens(self) -> int:
        """Tokens of the residual stream that this rank holds."""
        return self.tokens // self.tensor if self.sequence else self.tokens

    @property
    def residual(self) -> int:
        """The residual stream once."""
        return WIDE * self.own_tokens * self.model.hidden

    @property
    def wide_share(self) -> int:
        """This rank's part of something as wide as the model, in the matrices' type."""
        return self.width * self.tokens * self.model.hidden // self.tensor


def layer(one: Pass, selective: bool = False) -> int:
    """One block; `selective` keeps nothing of attention's inside."""
    model = one.model
    norms = 2 * (one.residual + 2 * WIDE * one.own_tokens)  # inputs, means and deviations
    into_matrices = 2 * one.width * one.tokens * model.hidden
    inner = one.width * one.tokens * model.inner // one.tensor
    feed_forward = 4 * inner if model.swiglu else 2 * inner  # gate, up, silu(gate), product
    kept = norms + into_matrices + attention(one, selective) + one.wide_share + feed_forward
    return kept + 2 * dropout(one)


def dropout(one: Pass) -> int:
    """The mask of one dropout: on a GPU a byte a number, elsewhere a factor."""
    if not one.model.dropout:
        return 0
    return one.own_tokens * one.model.hidden * (1 if one.kind == "cuda" else one.width)


def attention(one: Pass, selective: bool = False) -> int:
    """From the projection of queries, keys and values up to the mixed values, without these."""
    model = one.model
    qkv = one.width * one.tokens * model.qkv_width // one.tensor
    keys = one.width * one.tokens * model.groups * model.head_size // one.tensor
    if selective:
        return _handed(one, qkv, keys)
    if one.kind == "cuda" or model.kind == "glm":
        sums = WIDE * one.samples * model.heads // one.tensor * model.sequence
        masks = one.samples * model.sequence**2 if model.kind == "glm" else 0
        return _handed(one, qkv, keys) + sums + masks
    if one.kind == "cpu" and model.sequence > QUERIES:
        return one.wide_share + _handed(one, qkv, keys, queries=False) + scores(one)
    copied = model.groups != model.heads or one.samples > 1  # a product of many samples' views copies them
    handed = 2 * one.wide_share if copied else _handed(one, qkv, keys, queries=False)
    return one.wide_share + handed + scores(one) + model.sequence**2  # scaled queries, keys and values, mask


def _handed(one: Pass, qkv: int, keys: int, queries: bool = True) -> int:
    """What attention's core is handed: views of the projection, or copies where positions or groups make some."""
    own = one.wide_share if queries else 0
    if one.model.groups != one.model.heads:
        return 2 * one.wide_share + (qkv if queries and not one.model.rotary else own)
    return qkv + keys + own if one.model.rotary else qkv


def scores(one: Pass) -> int:
    """Attention's probabilities, of which the CPU's kernel makes little more than the half that is seen."""
    model, seen = one.model, one.model.sequence**2
    if one.kind == "cpu" and model.sequence > QUERIES:
        starts = range(0, model.sequence, QUERIES)
        seen = sum(min(QUERIES, model.sequence - at) * min(at + QUERIES, model.sequence) for at in starts)
    return one.width * one.samples * (model.heads // one.tensor) * seen


def embedding(one: Pass) -> int:
    """The model's beginning: ids, and the mask of its dropout."""
    return dropout(one) * (WIDE if one.kind != "cuda" else one.width) // one.width + 16 * one.tokens


def head(one: Pass) -> int:
    """The last norm and what goes into the vocabulary's matrix."""
    into_matrix = one.width * one.tokens * one.model.hidden
    return one.residual + 2 * WIDE * one.own_tokens + into_matrix


def cast_layer(one: Pass) -> int:
    """Copies of one block's matrices in the matrices' type, which autocast makes and the graph keeps."""
    if one.width == WIDE:
        return 0
    model = one.model
    matrices = model.hidden * (model.qkv_width + model.hidden + model.up_width + model.inner)
    return one.width * matrices // one.tensor


def cast_table(one: Pass) -> int:
    """The same of the vocabulary's matrix."""
    if one.width == WIDE:
        return 0
    return one.width * one.model.padded(one.tensor) * one.model.hidden // one.tensor
