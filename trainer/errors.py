"""Every way that the trainer says no, with its exit code and a remedy.

TrainerError              1
|- InputError             2   the command line, a config or a file is wrong; nothing was trained
|  |- ConfigFaults        2   all the faults of one config at once
|  |- DataError           2   a corpus, tokenizer or index that cannot be used
|  '- CheckpointError     2   a checkpoint that is damaged, absent, or of another model or data
|- DataFailed             1   a build of data began and cannot go on (a full disk); run again, it goes on
'- TrainingFailed         1   training began and cannot go on (a loss that is not finite, a full disk)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


class TrainerError(Exception):
    """A failure in words, and `hint`, what the user can try next."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(TrainerError):
    """What was given is wrong; nothing was trained."""

    exit_code = 2


UNKNOWN_KEY = "unknown key"


@dataclass(frozen=True)
class Fault:
    """One thing wrong in a config: its `key` (train.optimizer.lr), what, and what to write instead."""

    key: str
    what: str
    remedy: str = ""

    def is_of(self, key: str) -> bool:
        """Whether it leaves the value of `key` (optimizer.lr), or a part of it, unknown."""
        inside = f"{self.key}.".startswith(f"train.{key}.")
        return inside and self.what != UNKNOWN_KEY

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" + (f" ({self.remedy})" if self.remedy else "")

    def as_json(self) -> dict[str, str]:
        return asdict(self)


class ConfigFaults(InputError):
    """All the faults of one config."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class DataError(InputError):
    """A corpus, tokenizer or index that cannot be used."""


class CheckpointError(InputError):
    """A checkpoint that is damaged, absent, or made of another model or other data."""


class DataFailed(TrainerError):
    """A build of data began and cannot go on; what is built is kept, and the same command goes on."""


class TrainingFailed(TrainerError):
    """Training began and cannot go on."""
