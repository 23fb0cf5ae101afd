"""The errors of the trainer with their exit codes.

TrainerError              1
|- InputError             2   the command line, a config or a file is wrong; nothing was trained
|  |- ConfigFaults        2   all faults of one config
|  |- DataError           2   a corpus, tokenizer or index that cannot be used
|  '- CheckpointError     2   a checkpoint that is damaged, absent, or of another model or data
|- DataFailed             1   a data build started and cannot continue (a full disk); run it again to continue
'- TrainingFailed         1   training started and cannot continue (a loss that is not finite, a full disk)
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from clusterctl.wire.train_summary import TrainFault


class TrainerError(Exception):
    """A failure with a message, and a `hint` that says what the user can try."""

    exit_code = 1
    usual_hint = ""
    """The hint if no better one is known."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.usual_hint


class InputError(TrainerError):
    """The command line, a config or a file is wrong; nothing was trained."""

    exit_code = 2


class Together:
    """Errors of several inputs, which are raised as one."""

    def __init__(self, kind: type[InputError] = InputError) -> None:
        self._kind, self._errors = kind, list[InputError]()

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep an error that is raised in the block, and continue after it."""
        try:
            yield
        except InputError as error:
            self._errors.append(error)

    def check(self) -> None:
        """Raise one error for all that were kept."""
        if self._errors:
            hints = dict.fromkeys(error.hint for error in self._errors if error.hint)
            message = "\n".join(error.message for error in self._errors)
            raise self._kind(message, "\n  try: ".join(hints))


UNKNOWN_KEY = "unknown key"


@dataclass(frozen=True)
class Fault(TrainFault):
    """One fault of a config."""

    def is_of(self, key: str) -> bool:
        """Return whether the fault makes the value of `key` (optimizer.lr), or of a part of it, unknown."""
        inside = f"{self.key}.".startswith(f"train.{key}.")
        return inside and not self.what.startswith(UNKNOWN_KEY)

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" + (f" ({self.remedy})" if self.remedy else "")

    def as_json(self) -> dict[str, str]:
        return asdict(self)


class ConfigFaults(InputError):
    """All faults of one config."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


# Why a file cannot be read or written, and a remedy.
OF_FILES = {
    errno.EACCES: "check the owner and permissions of this file and its folder",
    errno.EPERM: "check the owner and permissions of this file and its folder",
    errno.EROFS: "use a folder that you can write to",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "check the path: a part of it is a file",
    errno.ELOOP: "check the path: its symbolic links form a circle",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EFBIG: "allow larger files with `ulimit -f`",
}
FULL = (errno.ENOSPC, errno.EDQUOT)


def machine_error(error: OSError) -> TrainerError | None:
    """Return the error for a file that cannot be used, or for a full disk; None for a bug."""
    if error.errno in FULL:
        return TrainerError(
            f"{error.filename or 'the disk'}: {error.strerror}", "free some space: see `df -h`"
        )
    if error.errno == errno.EEXIST and error.filename:
        # A folder was to be made.
        return InputError(f"{error.filename}: is a file, not a folder", "name another folder")
    hint = OF_FILES.get(error.errno or 0)
    return InputError(f"{error.filename}: {error.strerror}", hint) if hint and error.filename else None


class DataError(InputError):
    """A corpus, tokenizer or index that cannot be used."""


class CheckpointError(InputError):
    """A checkpoint that is damaged, absent, or made of another model or other data."""

    usual_hint = "copy it again from where it was written, or name another checkpoint"


class DataFailed(TrainerError):
    """A data build started and cannot continue; the same command continues from what is built."""


class TrainingFailed(TrainerError):
    """Training started and cannot continue."""
