"""safetensors files: read rows of their tensors on request, and write tensors one by one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from clusterctl.wire.saved import SavedFile
from clusterctl.wire.saved import Tensor as Entry
from trainer.checkpoint.header import read_header
from trainer.checkpoint.write import bytes_of
from trainer.errors import CheckpointError
from trainer.files import write_whole
from trainer.weights.lazy import Lazy

TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {kind: name for name, kind in TYPES.items()}


def read_safetensors(file: Path) -> dict[str, Lazy]:
    """Return the tensors of a file; for now only its header is read."""
    header = read_header(file)
    return {
        name: Lazy(entry.shape or (1,), TYPES[entry.dtype], partial(_rows, file, entry))
        for name, entry in header.entries.items()
    }


def _rows(file: Path, entry: Entry, start: int, stop: int) -> Tensor:
    rows, shape = (entry.shape or (1,))[0], entry.shape[1:]
    each = (entry.stop - entry.start) // rows if rows else 0
    content = read_bytes(file, entry.start + start * each, (stop - start) * each)
    return content.view(TYPES[entry.dtype]).view(stop - start, *shape)


def read_bytes(file: Path, start: int, size: int) -> Tensor:
    """Return `size` bytes of a file, from byte `start` on."""
    content = torch.empty(size, dtype=torch.uint8)
    target, done = content.numpy().data, 0
    with file.open("rb", buffering=0) as stream:
        while done < size:
            count = os.preadv(stream.fileno(), [target[done:]], start + done)
            if not count:
                raise CheckpointError(f"{file}: ends before byte {start + size:,}, which its tensors need")
            done += count
    return content


def write_safetensors(
    file: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str], wrote: Callable[[int], None]
) -> SavedFile:
    """Write and sync a file; return its size and hash. `wrote` is called with the bytes of each block."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.bytes
        dtype = NAMES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with file.open("wb", buffering=0) as stream:
        for content in (len(text).to_bytes(8, "little"), text):
            stream.write(content)
            digest.update(content)
        for tensor in tensors.values():
            for block in tensor.blocks():
                data = bytes_of(block)
                write_whole(stream.fileno(), data)
                digest.update(data)
                wrote(len(data))
        os.fsync(stream.fileno())
    return SavedFile(8 + len(text) + end, digest.hexdigest())
