"""The GPT decoder with pre-norm blocks; its config chooses positions, norms, biases and the output matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import native
from trainer.config.layout import Piece
from trainer.config.model import ModelConfig
from trainer.model import masks
from trainer.model.attention.sight import Sight
from trainer.model.layers import (
    PositionTable,
    Transformer,
)
from trainer.model.masks import Ends
from trainer.model.recompute import NOTHING, Recompute
from trainer.model.rotary import sight_of
from trainer.model.token_ids import check_token_ids
from trainer.parallel.tensor import ALONE, SEQUENCE, Parallel


class GPT(Transformer):
    """The GPT model: returns logits, or the loss."""

    def __init__(
        self,
        config: ModelConfig,
        ops: native.Choice,
        seed: int | None = 1234,
        ends: Ends | None = None,
        parallel: Parallel = ALONE,
        recompute: Recompute = NOTHING,
        pieces: Sequence[Piece] = (),
        context: Parallel = ALONE,
    ) -> None:
        """`ends`: how an end of document affects the rest of its sample; None: not at all.

        `context`: the ranks that have other chunks of the same samples; `arguments` takes this rank's chunk.
        """
        super().__init__(config, ops, seed, parallel, recompute, pieces)
        self.context, self.ends = context, ends

    def add_positions(self, begins: bool) -> None:
        rotary = self.config.rotary
        self.positions = PositionTable(self.config, self.parallel) if begins and not rotary else None

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, x: Tensor | None = None, piece: int = 0
    ) -> Tensor:
        """Return the logits of every position (batch, sequence, vocab); with targets, the mean loss instead.

        In a pipeline: run this piece; `x` is the result of the previous piece, and the result is the next piece's `x`.
        """
        ends, own = self.ends, self.pieces[piece]
        x = self._through(tokens, x, own)
        if not own.last:
            return x
        x = self.norm(x)
        if targets is None:
            return self.head.logits(x)
        if ends and ends.loss:
            targets = masks.counted(tokens, targets, ends.eod)
            return masks.loss_over_counted(self._loss_of(x), targets)
        return self._loss_of(x)(targets)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the output layer's input (batch, sequence, hidden), to compute logits only where they are needed."""
        states: Tensor = self.norm(self._through(tokens, None, self.pieces[0]))
        return states

    def _through(self, tokens: Tensor, x: Tensor | None, piece: Piece) -> Tensor:
        """Return the result of a piece's layers (batch, sequence, hidden)."""
        at = torch.arange(tokens.shape[1], device=tokens.device) + self.context.rank * tokens.shape[1]
        if self.ends and self.ends.positions:
            at = masks.positions(tokens, self.ends.eod)
        x = self._embedded(tokens, at) if x is None else x
        return self.recompute.through([self.blocks[str(i)] for i in piece.layers], x, self._sight(tokens, at))

    def _embedded(self, tokens: Tensor, at: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.config.scaled_embeddings:
            x = x * self.config.hidden**0.5
        if self.positions is not None:
            x = x + self.positions(at)
        return F.dropout(x, self.config.dropout, self.training)

    def _sight(self, tokens: Tensor, at: Tensor) -> Sight:
        separate = self.ends is not None and self.ends.attention
        documents = masks.documents(tokens, self.ends.eod) if separate and self.ends else None
        length = tokens.shape[1] * self.context.size
        return sight_of(self.config, at, documents, self.context, self.aux_weight, length)

    def check_ids(self, micro: Sequence[Tensor]) -> None:
        """Raise DataError if a token of a micro-batch is outside the vocabulary."""
        check_token_ids(micro[0], self.config.vocab)

    def arguments(self, micro: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the arguments of `forward` for the loss; each token is predicted from the tokens before it."""
        (tokens,) = micro
        pair: tuple[Tensor, ...] = tokens[:, :-1], tokens[:, 1:]
        if self.context.size > 1:
            pair = tuple(part.chunk(self.context.size, SEQUENCE)[self.context.rank] for part in pair)
        return tuple(part.contiguous() for part in pair)

    @property
    def counts_vary(self) -> bool:
        """Return whether micro-batches of the same size may differ in the number of targets that the loss counts."""
        return self.ends is not None and self.ends.loss

    def counted(self, micro: Sequence[Tensor]) -> int:
        """Return the number of targets of a micro-batch that the loss counts."""
        inputs, targets = self.arguments(micro)
        if self.ends and self.counts_vary:
            return int((inputs != self.ends.eod).sum().item())
        return targets.numel()
