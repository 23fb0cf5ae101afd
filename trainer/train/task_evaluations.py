"""Tasks that a training evaluates together with its validation; the results are those of `clusterctl eval`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterctl.wire.results import Evaluation
from trainer.config.train_config import TrainConfig
from trainer.corpus.indexed import idx_path
from trainer.corpus.tokenizer import Tokenizer
from trainer.device import Device
from trainer.engine.passes import Model
from trainer.errors import DataError, InputError
from trainer.evaluate.corpus import prefix_of
from trainer.evaluate.request import Score
from trainer.evaluate.scorer import Scorer
from trainer.evaluate.task import Inputs, Task
from trainer.evaluate.tasks import CONTINUING, TASKS, by_example
from trainer.evaluate.text import Reader
from trainer.files import sha256
from trainer.generate.blanks import own_tokens
from trainer.model.glm import GLM
from trainer.parallel.group import Groups


@dataclass(frozen=True)
class _Opened:
    """A task whose data is read and encoded."""

    name: str
    data: Path
    data_sha256: str
    task: Task


class TaskEvaluations:
    """Evaluates the model of a training without changing its state."""

    def __init__(self, config: TrainConfig, model: Model, groups: Groups, device: Device) -> None:
        """Read the data of all tasks; report all tasks that cannot be evaluated together."""
        self._config, self._model, self._groups, self._device = config, model, groups, device
        self._reader = reader = self._make_reader()
        faults = list[str]()
        self._tasks: list[_Opened] = []
        for entry in config.eval.tasks:
            try:
                self._tasks.append(self._open(entry, reader))
            except (DataError, InputError) as error:
                faults.append(f"train.eval.tasks: {entry}: {error}")
        if faults:
            raise InputError("\n".join(faults))

    def __call__(self, step: int) -> Iterator[Evaluation]:
        """Yield the result of each task after a step. A collective of all ranks."""
        for opened in self._tasks:
            began = time.monotonic()
            scores = self._scores(opened.task)
            yield Evaluation(
                step,
                opened.name,
                opened.task.convention,
                str(opened.data),
                opened.data_sha256,
                len(opened.task.examples),
                opened.task.metrics(by_example(opened.task, scores)),
                time.monotonic() - began,
            )

    def _make_reader(self) -> Reader:
        config, glm = self._config, None
        tokenizer = Tokenizer.load(Path(config.data.tokenizer))
        if isinstance(self._model, GLM):
            glm = own_tokens(self._model, tokenizer, config.data)
        return Reader(tokenizer, config.model.sequence, glm, tokenizer.prefix())

    def _open(self, entry: str, reader: Reader) -> _Opened:
        name, _, file = entry.partition("=")
        data = Path(file).expanduser()
        if name in CONTINUING and reader.glm is not None:
            raise InputError(f"task {name} continues a text, and the model is a GLM", "use copa or choice")
        prefix = prefix_of(data)
        if not data.exists() and prefix is None:
            raise DataError(f"{data} does not exist", "name a file, or a corpus without .bin, of every node")
        task = TASKS[name](Inputs(data, reader))
        return _Opened(name, data, sha256(idx_path(prefix) if prefix else data), task)

    def _scores(self, task: Task) -> list[Score]:
        """Return the score of every request; of N data parallel ranks, each computes every N-th batch."""
        model, data = self._model, self._groups.data
        requests = [request for example in task.examples for request in example.requests]
        scorer, own = Scorer(model, self._reader.glm), dict[int, Score]()
        model.eval()
        model.aux_weight = 0.0
        with self._device.autocast(self._config.precision):
            for batch in list(scorer.batches(requests))[data.rank :: data.world]:
                own |= zip(batch, scorer.score([requests[index] for index in batch]), strict=True)
        model.train()
        done: dict[int, Score] = {}
        for others in data.gather(own):
            done |= others
        return [done[index] for index in range(len(requests))]
