"""LAMBADA: predict the last word of a passage.

With the conventions `lm-eval` and `megatron-strict`, all tokens of the last word must be the most likely ones; with
`megatron`, only the last token. Results on different versions of the data differ by several points.
"""

from __future__ import annotations

from collections.abc import Sequence

from clusterctl.wire.results import Figure
from trainer.evaluate.request import Example, Score
from trainer.evaluate.rows import Record, read_records
from trainer.evaluate.statistics import mean, perplexity
from trainer.evaluate.task import Inputs, accuracy, sums
from trainer.evaluate.text import Reader

CONVENTIONS = ("lm-eval", "megatron-strict", "megatron")
EXAMPLE = '{"text": "a passage whose last word is the answer"}'


def _fault(record: Record) -> str:
    return "the text has fewer than two words" if len(str(record.value["text"]).split()) < 2 else ""


class Lambada:
    """The passages of one file."""

    def __init__(self, inputs: Inputs) -> None:
        self.convention = inputs.pick("lambada", CONVENTIONS)
        records = read_records(inputs.data, {"text": str}, EXAMPLE, _fault)[: inputs.limit or None]
        self.examples = [self._example(record, inputs.reader) for record in records]

    def _example(self, record: Record, reader: Reader) -> Example:
        text = str(record.value["text"])
        if self.convention == "megatron":
            ids = reader.tokenizer.encode(text)
            request, cut = reader.cut(ids[:-1], ids[-1:])
        elif self.convention == "megatron-strict":
            last = text.split()[-1]
            ids = reader.tokenizer.encode(text[: text.rfind(last)].strip())
            request, cut = reader.cut(ids, reader.tokenizer.encode(f" {last}"))
        else:
            *before, word = text.split(" ")
            request, cut = reader.continuation(" ".join(before), f" {word}")
        return Example((request,), cut)

    def metrics(self, scores: Sequence[Sequence[Score]]) -> dict[str, Figure]:
        right = [score.greedy for own in scores for score in own]
        return {"accuracy": mean(accuracy(right)), "perplexity": perplexity(sums(scores))}
