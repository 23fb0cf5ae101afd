"""safetensors files: read rows of their tensors on request, and write tensors one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from clusterctl.wire.saved import SavedFile
from trainer.checkpoint.access import read_header
from trainer.weights.files.raw import hashed_file, stored, write_tensor
from trainer.weights.lazy import Lazy, shaped

TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}
NAMES = {kind: name for name, kind in TYPES.items()}


def read_safetensors(file: Path) -> dict[str, Lazy]:
    """Return the tensors of a file; for now only its header is read."""
    header = read_header(file)
    return {
        name: shaped(stored(file, entry.start, entry.stop - entry.start), entry.shape, TYPES[entry.dtype])
        for name, entry in header.entries.items()
    }


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
    with hashed_file(file) as hashed:
        hashed.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            write_tensor(hashed.write, tensor, wrote)
    return hashed.entry
