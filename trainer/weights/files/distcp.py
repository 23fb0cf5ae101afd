"""Folders of torch's distributed checkpoints: `.metadata` and files of archives. No process group is needed.

The metadata are a pickle, which is read as plain records, so that no code in it is run.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from clusterctl.wire.saved import SavedFile
from trainer.errors import CheckpointError
from trainer.weights.files.raw import hashed_file
from trainer.weights.files.torch_read import attributes, read_pickle, read_torch_part
from trainer.weights.files.torch_write import Scalar, write_archive
from trainer.weights.lazy import Lazy, Shape
from trainer.weights.target import Target

METADATA = ".metadata"
DATA = "__0_0.distcp"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: where it begins in the tensor, and its numbers."""

    offsets: Shape
    tensor: Lazy


# -- read ---------------------------------------------------------------------------------------------------


def read_distcp(folder: Path) -> dict[str, Lazy]:
    """Return the tensors in a folder by their keys; other objects are left out."""
    described, places = _metadata(folder)
    by_key: dict[str, dict[Shape, Mapping[str, Any]]] = {}
    for index, chunk in places.items():
        named = attributes(index)
        offset = named.get("offset")
        if isinstance(named.get("fqn"), str) and isinstance(offset, tuple):
            by_key.setdefault(named["fqn"], {})[offset] = attributes(chunk)
    found = {}
    for key, entry in described.items():
        chunks = attributes(entry).get("chunks")
        if isinstance(key, str) and isinstance(chunks, list):
            found[key] = _tensor(folder, key, attributes(entry), chunks, by_key.get(key, {}))
    return found


def read_object(folder: Path, key: str) -> Any:
    """Return an object other than a tensor, by its key or by the key of its first shard; None if it is missing."""
    for index, chunk in _metadata(folder)[1].items():
        named = attributes(index)
        if str(named.get("fqn")).partition("/shard_")[0] == key and named.get("offset") is None:
            return read_torch_part(*_place(folder, key, attributes(chunk)))
    return None


def _metadata(folder: Path) -> tuple[Mapping[Any, Any], Mapping[Any, Any]]:
    """Return what a folder records about its entries, and where each part of them is."""
    file = folder / METADATA
    metadata = attributes(read_pickle(file))
    described, places = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(described, dict) or not isinstance(places, dict):
        raise CheckpointError(f"{file}: not the metadata of a distributed checkpoint")
    return described, places


def _tensor(
    folder: Path,
    key: str,
    entry: Mapping[str, Any],
    chunks: Sequence[object],
    places: Mapping[Shape, Mapping[str, Any]],
) -> Lazy:
    shape = _of_scalar(entry.get("size"), 1)
    if not _is_shape(shape):
        raise CheckpointError(f"{folder / METADATA}: {key} has no shape")
    held = [_chunk(folder, key, attributes(chunk), places) for chunk in chunks]
    for chunk in held:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.tensor.shape, strict=False)]
        if len(ends) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise CheckpointError(f"{folder / METADATA}: a part of {key} is outside of the tensor")
    if not held or sum(math.prod(chunk.tensor.shape) for chunk in held) != math.prod(shape):
        raise CheckpointError(f"{folder / METADATA}: the parts of {key} do not cover the whole tensor")
    if len(held) == 1:
        return held[0].tensor
    return Lazy(tuple(shape), held[0].tensor.dtype, partial(_read, tuple(shape), held))


def _of_scalar(value: object, only: int) -> object:
    """Return the shape or offset of a tensor; a tensor without dimensions gets one dimension."""
    return (only,) if value == () else value


def _is_shape(value: object) -> TypeGuard[Shape]:
    return isinstance(value, tuple) and bool(value) and all(type(size) is int and size >= 0 for size in value)


def _chunk(
    folder: Path, key: str, chunk: Mapping[str, Any], places: Mapping[Shape, Mapping[str, Any]]
) -> Chunk:
    listed: Any = chunk.get("offsets")
    offsets, sizes = _of_scalar(listed, 0), _of_scalar(chunk.get("sizes"), 1)
    if not isinstance(offsets, tuple) or not _is_shape(sizes) or not _is_shape(offsets):
        raise CheckpointError(f"{folder / METADATA}: a part of {key} has no place or shape")
    file, start, length = _place(folder, key, places.get(listed, {}))
    tensor = read_torch_part(file, start, length)
    if not isinstance(tensor, Lazy) or tensor.shape != sizes:
        raise CheckpointError(f"{file}: does not contain {key} as the metadata describe it")
    return Chunk(offsets, tensor)


