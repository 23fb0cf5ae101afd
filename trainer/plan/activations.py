"""Bytes of activations that the models keep for the backward pass, counted tensor by tensor as the layers make them.

Not a published formula: those are of other kernels. A test holds every count to what torch really keeps.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trainer.config.model_sizes import ModelConfig

# Bytes of a number in fp32.
WIDE = 4
# Queries of a block, as native.cpu.attention has it.
BLOCK = 128


class AttentionCore(enum.Enum):
    """What computes attention, which decides what it keeps for the backward pass."""

    KERNEL = "kernel"
    """A kernel that makes the scores again in the backward pass and keeps none."""
    BLOCKS = "blocks"
    """Products over blocks of queries (native.cpu.attention): half of all probabilities are kept."""
    PRODUCTS = "products"
    """Two products over all queries: all probabilities are kept."""


@dataclass(frozen=True)
class Pass:
    """One micro-batch on one rank."""

    model: ModelConfig
    samples: int
    width: int
    """Bytes of a number that matrices compute with: 2 in bf16 and fp16."""
    kind: str = "cpu"
    """The device, which chooses the kernels."""
    core: AttentionCore = AttentionCore.KERNEL
    tensor: int = 1
    sequence: bool = False
    cast: bool = False
    """Whether autocast makes copies of fp32 weights; else weights and the residual stream are as wide as matrices."""

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
        return (WIDE if self.cast else self.width) * self.own_tokens * self.model.hidden

    @property
    def wide_share(self) -> int:
        """This rank's part of something as wide as the model, in the matrices' type."""
        return self.width * self.tokens * self.model.hidden // self.tensor


def layer(one: Pass, selective: bool = False) -> int:
    """One block; `selective` keeps nothing of attention's inside."""
    model = one.model
    norms = 2 * norm(one)
    # Of what is gathered for a matrix, the own part alone is kept.
    into_matrices = 2 * one.width * one.own_tokens * model.hidden
    inner = one.width * one.tokens * model.inner // one.tensor
    # Gate, up, silu(gate), product.
    feed_forward = 4 * inner if model.swiglu else 2 * inner
    kept = norms + into_matrices + attention(one, selective) + one.wide_share + feed_forward
    return kept + 2 * dropout(one)


def norm(one: Pass) -> int:
    """A layer norm's input, which but for a CPU's kernel is a copy in fp32; means and deviations."""
    copied = one.kind != "cpu" or one.cast
    return (WIDE * one.own_tokens * one.model.hidden if copied else one.residual) + 2 * WIDE * one.own_tokens


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
    if model.attention_dropout:
        return one.wide_share + _handed_to_products(one, qkv, keys) + dropped_scores(one) + _masks(one)
    if one.core is AttentionCore.KERNEL or model.kind == "glm":
        sums = WIDE * one.samples * model.heads // one.tensor * model.sequence
        return _handed(one, qkv, keys) + sums + (_masks(one) if model.kind == "glm" else 0)
    if one.core is AttentionCore.BLOCKS and model.sequence > BLOCK:
        return one.wide_share + _handed(one, qkv, keys, queries=False) + block_scores(one)
    # Scaled queries, keys and values, mask.
    return one.wide_share + _handed_to_products(one, qkv, keys) + scores(one) + _masks(one)


def _handed_to_products(one: Pass, qkv: int, keys: int) -> int:
    """Return the bytes of keys and values: a product of many samples' views copies them."""
    copied = one.model.groups != one.model.heads or one.samples > 1
    return 2 * one.wide_share if copied else _handed(one, qkv, keys, queries=False)


def _masks(one: Pass) -> int:
    """Return the bytes of the mask of unseen keys: one for all samples, or in GLM one for each."""
    return one.model.sequence**2 * (one.samples if one.model.kind == "glm" else 1)


def dropped_scores(one: Pass) -> int:
    """Return the bytes of attention's probabilities before and after their dropout, and of its mask."""
    mask = 1 if one.kind == "cuda" else one.width
    return scores(one) * (2 * one.width + mask) // one.width


def _handed(one: Pass, qkv: int, keys: int, queries: bool = True) -> int:
    """What attention's core is handed: views of the projection, or copies where positions or groups make some."""
    own = one.wide_share if queries else 0
    if one.model.groups != one.model.heads:
        return 2 * one.wide_share + (qkv if queries and not one.model.rotary else own)
    return qkv + keys + own if one.model.rotary else qkv


def block_scores(one: Pass) -> int:
    """Return the bytes of the probabilities that products over blocks of queries keep."""
    length = one.model.sequence
    ends = [min(start + BLOCK, length) for start in range(0, length, BLOCK)]
    seen = sum((end - start) * end for start, end in zip([0, *ends], ends, strict=False))
    return one.width * one.samples * (one.model.heads // one.tensor) * seen


def scores(one: Pass) -> int:
    """Return the bytes of all of attention's probabilities."""
    return one.width * one.samples * (one.model.heads // one.tensor) * one.model.sequence**2


def embedding(one: Pass) -> int:
    """The model's beginning: ids, and the mask of its dropout."""
    return dropout(one) * (WIDE if one.kind != "cuda" else one.width) // one.width + 16 * one.tokens


def head(one: Pass) -> int:
    """The last norm and what goes into the vocabulary's matrix."""
    into_matrix = one.width * one.own_tokens * one.model.hidden
    return norm(one) + into_matrix


def cast_layer(one: Pass) -> int:
    """Copies of one block's matrices in the matrices' type, which autocast makes and the graph keeps."""
    if not one.cast or one.width == WIDE:
        return 0
    model = one.model
    matrices = model.hidden * (model.qkv_width + model.hidden + model.up_width + model.inner)
    return one.width * matrices // one.tensor


def cast_table(one: Pass) -> int:
    """The same of the vocabulary's matrix."""
    if not one.cast or one.width == WIDE:
        return 0
    return one.width * one.model.padded(one.tensor) * one.model.hidden // one.tensor
