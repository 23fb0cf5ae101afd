"""Write files of torch.save tensor by tensor; torch itself would need all tensors in memory."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch._utils

from clusterctl.wire.saved import SavedFile
from trainer.weights.files.raw import Hashed, hashed_file, write_tensor
from trainer.weights.lazy import Lazy, Shape, in_memory

TYPES = {
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
}
FOLDER = "archive"


@dataclass(frozen=True)
class Scalar:
    """A tensor without dimensions, in fp32."""

    value: float


class _Numbers:
    """Represents the storage of a tensor in the pickle."""

    def __init__(self, key: str, tensor: Lazy) -> None:
        self.key, self.tensor = key, tensor


class _Pickler(pickle.Pickler):
    """Pickles each Lazy in the form of a tensor, and collects all of them."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[Lazy] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Numbers):
            return None
        tensor = value.tensor
        count = tensor.bytes // tensor.dtype.itemsize
        return ("storage", TYPES[tensor.dtype], value.key, "cpu", count)

    def reducer_override(self, value: Any) -> Any:
        shape: Shape
        if isinstance(value, Scalar):
            shape, value = (), in_memory(torch.tensor([value.value]))
        elif isinstance(value, Lazy):
            shape = value.shape
        else:
            return NotImplemented
        numbers = _Numbers(str(len(self.tensors)), value)
        self.tensors.append(value)
        strides: list[int] = []
        each = 1
        for size in reversed(shape):
            strides.insert(0, each)
            each *= size
        hooks: dict[int, Any] = collections.OrderedDict()
        return torch._utils._rebuild_tensor_v2, (numbers, 0, shape, tuple(strides), False, hooks)


def write_torch(file: Path, document: object, wrote: Callable[[int], None]) -> SavedFile:
    """Write an object of plain values and Lazy tensors; return the size and hash of the file."""
    with hashed_file(file) as hashed:
        write_archive(hashed, document, wrote)
    return hashed.entry


def write_archive(hashed: Hashed, document: object, wrote: Callable[[int], None]) -> tuple[int, int]:
    """Append an archive as torch.save writes it; return where it begins, and its length."""
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(document)
    start = hashed.total
    hashed.begin()
    with zipfile.ZipFile(hashed, "w", zipfile.ZIP_STORED) as archive:
        _entry(archive, "data.pkl", content.getvalue())
        _entry(archive, "byteorder", b"little")
        for key, tensor in enumerate(pickler.tensors):
            _write_tensor(archive, f"{FOLDER}/data/{key}", tensor, wrote)
        _entry(archive, "version", b"3\n")
    return start, hashed.total - start


def _entry(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(_info(f"{FOLDER}/{name}", len(content)), content)


def _write_tensor(archive: zipfile.ZipFile, name: str, tensor: Lazy, wrote: Callable[[int], None]) -> None:
    with archive.open(_info(name, tensor.bytes), "w", force_zip64=True) as entry:
        write_tensor(entry.write, tensor, wrote)


def _info(name: str, size: int) -> zipfile.ZipInfo:
    # Use the same time in every file, so that the same weights give the same bytes.
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.file_size = size
    return info


def namespace(values: Mapping[str, object]) -> argparse.Namespace:
    """Return values as the `argparse.Namespace` in which a program saves its arguments."""
    return argparse.Namespace(**values)
