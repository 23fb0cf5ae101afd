"""Count the bytes of activations that the models keep for the backward pass, tensor by tensor.

Published formulas do not apply, because they are for other kernels. A test compares each count with what torch keeps.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trainer.config.model import ModelConfig

# Bytes of an fp32 number.
WIDE = 4


class AttentionCore(enum.Enum):
    """How attention is computed, which decides what it keeps for the backward pass."""

    KERNEL = "kernel"
    """A kernel that recomputes the scores in the backward pass and keeps none."""
    PRODUCTS = "products"
    """Two products over all queries, which keep all probabilities."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on one rank."""

    model: ModelConfig
    samples: int
    width: int
    """Bytes per number in matrix products: 2 with bf16 and fp16."""
    kind: str = "cpu"
    """The kind of device, which decides the kernels."""
    core: AttentionCore = AttentionCore.KERNEL
    tensor: int = 1
    sequence: bool = False
    cast: bool = False
    """Whether autocast copies fp32 weights; if not, weights and the residual stream have the type of the products."""
    context: int = 1
    """Context parallel ranks: `model.sequence` is this rank's part of the samples, but keys are of the whole."""
    adapted: bool = False
    """Whether the matrices have adapters."""
    norms_again: bool = False
    """Whether the results of norms that enter a matrix are computed again."""

    @property
    def tokens(self) -> int:
        return self.samples * self.model.sequence

    @property
    def own_tokens(self) -> int:
        """Return for how many tokens this rank holds the residual stream."""
        return self.tokens // self.tensor if self.sequence else self.tokens

    @property
    def residual(self) -> int:
        """Return the bytes of one copy of the residual stream."""
        return (WIDE if self.cast else self.width) * self.own_tokens * self.model.hidden

    @property
    def wide_share(self) -> int:
        """Return the bytes of this rank's part of a (tokens, hidden) tensor in the type of the products."""
        return self.width * self.tokens * self.model.hidden // self.tensor

    @property
    def heads_share(self) -> int:
        """Return the bytes of this rank's queries, which are also those of its attention result."""
        return self.width * self.tokens * self.model.attention.width // self.tensor

    @property
    def is_masked(self) -> bool:
        """Return whether attention has a mask other than the causal one."""
        return self.model.kind == "glm" or 0 < self.model.window < self.model.sequence


def layer(micro: MicroBatch, selective: bool = False) -> int:
    """Return the bytes of one block; with `selective`, without the scores of attention."""
    model = micro.model
    norms = block_norms(micro)
    # Of a gathered input only the rank's own part is kept.
    stored = 2 if not micro.norms_again or micro.sequence else 1 if model.experts else 0
    into_matrices = stored * micro.width * micro.own_tokens * model.hidden
    feed_forward = experts(micro) if model.experts else feed_forward_inner(micro, model.inner)
    saved = norms + into_matrices + attention(micro, selective) + micro.heads_share + feed_forward
    # The kernel that adds to a residual stream of its own type keeps no mask; Ascend has no such kernel.
    fused = micro.kind != "npu" and not micro.cast and not model.sandwich_norms
    masks = 0 if fused else 2 * dropout(micro)
    return saved + masks


def inner(micro: MicroBatch, width: int) -> int:
    """Return the bytes between the two matrices of a feed-forward part: gate, up and product; without a gate two."""
    return (3 if micro.model.swiglu else 2) * micro.width * micro.tokens * width // micro.tensor


def feed_forward_inner(micro: MicroBatch, width: int) -> int:
    """Return the bytes of `inner` without the activation, if the backward pass recomputes it."""
    again = 0 if micro.cast or micro.adapted else micro.width * micro.tokens * width // micro.tensor
    return inner(micro, width) - again


def experts(micro: MicroBatch) -> int:
    """Return the bytes of equally used experts: rows, inner activations, results and the router's choices."""
    model = micro.model
    chosen = model.top_k * micro.width * micro.tokens * model.hidden // micro.tensor
    router = micro.own_tokens * (WIDE * model.experts + model.top_k * 34)
    # Under autocast the rows are in fp32, and each has a 16-bit copy.
    wide = chosen * (WIDE - micro.width) // micro.width if micro.cast else 0
    return (
        # Under autocast the results are kept in one type only.
        (2 if micro.cast else 3) * chosen
        + wide
        + model.top_k * inner(micro, model.inner)
        + feed_forward_inner(micro, model.shared_ffn)
        + router
    )


def block_norms(micro: MicroBatch) -> int:
    """Return the bytes of a block's norms; norms of the same input share it."""
    model = micro.model
    shared = micro.residual if model.parallel_residual else 0
    after = 2 * norm(micro, micro.width) if model.sandwich_norms else 0
    return 2 * norm(micro) - shared + after


