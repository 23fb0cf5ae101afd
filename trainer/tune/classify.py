"""Texts with labels as samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.train_config import TrainConfig
from trainer.evaluate.rows import RowFault
from trainer.samples.glm_batches import glm_tokens
from trainer.samples.glm_windows import GlmTokens
from trainer.tune.chat import ChatData
from trainer.tune.conversations import Marked
from trainer.tune.examples import UNCOUNTED, Examples, shuffled

FORM = 'each line has the form {"text": "...", "label": "..."}; tune.fields names other fields than text'


class LabelledSamples:
    """The texts of a file with the numbers of their labels."""

    def __init__(self, examples: Examples, seed: int | None, glm: GlmTokens | None) -> None:
        """`examples`: `learned` has the number of the label for each token. `seed`: as in JoinedExamples."""
        self.examples, self.seed, self.glm = examples, seed, glm

    def __len__(self) -> int:
        return len(self.examples)

    def read(self, numbers: Sequence[int]) -> tuple[NDArray[Any], ...]:
        """Return a micro-batch.

        For a GPT: tokens and each token's text number, both (1, tokens), ends, labels. For a GLM: tokens, positions,
        lengths of the texts, labels.
        """
        texts, labels = list[NDArray[np.int64]](), list[int]()
        for number in numbers:
            at, counts = shuffled(number, len(self), self.seed)
            begin, end = self.examples.ends[at], self.examples.ends[at + 1]
            texts.append(self.examples.tokens[begin:end].astype(np.int64))
            labels.append(int(self.examples.learned[begin]) if counts else UNCOUNTED)
        lengths, wanted = np.array([len(text) for text in texts]), np.array(labels, np.int64)
        if self.glm is None:
            documents = np.repeat(np.arange(len(texts)), lengths)
            return np.concatenate(texts)[None], documents[None], lengths.cumsum() - 1, wanted
        tokens = np.full((len(texts), int(lengths.max())), self.glm.eos, np.int64)
        positions = np.zeros((len(texts), 2, tokens.shape[1]), np.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
            positions[row, 0, : len(text)] = np.arange(len(text))
        return tokens, positions, lengths, wanted


class LabelledData(ChatData):
    """The files of a classification task."""

    form = FORM

    def __init__(self, config: TrainConfig, *more: Any) -> None:
        super().__init__(config, *more)
        self.glm = glm_tokens(config) if config.model.kind == "glm" else None
        self.adjust = self._ids
        self._labels = {label: number for number, label in enumerate(config.tune.labels)}

    def marked(self, line: int, row: Mapping[str, Any]) -> list[Marked]:
        parts = []
        for name in self.config.tune.fields:
            if not isinstance(row.get(name), str) or not row[name]:
                raise RowFault(f"field {name!r} is not a text (it has: {', '.join(sorted(map(str, row)))})")
            parts.append(row[name].strip())
        if "label" not in row:
            raise RowFault("has no field 'label'")
        label = row["label"]
        spelled = str(label).lower() if isinstance(label, bool) else str(label)
        if spelled not in self._labels:
            raise RowFault(f"field 'label' is {label!r}, which is not one of {', '.join(self._labels)}")
        # The span holds the number of the label; `_ids` writes it into `learned`.
        return [Marked(line, " ".join(parts), ((self._labels[spelled], 0),))]

    def _ids(self, marked: Marked, ids: list[int], learned: list[int]) -> tuple[list[int], list[int]]:
        ((label, _),) = marked.spans
        own = ids if self.glm is None else [self.glm.enc, *ids, self.glm.eos]
        return own, [label] * len(own)

    def order(self, name: str, seed: int | None) -> LabelledSamples:
        return LabelledSamples(self.examples(name), seed, self.glm)
