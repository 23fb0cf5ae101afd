"""A GPT that learns preferences: compared with a reference model, better answers become more likely than worse ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from native import products
from trainer.tune.chat_model import ExamplesModel, rows_of


class PreferenceModel(ExamplesModel):
    """The loss of DPO: -log sigmoid(beta x (gain of the chosen answer - gain of the rejected one))."""

    beta: float = 0.1
    recorded: list[Tensor] | None = None
    """If this is a list, `forward` appends the log probabilities of each pair's answers to it."""

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        reference: Tensor | None = None,
        counts: Tensor | None = None,
        x: Tensor | None = None,
        piece: int = 0,
    ) -> Tensor:
        """Return the mean loss of the pairs that count; in a pipeline, earlier pieces return their result."""
        if targets is None or documents is None or reference is None or counts is None:
            return super().forward(tokens, None, x, piece)
        wanted = rows_of(targets)
        x = self.states(tokens, documents, x, piece, wanted)
        if not self.pieces[piece].last:
            return x
        numbers = documents.flatten()[wanted]
        likely = self._likely(self.norm(x)[0], targets.flatten()[wanted], numbers, 2 * len(counts)).view(
            -1, 2
        )
        if self.recorded is not None:
            self.recorded.append(likely.detach().float().cpu())
        gains = likely - reference
        margins = self.beta * (gains[:, 0] - gains[:, 1])
        if not self.training:
            self.right += int(((margins > 0) & (counts != 0)).sum().item())
            self.seen += int(counts.sum().item())
        return -(F.logsigmoid(margins) * counts).sum() / counts.sum().clamp_min(1)

    def _likely(self, rows: Tensor, wanted: Tensor, numbers: Tensor, examples: int) -> Tensor:
        """Return the sum of the log probabilities of each example's targets, (examples,).

        `rows`: the input of the output layer for each target in `wanted`; `numbers`: the example of each row.
        """
        if self.parallel.size == 1:
            logits = products.linear(rows, self.head.output_matrix())[:, : self.config.vocab].float()
            lost = F.cross_entropy(logits, wanted, reduction="none")
            return lost.new_zeros(examples).index_add(0, numbers, -lost)
        sums = []
        for number in range(examples):
            own = numbers == number
            loss = self.head.loss(rows[own].unsqueeze(0), wanted[own].unsqueeze(0))
            sums.append(loss.float() * -own.sum())
        return torch.stack(sums)

    def arguments(self, micro: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the arguments of `forward`."""
        return tuple(micro)

    def counted(self, micro: Sequence[Tensor]) -> int:
        """Return the number of pairs that count."""
        return int(micro[4].sum().item())