def norm(micro: MicroBatch, width: int = 0) -> int:
    """Return the bytes that a norm keeps of the residual stream or of a result of `width`: input, row statistics."""
    if micro.model.norm == "rms":
        own = micro.own_tokens
        return (width * own * micro.model.hidden if width else micro.residual) + WIDE * own
    given = WIDE * micro.own_tokens * micro.model.hidden if micro.cast else micro.residual
    return given + 2 * WIDE * micro.own_tokens


def dropout(micro: MicroBatch) -> int:
    """Return the bytes of the mask of one dropout: on a GPU one byte per number, elsewhere a factor."""
    if not micro.model.dropout:
        return 0
    return micro.own_tokens * micro.model.hidden * (1 if micro.kind == "cuda" else micro.width)


def attention(micro: MicroBatch, selective: bool = False) -> int:
    """Return the bytes that attention keeps between its projection and its result; the result is not counted."""
    model = micro.model
    rows = WIDE * micro.tokens * (model.heads + model.groups) // micro.tensor if model.qk_norm else 0
    own = micro.width * micro.tokens * model.attention.keys // micro.tensor
    # The gathered keys and values of the other ranks.
    gathered = 2 * own * micro.context if micro.context > 1 else 0
    return rows + gathered + _core(micro, selective)


def _core(micro: MicroBatch, selective: bool) -> int:
    model = micro.model
    qkv = micro.width * micro.tokens * model.attention.outputs // micro.tensor
    keys = micro.width * micro.tokens * model.attention.keys // micro.tensor
    if selective:
        return _handed(micro, qkv, keys)
    own_kernel = micro.core is AttentionCore.KERNEL and micro.kind == "cpu"
    # The kernels of a CPU and of CUDA make the mask of dropout again in the backward pass.
    if model.attention_dropout and not (micro.core is AttentionCore.KERNEL and micro.kind in ("cpu", "cuda")):
        return (
            micro.heads_share + _handed_to_products(micro, qkv, keys) + dropped_scores(micro) + _masks(micro)
        )
    if micro.core is AttentionCore.KERNEL:
        sums = WIDE * micro.samples * model.heads // micro.tensor * model.sequence
        # Kernels other than the CPU's need a dense mask.
        dense = micro.width * _masks(micro) if micro.is_masked and not own_kernel else 0
        return _handed(micro, qkv, keys) + sums + dense
    # Scaled queries, keys and values, and the mask.
    return micro.heads_share + _handed_to_products(micro, qkv, keys) + scores(micro) + _masks(micro)


def _handed_to_products(micro: MicroBatch, qkv: int, keys: int) -> int:
    """Return the bytes of the inputs of the attention products; with several samples the inputs are copied."""
    copied = micro.model.groups != micro.model.heads or micro.samples > 1
    if copied:
        return 2 * micro.heads_share + (qkv if micro.model.qk_norm else 0)
    return _handed(micro, qkv, keys, queries=False)


def _masks(micro: MicroBatch) -> int:
    """Return the bytes of the attention mask: one for all samples, or with GLM one for each."""
    return micro.model.sequence**2 * (micro.samples if micro.model.kind == "glm" else 1)


def dropped_scores(micro: MicroBatch) -> int:
    """Return the bytes of attention's probabilities before and after dropout, and of the dropout factors."""
    return 3 * scores(micro)


def _handed(micro: MicroBatch, qkv: int, keys: int, queries: bool = True) -> int:
    """Return the bytes of attention's inputs: views of the projection, or copies after rotary positions or norms.

    A CPU rotates in place.
    """
    own = micro.heads_share if queries else 0
    copied = micro.model.qk_norm or (micro.model.rotary and micro.kind != "cpu")
    return qkv + keys + own if copied else qkv


def scores(micro: MicroBatch) -> int:
    """Return the bytes of all attention probabilities."""
    of_a_head = micro.context * micro.model.sequence**2
    return micro.width * micro.samples * (micro.model.heads // micro.tensor) * of_a_head


def embedding(micro: MicroBatch) -> int:
    """Return the bytes that the embedding keeps: ids, and its dropout mask."""
    return dropout(micro) * (WIDE if micro.kind != "cuda" else micro.width) // micro.width + 16 * micro.tokens


def head(micro: MicroBatch) -> int:
    """Return the bytes of the last norm and of the output matrix's input."""
    into_matrix = micro.width * micro.own_tokens * micro.model.hidden
    return norm(micro) + into_matrix


def cast_layer(micro: MicroBatch) -> int:
    """Return the bytes of the copies of one block's weights that autocast makes and the graph keeps."""
    if not micro.cast or micro.width == WIDE:
        return 0
    return micro.width * micro.model.matrix_parameters() // micro.tensor


def cast_table(micro: MicroBatch) -> int:
    """Return the bytes of autocast's copy of the output matrix."""
    if not micro.cast or micro.width == WIDE:
        return 0
    return micro.width * micro.model.padded(micro.tensor) * micro.model.hidden // micro.tensor
