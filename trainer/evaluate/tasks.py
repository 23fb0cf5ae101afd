"""The tasks of an evaluation by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trainer.evaluate.choice import Choices
from trainer.evaluate.copa import Copa
from trainer.evaluate.corpus import Perplexity
from trainer.evaluate.lambada import Lambada
from trainer.evaluate.request import Score
from trainer.evaluate.task import Inputs, Task
from trainer.evaluate.wikitext import wikitext

TASKS: Mapping[str, Callable[[Inputs], Task]] = {
    "ppl": Perplexity,
    "lambada": Lambada,
    "wikitext": wikitext,
    "copa": Copa,
    "choice": Choices,
}
# Tasks that continue a text, which a GLM can't do.
CONTINUING = ("ppl", "lambada", "wikitext")


def by_example(task: Task, scores: Sequence[Score]) -> list[list[Score]]:
    """Return the scores grouped by example."""
    taken, grouped = iter(scores), []
    for example in task.examples:
        grouped.append([next(taken) for _ in example.requests])
    return grouped
