"""A GPT or GLM with a head that assigns one of several labels to a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.model import ModelConfig
from trainer.model.glm import GLM
from trainer.model.layers import generator_of
from trainer.model.token_ids import check_token_ids
from trainer.tune.chat_model import ExamplesModel
from trainer.tune.examples import UNCOUNTED
from trainer.tune.progress import CountsAnswers

HEAD = "classifier"


class Classifier(nn.Module):
    """Scores of labels: for a GPT one matrix; for a GLM a tanh layer and a matrix, with biases."""

    def __init__(self, config: ModelConfig, labels: int, seed: int | None) -> None:
        super().__init__()
        with_bias = config.kind == "glm"
        self.dense = nn.Linear(config.hidden, config.hidden) if with_bias else None
        self.out = nn.Linear(config.hidden, labels, bias=with_bias)
        self.dropout = config.dropout
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.is_meta or parameter.dim() < 2 or seed is None:
                    nn.init.zeros_(parameter)
                    continue
                parameter.normal_(0.0, config.init_std, generator=generator_of(seed, f"{HEAD}.{name}"))

    def forward(self, x: Tensor) -> Tensor:
        if self.dense is not None:
            x = F.dropout(torch.tanh(self.dense(x)), self.dropout, self.training)
        scores: Tensor = self.out(x)
        return scores


class _OneLabel(CountsAnswers):
    """The loss of one label for each text."""

    def arguments(self, micro: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the arguments of `forward`."""
        return tuple(micro)

    def counted(self, micro: Sequence[Tensor]) -> int:
        """Return the number of texts that count."""
        return int((micro[3] != UNCOUNTED).sum().item())


class LabelGPT(_OneLabel, ExamplesModel):
    """Predicts the label of a text from its last token."""

    classifier: Classifier

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        ends: Tensor | None = None,
        labels: Tensor | None = None,
        x: Tensor | None = None,
        piece: int = 0,
    ) -> Tensor:
        """Return the mean loss of the texts; in a pipeline, earlier pieces return their result."""
        if documents is None or ends is None or labels is None:
            return super().forward(tokens, None, x, piece)
        x = self.states(tokens, documents, x, piece, ends)
        if not self.pieces[piece].last:
            return x
        return self.label_loss(self.classifier(self.norm(x)[0]).float(), labels, self.training)


class LabelGLM(_OneLabel, GLM):
    """Predicts the label of a text from its first token, which attends to the whole text."""

    classifier: Classifier

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        separators: Tensor,
        labels: Tensor | None = None,
        x: Tensor | None = None,
        piece: int = 0,
    ) -> Tensor:
        """Return the mean loss of the texts; in a pipeline, earlier pieces return their result."""
        if labels is None:
            return super().forward(tokens, positions, separators, None, x, piece)
        x = self._embedded(tokens, positions) if x is None else x
        x = self._through(x, separators, self.pieces[piece])
        if not self.pieces[piece].last:
            return x
        return self.label_loss(self.classifier(self.norm(x[:, 0])).float(), labels, self.training)

    def check_ids(self, micro: Sequence[Tensor]) -> None:
        """Raise DataError if a token is outside the vocabulary."""
        check_token_ids(micro[0], self.config.vocab)


def add_classifier(model: LabelGPT | LabelGLM, config: ModelConfig, labels: int, seed: int | None) -> None:
    """Add the head to the last stage of a model."""
    if model.pieces[-1].last:
        model.classifier = Classifier(config, labels, seed)
