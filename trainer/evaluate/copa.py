"""COPA: choose which of two sentences is the cause or the effect of a premise.

A GPT continues the premise (lm-eval's zero-shot convention). A GLM fills in the mask of a question that contains both
choices (GLM's cloze, patterns 0 and 1). The choice with the larger sum of log probabilities is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.wire.results import Figure
from trainer.errors import InputError
from trainer.evaluate.choice import largest
from trainer.evaluate.request import Example, Score
from trainer.evaluate.rows import Record, read_records
from trainer.evaluate.statistics import mean
from trainer.evaluate.task import Inputs, accuracy

EXAMPLE = '{"premise": "…", "choice1": "…", "choice2": "…", "question": "cause", "label": 0}'
FIELDS: dict[str, type | tuple[type, ...]] = {
    "premise": str,
    "choice1": str,
    "choice2": str,
    "question": str,
    "label": int,
}
PATTERNS = 2
_CLOZE = {"cause": " because", "effect": ", so"}
_CONTINUED = {"cause": "because", "effect": "therefore"}


@dataclass(frozen=True)
class Question:
    """One record of a COPA file."""

    premise: str
    choices: tuple[str, str]
    asks: str
    label: int

    def mirrored(self) -> Question:
        """Return the question with its choices swapped."""
        return replace(self, choices=self.choices[::-1], label=1 - self.label)


class Copa:
    """The questions of one file."""

    def __init__(self, inputs: Inputs) -> None:
        own = ("glm-cloze",) if inputs.reader.glm else ("lm-eval",)
        self.convention = inputs.pick("copa", own)
        if not 0 <= inputs.pattern < PATTERNS:
            raise InputError(f"--pattern is {inputs.pattern}; COPA has the patterns 0 and 1")
        self.questions = read_questions(inputs.data)[: inputs.limit or None]
        make = _cloze if inputs.reader.glm else _continued
        self.examples = [make(question, inputs) for question in self.questions]

    def metrics(self, scores: Sequence[Sequence[Score]]) -> dict[str, Figure]:
        right = [
            largest([score.log_likelihood for score in own]) == question.label
            for own, question in zip(scores, self.questions, strict=True)
        ]
        return {"accuracy": mean(accuracy(right))}


def read_questions(file: Path) -> list[Question]:
    """Return the questions of a file in SuperGLUE's form."""
    return [_question(record) for record in read_records(file, FIELDS, EXAMPLE, _fault)]


def _fault(record: Record) -> str:
    value, faults = record.value, []
    if value["question"] not in _CLOZE:
        faults.append(f"field 'question' is {value['question']!r}; use cause or effect")
    if value["label"] not in (0, 1):
        faults.append(f"field 'label' is {value['label']}; use 0 or 1")
    names = ("premise", "choice1", "choice2")
    faults += [f"field {name!r} is empty" for name in names if not str(value[name]).strip()]
    return "; ".join(faults)


def _question(record: Record) -> Question:
    value = record.value
    choices = str(value["choice1"]), str(value["choice2"])
    return Question(str(value["premise"]), choices, str(value["question"]), 0 if value["label"] == 0 else 1)


def _continued(question: Question, inputs: Inputs) -> Example:
    context = f"{question.premise.strip()[:-1]} {_CONTINUED[question.asks]}"
    texts = [f" {choice[0].lower()}{choice[1:]}" for choice in question.choices]
    return inputs.reader.continuations(context, texts)


def _cloze(question: Question, inputs: Inputs) -> Example:
    before, answers = cloze_texts(question, inputs.pattern)
    return inputs.reader.cloze(before, ".", answers)


def cloze_texts(question: Question, pattern: int) -> tuple[str, tuple[str, str]]:
    """Return the text before the mask (a full stop follows the mask), and the two answers."""
    first, second = (_sentence_part(choice) for choice in question.choices)
    listed = f'"{first}" or "{second}"?' if pattern == 0 else f"{first} or {second}?"
    premise = question.premise.strip().rstrip(".!?")
    return f"{listed} {premise}{_CLOZE[question.asks]}", (first, second)


def _sentence_part(choice: str) -> str:
    """Return a choice as part of a sentence: first letter in lower case, no final punctuation."""
    text = choice.strip().rstrip(".!?")
    return text[:1].lower() + text[1:]