def _place(folder: Path, key: str, chunk: Mapping[str, Any]) -> tuple[Path, int, int]:
    """Return the file of a part, where the part begins in it, and its length."""
    name, start, length = (chunk.get(field) for field in ("relative_path", "offset", "length"))
    if (
        not isinstance(name, str)
        or name != Path(name).name
        or type(start) is not int
        or type(length) is not int
    ):
        raise CheckpointError(f"{folder / METADATA}: does not say in which file of this folder {key} is")
    if chunk.get("transform_descriptors"):
        raise CheckpointError(
            f"{folder / METADATA}: {key} is compressed or encrypted",
            "save it without compression and encryption",
        )
    return folder / name, start, length


def _read(shape: Shape, chunks: Sequence[Chunk], start: int, stop: int) -> Tensor:
    """Return the rows [start, stop), taken from all chunks that contain some of them."""
    found = torch.empty((stop - start, *shape[1:]), dtype=chunks[0].tensor.dtype)
    for chunk in chunks:
        begin = chunk.offsets[0]
        first, last = max(start, begin), min(stop, begin + chunk.tensor.rows)
        if first < last:
            target = found[first - start : last - start]
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.tensor.shape, strict=True)):
                target = target.narrow(dim, offset, size) if dim else target
            target.copy_(chunk.tensor.read(first - begin, last - begin))
    return found


# -- write --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A tensor with all its chunks, or an object."""

    key: str
    shape: Shape = ()
    chunks: Sequence[Chunk] = ()
    value: object = None


def write_folder(target: Target, folder: str, items: Sequence[Item]) -> None:
    """Write all items to a data file and its metadata below a folder of the target, unless both exist; verify both."""
    data, metadata = f"{folder}{DATA}", f"{folder}{METADATA}"
    target.total = sum(chunk.tensor.bytes for item in items for chunk in item.chunks)

    def write(file: Path, wrote: Callable[[int], None]) -> SavedFile:
        entry, description = write_distcp(file, items, wrote)
        # Write both together, because the metadata record where in the file each tensor is.
        target.write_bytes(metadata, description)
        return entry

    if metadata not in target.entries or data not in target.entries:
        target.forget(metadata, data)
    target.write_tensors(data, target.total, write)


def write_distcp(file: Path, items: Sequence[Item], wrote: Callable[[int], None]) -> tuple[SavedFile, bytes]:
    """Write all items to one file; return its size and hash, and the content of `.metadata`."""
    # Import it only here: it loads 900 modules, including torch's compiler and sympy, in 1.3 s.
    from torch.distributed.checkpoint import filesystem, metadata

    described: dict[str, metadata.TensorStorageMetadata | metadata.BytesStorageMetadata] = {}
    places: dict[metadata.MetadataIndex, Any] = {}
    with hashed_file(file) as hashed:
        for item in items:
            if item.chunks:
                described[item.key] = _described(item.chunks[0].tensor.dtype, item.shape, item.chunks)
            elif isinstance(item.value, Scalar):
                described[item.key] = _described(torch.float32, (), [None])
            else:
                described[item.key] = metadata.BytesStorageMetadata()
            chunks: Sequence[Chunk | None] = item.chunks or [None]
            for chunk in chunks:
                value = item.value if chunk is None else chunk.tensor
                offsets = None if chunk is None else torch.Size(chunk.offsets)
                if isinstance(value, Scalar):
                    offsets = torch.Size()
                start, length = write_archive(hashed, value, wrote)
                place = filesystem._StorageInfo(file.name, start, length)
                places[metadata.MetadataIndex(item.key, offsets)] = place
    return hashed.entry, pickle.dumps(metadata.Metadata(state_dict_metadata=described, storage_data=places))


def _described(dtype: torch.dtype, shape: Shape, chunks: Sequence[Chunk | None]) -> Any:
    """Return the metadata of a tensor; a chunk of None means the whole of a tensor without dimensions."""
    from torch.distributed.checkpoint import metadata

    return metadata.TensorStorageMetadata(
        metadata.TensorProperties(dtype=dtype),
        torch.Size(shape),
        [
            metadata.ChunkStorageMetadata(
                torch.Size(chunk.offsets if chunk else ()), torch.Size(chunk.tensor.shape if chunk else ())
            )
            for chunk in chunks
        ],
    )
