"""The header of a safetensors file, read strictly: sizes are checked before memory is allocated for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterctl.wire import saved
from clusterctl.wire.saved import Tensor as Entry
from trainer.checkpoint.access import refusing
from trainer.errors import CheckpointError


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
