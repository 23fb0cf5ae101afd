"""A GLM whose loss is that of cloze questions with several answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.model.glm import GLM
from trainer.model.token_ids import check_token_ids
from trainer.tune.examples import UNCOUNTED
from trainer.tune.progress import CountsAnswers


class ClozeModel(CountsAnswers, GLM):
    """Scores each answer by the sum of its tokens' log probabilities; cross-entropy over the scores is the loss."""

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        positions: Tensor,
        separators: Tensor,
        targets: Tensor | None = None,
        labels: Tensor | None = None,
        x: Tensor | None = None,
        piece: int = 0,
    ) -> Tensor:
        """Return the mean loss of the questions; in a pipeline, earlier pieces return their result.

        The rows of a question are adjacent. Without targets, return logits as GLM does.
        """
        if targets is None or labels is None or not self.pieces[piece].last:
            return super().forward(tokens, positions, separators, None, x, piece)
        x = self._embedded(tokens, positions) if x is None else x
        x = self.norm(self._through(x, separators, self.pieces[piece]))
        scores = torch.stack([self._score(row, wanted) for row, wanted in zip(x, targets, strict=True)])
        scores = scores.view(len(labels), -1)
        return self.label_loss(scores, labels, self.training)

    def _score(self, row: Tensor, targets: Tensor) -> Tensor:
        """Return the log probability of an answer; -1e4 for the padding of questions with fewer answers."""
        counted = targets != UNCOUNTED
        number = int(counted.sum().item())
        if not number:
            return row.sum() * 0.0 - 1e4
        return self.head.loss(row[counted].unsqueeze(0), targets[counted].unsqueeze(0)).float() * -number

    def check_ids(self, micro: Sequence[Tensor]) -> None:
        """Raise DataError if a token or a counted target is outside the vocabulary."""
        tokens, targets, *_ = micro
        check_token_ids(tokens, self.config.vocab)
        check_token_ids(targets[targets != UNCOUNTED], self.config.vocab)

    def arguments(self, micro: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the arguments of `forward`: one row per answer."""
        tokens, targets, positions, separators, labels = micro
        return (
            tokens.flatten(0, 1),
            positions.flatten(0, 1),
            separators.flatten(),
            targets.flatten(0, 1),
            labels,
        )

    def counted(self, micro: Sequence[Tensor]) -> int:
        """Return the number of questions that count."""
        return int((micro[-1] != UNCOUNTED).sum().item())
