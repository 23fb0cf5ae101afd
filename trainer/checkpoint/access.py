"""Refuse files that other users of the machine can change or replace, and read headers of safetensors strictly.

Sizes in a header are checked before memory is allocated for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clusterctl.wire import saved
from clusterctl.wire.saved import Tensor as Entry
from trainer.errors import CheckpointError


@contextmanager
def refusing() -> Iterator[None]:
    """Raise a CheckpointError for what the shared reader of checkpoints refuses."""
    try:
        yield
    except saved.Damaged as error:
        tensor = f" (tensor {error.tensor})" if error.tensor else ""
        raise CheckpointError(f"{error.problem}{tensor}", error.remedy) from None


def check_access(folder: Path) -> None:
    """Refuse a folder that every user may change: its hashes would prove nothing."""
    try:
        with refusing():
            saved.check_access(str(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None


def check_file(file: Path) -> int:
    """Return the size of a regular file; refuse links, which may lead out of the folder, and open permissions."""
    with refusing():
        return saved.size_of(str(file))


@dataclass(frozen=True)
class Header:
    """The content of a file according to its header; `data` is where the bytes of the first tensor begin."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data: int


def header_of(handle: int, file: Path, digest: str = "") -> Header:
    """Return the header of an open file, of which `digest` is the SHA-256 if it is known."""
    with refusing():
        tensors, metadata, begin = saved.read_header(handle, str(file), digest)
    return Header({tensor.name: tensor for tensor in tensors}, metadata, begin)


def read_header(file: Path) -> Header:
    """Return the header of a safetensors file; a CheckpointError names the file and the fault."""
    try:
        with file.open("rb") as stream:
            return header_of(stream.fileno(), file)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
