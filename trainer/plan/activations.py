"""Count the bytes of activations that the models keep for the backward pass, tensor by tensor.

Published formulas do not apply, because they are for other kernels. A test compares each count with what torch keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.attention import WIDE, AttentionCore, Share
from trainer.config.model import ModelConfig
from trainer.config.norm import NORMS


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
    def share(self) -> Share:
        """Return what attention computes."""
        length = self.model.sequence
        return Share(self.samples, length, self.width, self.kind, self.core, self.tensor, self.context)


def layer(micro: MicroBatch, selective: bool = False) -> int:
    """Return the bytes of one block; with `selective`, without the scores of attention."""
    model = micro.model
    norms = block_norms(micro)
    # Of a gathered input only the rank's own part is kept.
    again = micro.norms_again and model.input_norms and not micro.sequence
    stored = 2 if not again else 1 if model.experts else 0
    into_matrices = stored * micro.width * micro.own_tokens * model.hidden
    feed_forward = experts(micro) if model.experts else feed_forward_inner(micro, model.inner)
    saved = norms + into_matrices + model.attention.kept(micro.share, selective) + feed_forward
    # The kernel that adds to a residual stream of its own type keeps no mask; Ascend has no such kernel.
    fused = micro.kind != "npu" and not micro.cast and not model.sandwich_norms
    masks = 0 if fused else 2 * dropout(micro)
    return saved + masks


def inner(micro: MicroBatch, width: int, again: bool = False) -> int:
    """Return the bytes between the two matrices of a feed-forward part: gate, up and product; without a gate two.

    `again`: the backward pass computes the activation again, so that its results are not kept: the product, and what
    GELU makes of a gate.
    """
    model = micro.model
    given = 2 if model.swiglu else 1
    results = 0 if again else 2 if model.swiglu and model.gate != "silu" else 1
    return (given + results) * micro.width * micro.tokens * width // micro.tensor


def feed_forward_inner(micro: MicroBatch, width: int) -> int:
    """Return the bytes of `inner`; the backward pass computes the activation again, but not under autocast."""
    return inner(micro, width, not (micro.cast or micro.adapted))


def experts(micro: MicroBatch) -> int:
    """Return the bytes of equally used experts: rows, inner activations, results and the router's choices."""
    model = micro.model
    chosen = model.top_k * micro.width * micro.tokens * model.hidden // micro.tensor
    # Under autocast the rows are in fp32, and each has a 16-bit copy.
    wide = chosen * (WIDE - micro.width) // micro.width if micro.cast else 0
    return (
        # Under autocast the results are kept in one type only.
        (2 if micro.cast else 3) * chosen
        + wide
        + model.top_k * inner(micro, model.inner)
        + feed_forward_inner(micro, model.shared_ffn)
        + model.router.kept(micro.own_tokens)
    )


def block_norms(micro: MicroBatch) -> int:
    """Return the bytes of a block's norms; norms of the same input share it."""
    model = micro.model
    shared = micro.residual if model.parallel_residual else 0
    after = 2 * norm(micro, micro.width) if model.sandwich_norms else 0
    return (2 * norm(micro) - shared if model.input_norms else 0) + after


def norm(micro: MicroBatch, width: int = 0) -> int:
    """Return the bytes that a norm keeps of the residual stream or of a result of `width`: input, row statistics."""
    size = width or (WIDE if micro.cast else micro.width)
    return NORMS[micro.model.norm].kept(micro.own_tokens, micro.model.hidden, size, micro.cast)


def dropout(micro: MicroBatch) -> int:
    """Return the bytes of the mask of one dropout: on a GPU one byte per number, elsewhere a factor."""
    if not micro.model.dropout:
        return 0
    return micro.own_tokens * micro.model.hidden * (1 if micro.kind == "cuda" else micro.width)


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
