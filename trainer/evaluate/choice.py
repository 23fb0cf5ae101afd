"""Multiple choice: choose the answer with the largest log likelihood, with and without normalization by length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.wire.results import Figure
from trainer.corpus.tokenizer import GLM_TOKENS
from trainer.errors import DataError
from trainer.evaluate.request import Score
from trainer.evaluate.rows import Record, read_records
from trainer.evaluate.statistics import mean
from trainer.evaluate.task import Inputs, accuracy

CONVENTIONS = ("lm-eval",)
MASK = GLM_TOKENS["mask"]
EXAMPLE = '{"context": "The sky is", "choices": ["blue", "green"], "label": 0}'


@dataclass(frozen=True)
class Choice:
    """A question with several answers; `label` is the index of the right one."""

    line: int
    context: str
    texts: tuple[str, ...]
    label: int


class Choices:
    """The questions of one file. A GPT continues the context; a GLM fills in its mask."""

    def __init__(self, inputs: Inputs) -> None:
        self.convention = inputs.pick("choice", ("glm-cloze",) if inputs.reader.glm else CONVENTIONS)
        self.questions = read_choices(inputs.data)[: inputs.limit or None]
        self.examples = [
            inputs.reader.cloze(*around_mask(inputs.data, question), question.texts)
            if inputs.reader.glm
            else inputs.reader.continuations(question.context, [f" {text}" for text in question.texts])
            for question in self.questions
        ]

    def metrics(self, scores: Sequence[Sequence[Score]]) -> dict[str, Figure]:
        plain, by_length = [], []
        for own, question in zip(scores, self.questions, strict=True):
            values = [score.log_likelihood for score in own]
            plain.append(largest(values) == question.label)
            scaled = [value / len(text) for value, text in zip(values, question.texts, strict=True)]
            by_length.append(largest(scaled) == question.label)
        return {"accuracy": mean(accuracy(plain)), "accuracy_by_length": mean(accuracy(by_length))}


def largest(values: Sequence[float]) -> int:
    """Return the index of the largest value; of equal values, the first index."""
    return max(range(len(values)), key=lambda index: values[index])


def read_choices(file: Path) -> list[Choice]:
    """Return the questions of a file."""
    fields: dict[str, type | tuple[type, ...]] = {"context": str, "choices": list, "label": int}
    records = read_records(file, fields, EXAMPLE, _fault)
    return [
        Choice(record.line, str(record.value["context"]), _texts(record), _label(record))
        for record in records
    ]


def around_mask(file: Path, question: Choice) -> tuple[str, str]:
    """Return the texts before and after the mask of a context; the space before the mask belongs to the answer."""
    parts = question.context.split(MASK)
    if len(parts) != 2:
        problem = f"{file}:{question.line}: field 'context' contains {MASK} {len(parts) - 1} times"
        raise DataError(problem, f"put {MASK} where the answers belong, once")
    return parts[0].rstrip(" "), parts[1]


def _texts(record: Record) -> tuple[str, ...]:
    choices = record.value["choices"]
    assert isinstance(choices, list)
    return tuple(text if isinstance(text, str) else "" for text in choices)


def _label(record: Record) -> int:
    label = record.value["label"]
    assert isinstance(label, int)
    return label


def _fault(record: Record) -> str:
    choices, label = _texts(record), _label(record)
    if len(choices) < 2 or not all(choices):
        return "field 'choices' needs at least two texts that are not empty"
    if not 0 <= label < len(choices):
        return f"field 'label' is {label}; the choices are numbered from 0 to {len(choices) - 1}"
    return ""
