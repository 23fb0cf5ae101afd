"""Multiple choice: the answer with the largest log likelihood counts, with and without its length."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.errors import InputError
from trainer.evaluate.request import Example, Score
from trainer.evaluate.rows import Record, check_faults, read_records
from trainer.evaluate.statistics import Metric, mean
from trainer.evaluate.task import Inputs, accuracy

CONVENTIONS = ("lm-eval",)
EXAMPLE = '{"context": "The sky is", "choices": ["blue", "green"], "label": 0}'


class Choices:
    """Questions with several answers each; `label` is the index of the right one."""

    def __init__(self, inputs: Inputs) -> None:
        self.convention = inputs.pick("choice", CONVENTIONS)
        if inputs.reader.glm is not None:
            raise InputError(
                "task choice needs a model that continues text; this one is a GLM", "use --task copa"
            )
        fields: dict[str, type | tuple[type, ...]] = {"context": str, "choices": list, "label": int}
        records = read_records(inputs.data, fields, EXAMPLE)[: inputs.limit or None]
        faults = [f"{inputs.data}:{record.line}: {fault}" for record in records if (fault := _fault(record))]
        check_faults(faults, f"each line has the form {EXAMPLE}")
        self.examples, self.labels, self.lengths = [], list[int](), list[list[int]]()
        for record in records:
            choices = _choices(record)
            pairs = [inputs.reader.continuation(str(record.value["context"]), f" {text}") for text in choices]
            self.examples.append(
                Example(tuple(request for request, _ in pairs), any(cut for _, cut in pairs))
            )
            self.labels.append(_label(record))
            self.lengths.append([max(1, len(text)) for text in choices])

    def metrics(self, scores: Sequence[Sequence[Score]]) -> dict[str, Metric]:
        plain, by_length = [], []
        for own, label, lengths in zip(scores, self.labels, self.lengths, strict=True):
            values = [score.log_likelihood for score in own]
            plain.append(largest(values) == label)
            by_length.append(largest([value / n for value, n in zip(values, lengths, strict=True)]) == label)
        return {"accuracy": mean(accuracy(plain)), "accuracy_by_length": mean(accuracy(by_length))}


def largest(values: Sequence[float]) -> int:
    """Return the index of the largest value; the first one of equals."""
    return max(range(len(values)), key=lambda index: values[index])


def _choices(record: Record) -> list[str]:
    choices = record.value["choices"]
    assert isinstance(choices, list)
    return [text if isinstance(text, str) else "" for text in choices]


def _label(record: Record) -> int:
    label = record.value["label"]
    assert isinstance(label, int)
    return label


def _fault(record: Record) -> str:
    choices, label = _choices(record), _label(record)
    if len(choices) < 2 or not all(choices):
        return "field 'choices' needs at least two texts, none of them empty"
    if not 0 <= label < len(choices):
        return f"field 'label' is {label}; the choices are numbered from 0 to {len(choices) - 1}"
    return ""
