"""A GPT that learns the answers in conversations; several conversations may share a row without seeing each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model import masks
from trainer.model.attention.sight import Sight, picked
from trainer.model.gpt import GPT
from trainer.model.masks import UNCOUNTED
from trainer.model.rotary import sight_of
from trainer.parallel.tensor import SEQUENCE
from trainer.tune.progress import CountsAnswers

# To count right tokens, logits are computed for this many positions at a time.
COUNTED_AT_ONCE = 512


class ExamplesModel(CountsAnswers, GPT):
    """Reads rows of examples that do not attend to each other; the positions of each start at 0."""

    joins_samples = True

    def states(
        self,
        tokens: Tensor,
        documents: Tensor,
        x: Tensor | None,
        piece: int,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Return the result of a piece's layers, (batch, sequence, hidden).

        `wanted`: the last piece returns only these rows, as one sample; they are indices over all samples.

        With context parallel, `tokens` are this rank's part of the rows, but `documents` are for the whole rows.
        """
        first = self.context.rank * tokens.shape[1]
        at = masks.places(documents)[:, first : first + tokens.shape[1]]
        x = self._embedded(tokens, at) if x is None else x
        blocks: list[Callable[..., Tensor]] = [self.blocks[str(i)] for i in self.pieces[piece].layers]
        if wanted is not None and self.pieces[piece].last:
            blocks[-1] = partial(blocks[-1], wanted=wanted)
        return self.recompute.through(blocks, x, self._sight_of(documents, at))

    def _sight_of(self, documents: Tensor, at: Tensor) -> Sight:
        # Keys up to the position of this rank's last query.
        seen = documents[:, : at.shape[1] * (self.context.rank + 1)]
        return sight_of(self.config, at, seen, self.context, self.aux_weight, documents.shape[1])

    @property
    def counts_vary(self) -> bool:
        return True


def rows_of(targets: Tensor) -> Tensor:
    """Return the indices of the targets that count, over all samples."""
    return (targets.flatten() != UNCOUNTED).nonzero().squeeze(1)


class ChatModel(ExamplesModel):
    """The mean loss over the tokens of answers."""

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        x: Tensor | None = None,
        piece: int = 0,
    ) -> Tensor:
        """Return the mean loss over the targets that count; in a pipeline, earlier pieces return their result."""
        if targets is None or documents is None:
            return super().forward(tokens, None, x, piece)
        # Most tokens of a conversation are not learned, so most logits and most of the last block are not needed.
        counted = rows_of(targets)
        wanted = None if self.parallel.divides_sequence else counted if len(counted) else counted.new_zeros(1)
        x = self.states(tokens, documents, x, piece, wanted)
        if not self.pieces[piece].last:
            return x
        x = self.norm(x)
        if not self.training:
            rows = picked(self.parallel.gather(x), counted) if wanted is None else x
            self._count(rows[0], targets.flatten()[counted])
        if wanted is None:
            return masks.loss_over_counted(self._loss_of(x), targets)
        loss = self._loss_of(x)(targets.flatten()[wanted].clamp_min(0).unsqueeze(0))
        return loss if len(counted) else loss * 0.0

    @torch.no_grad()
    def _count(self, rows: Tensor, targets: Tensor) -> None:
        for own, wanted in zip(rows.split(COUNTED_AT_ONCE), targets.split(COUNTED_AT_ONCE), strict=False):
            self.right += int((self.head.whole_logits(own).argmax(-1) == wanted).sum().item())
        self.seen += len(targets)

    def arguments(self, micro: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the arguments of `forward`: rows padded so that ranks can divide them, and this rank's part."""
        tokens, targets, documents = micro
        parts = self.context.size * (self.parallel.size if self.parallel.divides_sequence else 1)
        more = -tokens.shape[SEQUENCE] % parts
        if more:
            tokens = F.pad(tokens, (0, more))
            targets = F.pad(targets, (0, more), value=UNCOUNTED)
            documents = F.pad(documents, (0, more), value=-1)
        if self.context.size > 1:
            tokens, targets = (
                part.chunk(self.context.size, SEQUENCE)[self.context.rank].contiguous()
                for part in (tokens, targets)
            )
        return tokens, targets, documents

    def counted(self, micro: Sequence[Tensor]) -> int:
        """Return the number of this rank's targets that count."""
        return int((self.arguments(micro)[1] != UNCOUNTED).sum().item())
