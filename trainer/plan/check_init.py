"""Check that the initial weights of a job fit its model and its tokenizer, if they are on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.config.same_model import init_faults
from trainer.config.train_config import TrainConfig
from trainer.errors import Fault, TrainerError
from trainer.files import first_of

SOURCE = "train.init.source"


def check_init(
    config: TrainConfig, base: Path, nodes: int = 1, data: Path | None = None
) -> tuple[list[Fault], list[str]]:
    """Return the faults of the source (relative to `base`), and notes; one note says if it is not on this machine.

    Each node may have a part of a checkpoint, unless it is in the folder `data` that all nodes get.
    """
    if not config.init.source:
        return [], []
    path = base / config.init.source
    if not path.exists():
        return [], [f"train.init: {config.init.source} is not on this machine; the ranks check that it fits"]
    try:
        from trainer.weights.initial import incomplete_source, open_source
    except ImportError as error:
        return [], [f"train.init: not checked here, since {error.name} is not installed; the ranks check it"]
    try:
        source = open_source(path, config.model.heads)
        incomplete = incomplete_source(path)
    except TrainerError as error:
        hint = "" if "--from" in error.hint else error.hint
        return [
            Fault(SOURCE, error.message, hint or "import it with `clusterctl checkpoint import` first")
        ], []
    lacks, notes = [], [f"train.init: begins with the weights of {source.folder}"]
    if incomplete:
        count = f"{len(incomplete.missing)} of {incomplete.count} files missing or incomplete"
        problem = f"{incomplete.folder}: {count}: {first_of(incomplete.missing)}"
        if nodes == 1 or (data is not None and path.resolve().is_relative_to(data.resolve())):
            lacks = [Fault(SOURCE, problem, "copy the whole folder, or name another checkpoint")]
        else:
            notes = [f"train.init: {problem}; the other nodes must have them"]
    faults = lacks + list(init_faults(config.model, source.model, config.init.extend_vocabulary))
    if source.tokenizer is not None and config.data.tokenizer:
        faults += tokenizer_faults(base / config.data.tokenizer, source.tokenizer)
    return faults, notes


def tokenizer_faults(own: Path, theirs: Path) -> Iterator[Fault]:
    """Yield a fault if the job's tokenizer lacks a token of the source's tokenizer or gives it another id."""
    known, needed = (_ids(file) for file in (own, theirs))
    if known is None or needed is None:
        # The check of the tokenizer itself reports its errors.
        return
    wrong = next((token for token, number in needed.items() if known.get(token) != number), None)
    if wrong is not None:
        number = known.get(wrong)
        own_id = "is missing" if number is None else f"has the id {number}"
        problem = f"token {wrong!r} {own_id}; in the tokenizer of train.init it has the id {needed[wrong]}"
        yield Fault("train.data.tokenizer", problem, f"use {theirs}, or tokens added to it")


def _ids(file: Path) -> Mapping[str, int] | None:
    """Return the id of each token in a tokenizer.json; None for another kind of file."""
    if file.is_dir():
        file = file / "tokenizer.json"
    try:
        document = json.loads(file.read_bytes())
        vocab = dict(document["model"]["vocab"])
        return {**vocab, **{entry["content"]: entry["id"] for entry in document.get("added_tokens", [])}}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
