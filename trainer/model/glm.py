"""GLM, a model that fills in blanks. Each token has two positions, and all tokens attend to the whole source.

A row is a source with masks for its blanks, followed by the contents of the blanks, which the model learns to generate
(see glm_blocks). The first position of a token is its index in the source, or that of its blank; the second counts
within the blank, and is 0 in the source.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

import native
from trainer.config.layout import Piece
from trainer.model.attention.sight import Sight
from trainer.model.layers import (
    PositionTable,
    Transformer,
)
from trainer.model.masks import UNCOUNTED, loss_over_counted
from trainer.model.token_ids import check_token_ids
from trainer.parallel.tensor import SEQUENCE


class GLM(Transformer):
    """The GLM model: returns logits, or the loss."""

    def add_positions(self, begins: bool) -> None:
        if begins:
            self.positions = PositionTable(self.config, self.parallel)
            self.block_positions = PositionTable(self.config, self.parallel)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        separators: Tensor,
        targets: Tensor | None = None,
        x: Tensor | None = None,
        piece: int = 0,
    ) -> Tensor:
        """Return logits (batch, length, vocab); with targets, the mean loss instead.

        tokens: (batch, length); positions: (batch, 2, length); separators: (batch,), the lengths of the sources.
        In a pipeline: run this piece; `x` is the result of the previous piece, and the result is the next piece's `x`.
        """
        own = self.pieces[piece]
        x = self._embedded(tokens, positions) if x is None else x  # (batch, length, hidden)
        x = self._through(x, separators, own)
        if not own.last:
            return x
        x = self.norm(x)
        if targets is None:
            return self.head.logits(x)
        return loss_over_counted(self._loss_of(x), targets)

    def hidden(self, tokens: Tensor, positions: Tensor, separators: Tensor) -> Tensor:
        """Return the output layer's input (batch, length, hidden), to compute logits only where they are needed."""
        x = self._through(self._embedded(tokens, positions), separators, self.pieces[0])
        states: Tensor = self.norm(x)
        return states

    def _through(self, x: Tensor, separators: Tensor, piece: Piece) -> Tensor:
        """Return the result of a piece's layers (batch, length, hidden)."""
        sight = Sight(native.Mask(source=separators), aux_weight=self.aux_weight)
        return self.recompute.through([self.blocks[str(i)] for i in piece.layers], x, sight)

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions[:, 0]) + self.block_positions(positions[:, 1])
        return F.dropout(x, self.config.dropout, self.training)

    def check_ids(self, micro: Sequence[Tensor]) -> None:
        """Raise DataError if a token, or a target that the loss counts, is outside the vocabulary."""
        tokens, targets, loss_mask, *_ = micro
        check_token_ids(tokens, self.config.vocab)
        check_token_ids(targets[loss_mask != 0], self.config.vocab)

    def arguments(self, micro: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the arguments of `forward` for the loss; only tokens after the source are predicted."""
        tokens, targets, loss_mask, positions, separators = micro
        targets = targets.masked_fill(loss_mask == 0, UNCOUNTED)
        # The length of rows depends on their blanks.
        if self.parallel.divides_sequence:
            more = -tokens.shape[SEQUENCE] % self.parallel.size
            tokens, positions = F.pad(tokens, (0, more)), F.pad(positions, (0, more))
            targets = F.pad(targets, (0, more), value=UNCOUNTED)
        return tokens, positions, separators, targets

    @property
    def counts_vary(self) -> bool:
        """Return whether micro-batches of the same size may differ in the number of targets that the loss counts."""
        return True

    def counted(self, micro: Sequence[Tensor]) -> int:
        """Return the number of targets of a micro-batch that the loss counts."""
        _, _, loss_mask, _, _ = micro
        return int((loss_mask != 0).sum().item())
