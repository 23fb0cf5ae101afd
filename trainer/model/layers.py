"""The layers of both models. Fused ops come from `native`, exchanges between ranks from `parallel`.

A rank has some of a layer's heads and some of its inner width; a single rank has all of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from native import products
from native.reference import capped
from trainer.config.layout import Piece, pieces_of
from trainer.config.model import ModelConfig
from trainer.model.attention.heads import Attention
from trainer.model.attention.latent import LatentAttention
from trainer.model.attention.sight import PLAIN, Sight, picked
from trainer.model.cuts import Cut, cuts_of
from trainer.model.dropout import Seeds, dropout_add
from trainer.model.experts import Experts
from trainer.model.feed_forward import FeedForward
from trainer.model.linear import Source
from trainer.model.masks import UNCOUNTED
from trainer.model.norm import Norm, norm_of
from trainer.model.recompute import NOTHING, Recompute
from trainer.parallel.tensor import ALONE, Parallel, column_linear

INTO_RESIDUAL = ("attention.out.weight", "feed_forward.down.weight")


class TokenTable(nn.Module):
    """The token embedding, the output matrix, or both in one; its rows are divided among the ranks.

    The padding (to a multiple of `vocab_multiple` rows per rank) starts at zero and never enters the loss. It gets no
    gradient and stays zero: the padded model computes exactly the same as the unpadded one.
    """

    def __init__(
        self, config: ModelConfig, ops: native.Choice, parallel: Parallel, both: bool = False
    ) -> None:
        """`both`: this rank uses the table as embedding and as output matrix."""
        super().__init__()
        rows = config.padded(parallel.size) // parallel.size
        self.weight = nn.Parameter(torch.zeros(rows, config.hidden))
        self.cuts = {"weight": Cut(0, rows=config.vocab)}
        self.first = rows * parallel.rank
        # The rows of this rank without padding.
        self.real = min(rows, max(0, config.vocab - self.first))
        self.vocab, self.ops, self.parallel, self.both = config.vocab, ops, parallel, both
        self.cap = config.logit_cap
        # The table as the last embedding returned it for the loss.
        self.other: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return embeddings (batch, sequence, hidden); with sequence parallel, of this rank's part of the sequence."""
        if self.parallel.size == 1:
            return self._rows(tokens)
        own = tokens - self.first
        elsewhere = (own < 0) | (own >= len(self.weight))
        found = self._rows(own.masked_fill(elsewhere, 0))
        return self.parallel.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))

    def _rows(self, ids: Tensor) -> Tensor:
        self.other = None
        if not self.both or not torch.is_grad_enabled():
            return self.ops.embedding(ids, self.weight)
        rows, self.other = self.ops.tied_embedding(ids, self.weight)
        return rows

    def output_matrix(self) -> Tensor:
        """Return the table for a loss of the last embeddings; its first use costs no second gradient of the table."""
        other, self.other = self.other, None
        return self.weight if other is None else other

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary on every rank; without gradient."""
        own = column_linear(x, self.weight, None, self.parallel)
        return capped(self.parallel.gather(own, -1)[..., : self.vocab], self.cap)

    def whole_logits(self, x: Tensor) -> Tensor:
        """Return the logits of rows that are whole on every rank, even with sequence parallel; without gradient."""
        return capped(self.parallel.gather(products.linear(x, self.weight), -1)[..., : self.vocab], self.cap)

    def loss(self, x: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the mean cross-entropy over the targets that are not -100.

        `smoothing`: this fraction of each target's probability is spread evenly over the vocabulary.
        """
        x, targets = x.flatten(0, 1) if self.parallel.size == 1 else x, targets.flatten()
        if self.parallel.size == 1 and not self.cap:
            loss = self.ops.linear_cross_entropy(x, self.output_matrix(), targets, self.vocab)
            return loss + smoothing * self.above_mean(x, targets) if smoothing else loss
        own = capped(column_linear(x, self.output_matrix(), None, self.parallel), self.cap)
        part = native.VocabularyPart(self.vocab, self.first, self.real, self.parallel.stacked)
        return self.ops.vocabulary_cross_entropy(own.flatten(0, -2), targets, part, smoothing)

    def above_mean(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean difference between the logits of the targets and the mean logit.

        Smoothed cross-entropy is the plain one plus `smoothing` times this; it needs no logits of the whole vocabulary.
        """
        counts = targets != UNCOUNTED
        with torch.autocast(x.device.type, enabled=False):
            wanted = F.embedding(targets.masked_fill(~counts, 0), self.weight).float()
            mean = self.weight[: self.vocab].float().mean(0)
            above = (x.float() * (wanted - mean)).sum(-1)
        return above.masked_fill(~counts, 0.0).sum() / counts.sum()


class PositionTable(nn.Module):
    """Learned position embeddings; every rank has all of them."""

    def __init__(self, config: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        self.cuts = {"weight": Cut(partial=True)}
        self.weight = nn.Parameter(torch.zeros(config.position_rows, config.hidden))
        self.parallel = parallel

    def forward(self, at: Tensor) -> Tensor:
        """Return embeddings of the positions `at`; with sequence parallel, of this rank's part of them."""
        if self.parallel.divides_sequence:
            at = at.chunk(self.parallel.size, -1)[self.parallel.rank]
        return F.embedding(at, self.weight)


class Block(nn.Module):
    """Attention and feed-forward, each after its norm and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        ops: native.Choice,
        parallel: Parallel = ALONE,
        recompute: Recompute = NOTHING,
        seeds: Seeds | None = None,
    ) -> None:
        """`seeds`: those of the whole model."""
        super().__init__()
        self.seeds = seeds or Seeds()
        self.norm_1 = norm_of(config, ops) if config.input_norms else None
        kind = LatentAttention if config.kv_rank else Attention
        self.attention = kind(config, ops, parallel, recompute)
        self.norm_2 = norm_of(config, ops) if config.input_norms else None
        self.feed_forward: FeedForward | Experts = (Experts if config.experts else FeedForward)(
            config, ops, parallel
        )
        self.post_norm_1, self.post_norm_2 = (
            norm_of(config, ops) if config.sandwich_norms else None for _ in range(2)
        )
        self.parallel_residual = config.parallel_residual
        self.dropout, self.ops, self.recompute = config.dropout, ops, recompute
        self.run: Callable[..., Tensor] = Block.compute
        """Runs `compute` of a block that it is given."""

    def forward(self, x: Tensor, sight: Sight = PLAIN, wanted: Tensor | None = None) -> Tensor:
        """Return the block's result; `wanted`: only for these rows, as one sample (indices over all samples).

        The last block of a model thus computes only what its loss reads. Experts still see all rows.
        """
        drops = self.training and self.dropout > 0
        return self.run(self, x, sight, wanted, self.seeds.next(2) if drops else None)

    def compute(self, x: Tensor, sight: Sight, wanted: Tensor | None, seeds: Tensor | None) -> Tensor:
        """Return the result of `forward`; `seeds` are those of the two dropouts, None without dropout."""
        if wanted is not None and isinstance(self.feed_forward, Experts):
            return picked(self.compute(x, sight, None, seeds), wanted)
        given = self._source(self.norm_1, x)
        chosen = () if wanted is None else (wanted,)
        normal = x if self.norm_1 is None else self.norm_1(x)
        mixed = self.attention(normal, sight, *chosen, **given)
        x = picked(x, wanted)
        first, second = (None, None) if seeds is None else (seeds[0], seeds[1])
        if self.norm_2 is None:
            normal = added = self._added(x, mixed, self.post_norm_1, first)
        elif seeds is not None or self.post_norm_1 is not None or self.parallel_residual:
            added = self._added(x, mixed, self.post_norm_1, first)
            normal = self.norm_2(x if self.parallel_residual else added)
        else:
            added, normal = self.norm_2(mixed, x)
        if isinstance(self.feed_forward, Experts):
            return self._added(added, self.feed_forward(normal, sight.aux_weight), self.post_norm_2, second)
        given = self._source(self.norm_2, x if self.parallel_residual else added)
        return self._added(added, self.feed_forward(normal, **given), self.post_norm_2, second)

    def _source(self, norm: Norm | None, x: Tensor) -> dict[str, Source]:
        """Return the argument that tells a matrix how to compute its input, the norm of `x`, again; or nothing."""
        if norm is None or not self.recompute.norms or not torch.is_grad_enabled():
            return {}
        return {"source": Source(x, norm)}

    def _added(self, x: Tensor, part: Tensor, post_norm: Norm | None, seed: Tensor | None) -> Tensor:
        """Return the residual stream plus the result `part` of attention or of the feed-forward part."""
        if post_norm is not None:
            normal: Tensor = post_norm(F.dropout(part, self.dropout, self.training))
            return x + normal
        return x + part if seed is None else dropout_add(self.ops, part, x, self.dropout, seed)


def residual_deviation(config: ModelConfig) -> float:
    """Return GPT-2's initial standard deviation for matrices that write into the residual stream."""
    return config.init_std / math.sqrt(2 * config.layers)


@torch.no_grad()
def initialize(model: nn.Module, std: float, into_residual: float, seed: int, parallel: Parallel) -> None:
    """Draw matrices from normal(0, std); those that write into the residual stream from normal(0, into_residual).

    Each is drawn whole, by a generator seeded with its name, and then cut: every layout starts with the same model.
    """
    cuts = cuts_of(model)
    for name, parameter in model.named_parameters():
        # Biases and layer norms are already 0 and 1.
        if parameter.dim() >= 2 and not parameter.is_meta:
            shape = cuts[name].whole_shape(parameter.shape, parallel.size)
            whole = drawn_matrix(name, shape, std, into_residual, seed)
            parameter.copy_(cuts[name].take(whole, parameter.shape[0], parallel))


def drawn_matrix(name: str, shape: Sequence[int], std: float, into_residual: float, seed: int) -> Tensor:
    """Return the initial values of a whole matrix; they depend only on its name and the seed."""
    deviation = into_residual if name.endswith(INTO_RESIDUAL) else std
    return torch.empty(tuple(shape)).normal_(0.0, deviation, generator=generator_of(seed, name))


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return a generator seeded by `seed` and `name`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


class Transformer(nn.Module):
    """The base of both models: tokens and positions, blocks, a norm and the output matrix."""

    joins_samples = False
    """Whether the samples of a micro-batch are one row, as long as they are together."""

    def __init__(
        self,
        config: ModelConfig,
        ops: native.Choice,
        seed: int | None = 1234,
        parallel: Parallel = ALONE,
        recompute: Recompute = NOTHING,
        pieces: Sequence[Piece] = (),
    ) -> None:
        """`pieces`: the layers that this rank holds, if it is a pipeline stage; other layers are not created.

        `seed`: of the initial weights; None: matrices are 0 until they are drawn or loaded.
        """
        super().__init__()
        # Set before each pass with gradients.
        self.aux_weight: float | Tensor = 0.0
        self.seeds = Seeds()
        # Whether hooks of modules look at each pass, so that it must run op by op.
        self.observed = False
        self.config, self.parallel, self.recompute = config, parallel, recompute
        self.pieces = tuple(pieces) or pieces_of(config.layers)
        begins, closes = (any(getattr(piece, end) for piece in self.pieces) for end in ("first", "last"))
        if begins or (closes and config.tied):
            self.tokens = TokenTable(config, ops, parallel, begins and closes and config.tied)
        self.add_positions(begins)
        self.blocks = nn.ModuleDict(
            {
                str(i): Block(config.each_layer[i], ops, parallel, recompute, self.seeds)
                for piece in self.pieces
                for i in piece.layers
            }
        )
        if closes:
            self.norm = norm_of(config, ops)
            if not config.tied:
                self.output = TokenTable(config, ops, parallel)
        if seed is not None:
            initialize(self, config.init_std, residual_deviation(config), seed, parallel)

    def add_positions(self, begins: bool) -> None:
        """Create the tables of positions, on a rank that holds the beginning of the model."""
        raise NotImplementedError

    def _loss_of(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function that computes the loss of targets; labels are smoothed only in training."""
        smoothing = self.config.label_smoothing if self.training else 0.0
        return partial(self.head.loss, x, smoothing=smoothing)

    @property
    def head(self) -> TokenTable:
        """Return the output matrix."""
        return self.tokens if self.config.tied else self.output
