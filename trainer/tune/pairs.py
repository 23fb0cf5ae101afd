"""Preference pairs as samples: a prompt with a better and a worse answer, and a reference model's log probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.evaluate.rows import RowFault
from trainer.tune.chat import ChatData
from trainer.tune.conversations import Marked
from trainer.tune.examples import Examples, joined, shuffled

FORM = (
    'each line has the form {"prompt": "...", "chosen": "...", "rejected": "..."}, or with lists of messages'
)


class PairSamples:
    """The pairs of a file; a micro-batch is one row with two examples per pair."""

    def __init__(self, examples: Examples, seed: int | None) -> None:
        """`examples`: chosen and rejected answers alternate. `seed`: as in JoinedExamples."""
        self.examples, self.seed = examples, seed
        # The reference model's log probabilities of both answers; computed before the training.
        self.reference: NDArray[np.float32] = np.zeros((len(self), 2), np.float32)

    def __len__(self) -> int:
        return len(self.examples) // 2

    def in_order(self) -> PairSamples:
        """Return the same pairs in the order of the file, each once."""
        return PairSamples(self.examples, None)

    def read(self, numbers: Sequence[int]) -> tuple[NDArray[Any], ...]:
        """Return a micro-batch: tokens, targets, example numbers, the reference of each pair, and whether it counts."""
        rows, reference, counts = list[Any](), list[Any](), list[int]()
        for number in numbers:
            at, counted = shuffled(number, len(self), self.seed)
            rows += [self.examples.row(2 * at), self.examples.row(2 * at + 1)]
            reference.append(self.reference[at])
            counts.append(int(counted))
        return (*joined(rows), np.stack(reference), np.array(counts, np.int64))


class PairData(ChatData):
    """The files of DPO."""

    form = FORM

    def marked(self, line: int, row: Mapping[str, object]) -> list[Marked]:
        prompt, chosen, rejected = (row.get(name) for name in ("prompt", "chosen", "rejected"))
        if chosen is None or rejected is None:
            missing = "chosen" if chosen is None else "rejected"
            raise RowFault(f"has no answer {missing!r}")
        if prompt is None:
            prompt, chosen, rejected = _common(chosen, rejected)
        if chosen == rejected:
            raise RowFault("both answers are the same")
        return [
            self.reader.completed(line, row, prompt, chosen, "chosen"),
            self.reader.completed(line, row, prompt, rejected, "rejected"),
        ]

    def order(self, name: str, seed: int | None) -> PairSamples:
        return PairSamples(self.examples(name), seed)


def _common(chosen: object, rejected: object) -> tuple[object, object, object]:
    """Return the messages at the beginning of both conversations, and the rest of each."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise RowFault("has no prompt, and its answers are not conversations")
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if not same or same == min(len(chosen), len(rejected)):
        raise RowFault(
            "has no prompt, and its conversations must begin with the same messages and end differently"
        )
    return chosen[:same], chosen[same:], rejected[same:]
