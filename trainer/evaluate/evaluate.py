"""Evaluate a checkpoint on tasks: load it, score every request once over all ranks, write the results."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.wire.requests import Scoring
from clusterctl.wire.saved import MANIFEST
from trainer.checkpoint.store import Checkpoint, open_checkpoint
from trainer.corpus.indexed import idx_path
from trainer.corpus.verify import other_tokenizer
from trainer.device import Device
from trainer.engine.passes import Model
from trainer.errors import DataError, InputError
from trainer.evaluate import packed_scorer
from trainer.evaluate.corpus import prefix_of
from trainer.evaluate.packed_scorer import PackedScorer
from trainer.evaluate.request import Request, Score
from trainer.evaluate.results import Progress, Result, Source, write_result
from trainer.evaluate.scorer import BATCH_TOKENS, Scorer
from trainer.evaluate.task import Inputs, Task
from trainer.evaluate.tasks import CONTINUING, TASKS, by_example
from trainer.evaluate.text import Reader
from trainer.files import sha256
from trainer.generate.blanks import own_tokens
from trainer.generate.loading import load_model, tokenizer_for
from trainer.generate.precision import weight_type
from trainer.model.glm import GLM
from trainer.parallel.group import Group


@dataclass(frozen=True)
class Order:
    """The user's request."""

    task: str
    data: Path | None
    """The data file; None for the corpus of the training."""
    output: Path = Path("evaluations")
    options: Scoring = field(default_factory=Scoring)
    batch_tokens: int = BATCH_TOKENS


@dataclass(frozen=True)
class Subject:
    """A loaded checkpoint with its tokenizer."""

    checkpoint: Checkpoint
    model: Model
    reader: Reader
    weights: str = "fp32"
    """The type of the model's matrices."""

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer: Path | None,
        device: Device,
        base: Path | None = None,
        weights: str = "fp32",
        add_bos: bool | None = None,
    ) -> Subject:
        """Load a checkpoint and its tokenizer; refuse a tokenizer with more ids than the model.

        base: the base weights of adapters, if they were moved. weights: the type of matrices on a device. add_bos: as
        in `Tokenizer.prefix`.
        """
        if weights != "fp32" and device.kind == "cpu":
            raise InputError(f"--weights {weights}: a CPU evaluates in fp32", "leave out --weights")
        weight_type(weights, device)
        checkpoint = open_checkpoint(folder)
        loaded = tokenizer_for(folder, tokenizer)
        model = load_model(checkpoint, base, device, weights)
        if loaded.vocab > model.config.vocab:
            problem = f"the tokenizer has {loaded.vocab:,} ids, but the model only {model.config.vocab:,}"
            raise InputError(problem, "use the tokenizer that made the training data")
        glm = None
        if isinstance(model, GLM):
            glm = own_tokens(model, loaded, checkpoint.manifest.config.data)
        reader = Reader(loaded, model.config.sequence, glm, loaded.prefix(add_bos))
        return cls(checkpoint, model, reader, weights)


Report = Callable[[int, int, int], None]
"""Called after each batch with the number of finished requests, of all requests, and of tokens read here."""


def evaluate(subject: Subject, order: Order, group: Group, report: Report) -> Result:
    """Run one task on the ranks of a group and return its result; rank 0 also writes it into the order's folder."""
    if order.task in CONTINUING and subject.reader.glm is not None:
        raise InputError(
            f"task {order.task} continues a text, but this model is a GLM", "use --task copa or choice"
        )
    inputs = _inputs(subject, order)
    task = TASKS[order.task](inputs)
    source = _source(subject, order, inputs, task)
    key = hashlib.sha256(json.dumps(source.__dict__, sort_keys=True).encode()).hexdigest()
    requests = [request for example in task.examples for request in example.requests]
    started = time.monotonic()
    with Progress(order.output, key, group.rank) as progress:
        scores = _score(subject, order, requests, progress, group, report)
        result = Result(
            source,
            task.metrics(by_example(task, scores)),
            len(task.examples),
            sum(example.truncated for example in task.examples),
            sum(request.length for request in requests),
            time.monotonic() - started,
        )
        if group.rank == 0:
            write_result(order.output, key, result)
        group.barrier()
        progress.remove()
    return result


def _inputs(subject: Subject, order: Order) -> Inputs:
    trained, options = subject.checkpoint.manifest.config.data, order.options
    data = order.data
    if data is None:
        prefix = trained.prefix
        if order.task != "ppl" or not prefix:
            raise InputError(f"task {order.task} needs data", "name a local file with --data")
        data = Path(prefix)
    if not data.exists() and prefix_of(data) is None:
        raise DataError(f"{data} does not exist", "name a local file, or a corpus without .bin, with --data")
    corpus = prefix_of(data)
    if corpus and (problem := other_tokenizer(corpus, subject.reader.tokenizer)):
        raise DataError(*problem)
    return Inputs(
        data,
        subject.reader,
        options.convention,
        options.stride,
        options.pattern,
        options.split,
        trained.split,
        options.limit,
    )


def _source(subject: Subject, order: Order, inputs: Inputs, task: Task) -> Source:
    prefix = prefix_of(inputs.data)
    path = subject.checkpoint.path
    more: dict[str, object] = {} if subject.weights == "fp32" else {"weights": subject.weights}
    more |= {"prefix": list(subject.reader.prefix)} if subject.reader.prefix else {}
    return Source(
        order.task,
        task.convention,
        str(path),
        subject.checkpoint.step,
        sha256(path / MANIFEST),
        str(inputs.data),
        sha256(idx_path(prefix) if prefix else inputs.data),
        subject.reader.tokenizer.sha256,
        order.options.__dict__ | {"convention": task.convention} | more,
    )


def _score(
    subject: Subject,
    order: Order,
    requests: Sequence[Request],
    progress: Progress,
    group: Group,
    report: Report,
) -> list[Score]:
    """Return the score of every request; the ranks divide the batches of requests without a score."""
    scorer: Scorer | PackedScorer = Scorer(subject.model, subject.reader.glm, order.batch_tokens)
    if not packed_scorer.why_not(subject.model):
        scorer = PackedScorer(subject.model, order.batch_tokens)
    done = group.share(progress.read(len(requests)))
    missing = [index for index in range(len(requests)) if index not in done]
    own, tokens = dict[int, Score](), 0
    batches = list(scorer.batches([requests[index] for index in missing]))
    for batch in batches[group.rank :: group.world]:
        indices = [missing[position] for position in batch]
        made = dict(zip(indices, scorer.score([requests[index] for index in indices]), strict=True))
        progress.add(made)
        own |= made
        tokens += sum(requests[index].length for index in indices)
        report(len(done) + len(own) * group.world, len(requests), tokens)
    for others in group.gather(own):
        done |= others
    return [done[index] for index in range(len(requests))]
