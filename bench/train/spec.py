"""The work and the answers of a subject of bench/train; standard library only, for the peers' interpreters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

# The number of vocabulary rows is rounded up to a multiple of this, for faster matrix products.
VOCAB_MULTIPLE = 64


def rows(vocab: int) -> int:
    """Return the number of rows of a peer's token table."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass(frozen=True)
class ModelWork:
    """The model that every subject trains, and the settings of the training."""

    model: Mapping[str, object]
    """Layers, hidden and so on, under the trainer's names."""
    precision: str
    device: str
    seed: int
    lr: float
    narrow: bool = False
    """Whether peers keep weights and the optimizer's averages in bf16 without fp32 copies: a quarter of the memory."""


@dataclass(frozen=True)
class Spec:
    """The work of one subject."""

    subject: str
    train: Mapping[str, object]
    """The trainer's configuration, as the trainer reads it."""
    run_dir: str
    batches: str
    threads: int
    tokens: int
    """Tokens per step of each rank."""
    square: int
    work: ModelWork
    nudge: int | None = None
    """Perturb the trainer's first weights with this seed; 0: use them unchanged."""

    @classmethod
    def read(cls, path: Path) -> Spec:
        value = json.loads(path.read_text())
        return cls(**{**value, "work": ModelWork(**value["work"])})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class StepFigures:
    """An answer of a subject: the figures of a step, or the reason why it cannot run."""

    seconds: float = 0.0
    cpu: float = 0.0
    base: int = 0
    """Resident bytes after loading the libraries."""
    peak: int = 0
    loss: float | None = None
    square: float = 0.0
    """Of the subject `products`: operations per second in large squares, by torch."""
    step: float = 0.0
    """Of the subject `products`: operations per second in the products of a step, by torch; `own`: by the trainer's."""
    own: float = 0.0
    wall: float = 0.0
    """Of a recorded step: see `activities.Activities`."""
    busy: float = 0.0
    count: int = 0
    starts: int = 0
    waits: int = 0
    missing: str = ""

    @classmethod
    def parse(cls, line: str) -> StepFigures:
        return cls(**json.loads(line))

    def text(self) -> str:
        return json.dumps(asdict(self)) + "\n"
