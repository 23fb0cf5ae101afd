"""Read files of torch.save in both of torch's formats, without running code in them; tensors are read on request.

The pickle in such a file can name any function. Here a name must be one of a few that have a stand-in, or belong to a
package that trainings use: then it becomes an inert record. Otherwise the file is refused.
"""

from __future__ import annotations

import collections
import contextlib
import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from trainer.errors import CheckpointError
from trainer.files import BAD_PICKLE
from trainer.weights.files.raw import stored
from trainer.weights.lazy import Lazy, rows_of, shaped

MOST_PICKLE = 256 << 20
MOST_ENTRIES = 1_000_000
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
# Trainings save objects of these packages with tensors. They become records; the packages are not imported.
RECORDED = {
    *("_codecs", "argparse", "collections", "copyreg", "datetime", "enum", "pathlib", "signal", "types"),
    *(
        "apex",
        "deepspeed",
        "megatron",
        "mindspeed",
        "modellink",
        "mpu",
        "numpy",
        "torch",
        "transformer_engine",
    ),
}
HARMLESS: dict[str, type] = {kind.__name__: kind for kind in (dict, list, tuple, set, frozenset)}


class Record:
    """An object whose class is not imported; its attributes are in `state`."""

    # Objects that the pickle never initialises keep these values.
    state: Mapping[str, Any] = {}
    arguments: tuple[object, ...] = ()

    def __init__(self, *arguments: object, **_: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = dict(state) if isinstance(state, dict) else {}

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        pass

    def extend(self, values: object) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)


class Storage:
    """The numbers of one or more tensors: their type, their count, and where they begin in the file."""

    def __init__(self, file: Path, dtype: torch.dtype, count: int, start: int | None) -> None:
        self.file, self.dtype, self.count, self.start = file, dtype, count, start

    def read(self, first: int, last: int) -> Tensor:
        """Return the numbers [first, last)."""
        if self.start is None:
            raise CheckpointError(f"{self.file}: a tensor has no data in the file")
        content = stored(self.file, self.start, self.count * self.dtype.itemsize)
        return shaped(content, (self.count,), self.dtype).read(first, last)


def read_torch(file: Path) -> Any:
    """Return the object in a file of torch.save; tensors become Lazy, unknown objects become Record."""
    with _failures(file), file.open("rb") as stream:
        is_archive = zipfile.is_zipfile(stream)
        stream.seek(0)
        return _read_archive(file, stream, 0) if is_archive else _read_old(file, stream)


def read_torch_dict(file: Path) -> dict[Any, Any]:
    """Return the dict in a file of torch.save."""
    document = read_torch(file)
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: not a dict")
    return document


def read_torch_part(file: Path, start: int, length: int) -> Any:
    """Return the object that torch.save wrote into a part of a file."""
    with _failures(file):
        if not 0 <= start <= start + length <= file.stat().st_size:
            raise CheckpointError(f"{file}: ends before byte {start + length:,}, which an entry needs")
        with _Window(file, start, length) as stream:
            return _read_archive(file, stream, start)


def read_pickle(file: Path) -> Any:
    """Return the object in a file that is one pickle without tensors."""
    with _failures(file):
        if file.stat().st_size > MOST_PICKLE:
            raise CheckpointError(f"{file}: larger than {MOST_PICKLE >> 20} MB")

        def refuse(dtype: torch.dtype, key: str, count: int) -> Storage:
            raise CheckpointError(f"{file}: refers to tensors")

        return _unpickle(file, file.read_bytes(), refuse)


@contextlib.contextmanager
def _failures(file: Path) -> Iterator[None]:
    """Raise a CheckpointError for the exceptions that reading a damaged file raises."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from None
    except (*BAD_PICKLE, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{file}: not a file of torch.save, or damaged: {error}") from None


class _Window(io.FileIO):
    """A part of a file as a file."""

    def __init__(self, file: Path, start: int, length: int) -> None:
        super().__init__(file)
        self._start, self._length = start, length
        self.seek(0)

    def tell(self) -> int:
        return super().tell() - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        return super().seek(self._start + base + offset) - self._start

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left)) or b""


# -- the format since torch 1.6: a zip archive ---------------------------------------------------------------


def _read_archive(file: Path, stream: BinaryIO | _Window, base: int) -> Any:
    """Return the object in an archive that begins at byte `base` of the file."""
    size = stream.seek(0, io.SEEK_END)
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        if len(entries) > MOST_ENTRIES:
            raise CheckpointError(f"{file}: has {len(entries):,} entries")
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{file}: a zip archive, but not one of torch.save: it has no data.pkl")
        prefix = pickles[0].filename.removesuffix("data.pkl")
        places = _places(file, stream, entries, size)
        content = _small(file, archive, pickles[0], MOST_PICKLE)
        order = next((entry for entry in entries if entry.filename == f"{prefix}byteorder"), None)
        if order is not None and _small(file, archive, order, 16) != b"little":
            raise CheckpointError(f"{file}: was saved on a machine with another byte order")

    def storage(dtype: torch.dtype, key: str, count: int) -> Storage:
        start, held = places.get(f"{prefix}data/{key}", (0, -1))
        if held != count * dtype.itemsize:
            raise CheckpointError(f"{file}: data/{key} does not have the {count:,} numbers of its tensor")
        return Storage(file, dtype, count, base + start)

    return _unpickle(file, content, storage)


def _places(
    file: Path, stream: BinaryIO | _Window, entries: Sequence[zipfile.ZipInfo], size: int
) -> dict[str, tuple[int, int]]:
    """Return where each entry's content begins, and its size; refuse compressed and overlapping entries."""
    places, end = {}, 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise CheckpointError(f"{file}: {entry.filename} is compressed, which torch never does")
        stream.seek(entry.header_offset)
        header = stream.read(30)
        if entry.header_offset < end or len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{file}: the entries of the archive overlap")
        name, extra = struct.unpack_from("<HH", header, 26)
        start = entry.header_offset + 30 + name + extra
        end = start + entry.file_size
        if end > size or entry.filename in places:
            raise CheckpointError(f"{file}: {entry.filename} ends after the end of the file, or occurs twice")
        places[entry.filename] = (start, entry.file_size)
    return places


def _small(file: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> bytes:
    if entry.file_size > most:
        raise CheckpointError(f"{file}: {entry.filename} has {entry.file_size:,} bytes")
    return archive.read(entry)


# -- the older format: pickles one after the other, then the numbers ----------------------------------------


def _read_old(file: Path, stream: BinaryIO) -> Any:
    size = file.stat().st_size
    storages: dict[str, Storage] = {}

    def storage(dtype: torch.dtype, key: str, count: int) -> Storage:
        found = storages.setdefault(key, Storage(file, dtype, count, None))
        if (found.dtype, found.count) != (dtype, count):
            raise CheckpointError(f"{file}: two tensors describe the same numbers differently")
        return found

    def unpickled() -> Any:
        start = stream.tell()
        content = stream.read(min(MOST_PICKLE, size - start))
        length = _scan(file, content)
        stream.seek(start + length)
        return _unpickle(file, content[:length], storage)

    if unpickled() != MAGIC or unpickled() != PROTOCOL:
        raise CheckpointError(f"{file}: not a file of torch.save")
    unpickled()
    document, keys = unpickled(), unpickled()
    if not isinstance(keys, list) or set(keys) != set(storages) or len(keys) != len(storages):
        raise CheckpointError(f"{file}: does not list the numbers of its tensors")
    for key in keys:
        found = storages[key]
        count = int.from_bytes(stream.read(8), "little")
        found.start = stream.tell()
        end = found.start + count * found.dtype.itemsize
        if count != found.count or end > size:
            raise CheckpointError(f"{file}: ends before the numbers of its tensors, or has other numbers")
        stream.seek(end)
    return document


# -- pickles --------------------------------------------------------------------------------------------------


def _scan(file: Path, content: bytes) -> int:
    """Return where the first pickle in `content` ends; refuse a pickle that makes the reader allocate too much."""
    stream = io.BytesIO(content)
    for opcode, argument, _ in pickletools.genops(stream):
        if "PUT" in opcode.name and isinstance(argument, int) and argument > len(content):
            raise CheckpointError(f"{file}: its pickle asks for {argument:,} memory cells")
        if opcode.name.startswith("EXT"):
            raise CheckpointError(f"{file}: its pickle uses the registry of extensions")
    return stream.tell()


def _unpickle(file: Path, content: bytes, storage: Callable[[torch.dtype, str, int], Storage]) -> Any:
    _scan(file, content)
    return _Unpickler(file, content, storage).load()


class _Unpickler(pickle.Unpickler):
    """Builds dicts, lists, numbers and texts; never imports anything."""

    def __init__(
        self, file: Path, content: bytes, storage: Callable[[torch.dtype, str, int], Storage]
    ) -> None:
        super().__init__(io.BytesIO(content), encoding="latin-1")
        self._file, self._storage = file, storage

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name."""
        known = STAND_INS.get(f"{module}.{name}")
        if known is not None:
            return known
        if module in ("builtins", "__builtin__") and name in HARMLESS:
            return HARMLESS[name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if module.partition(".")[0] in RECORDED:
            return type(name.rpartition(".")[2], (Record,), {"origin": f"{module}.{name}"})
        problem = f"{self._file}: its pickle names {module}.{name}, which no checkpoint needs"
        raise CheckpointError(problem, "do not load this file with a program that runs pickles")

    def persistent_load(self, key: Any) -> Any:
        """Return the storage that a key describes."""
        if not isinstance(key, tuple) or len(key) < 5 or key[0] != "storage":
            raise CheckpointError(f"{self._file}: its pickle refers to something other than a tensor")
        _, dtype, name, _, count, *view = key
        if not isinstance(dtype, torch.dtype) or type(count) is not int or count < 0 or any(view):
            raise CheckpointError(f"{self._file}: a tensor has an unknown type or size")
        return self._storage(dtype, str(name), count)


def _tensor(storage: Any, offset: int, shape: Sequence[int], strides: Sequence[int], *_: object) -> Lazy:
    """Return a tensor that reads from a storage."""
    shape, strides = tuple(shape) or (1,), tuple(strides) if shape else (1,)
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a tensor has no storage, or a wrong shape")
    count = math.prod(shape)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if count > storage.count or (count and last >= storage.count):
        raise ValueError(f"a tensor of shape {list(shape)} is outside of its {storage.count:,} numbers")
    if _is_contiguous(shape, strides):
        numbers_of = Lazy((storage.count,), storage.dtype, storage.read)
        return shaped(rows_of(numbers_of, offset, offset + count), shape)
    return Lazy(shape, storage.dtype, partial(_strided, storage, offset, shape, strides), at_once=True)


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    need = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != need:
            return False
        need *= size
    return True


def _strided(
    storage: Storage, offset: int, shape: Sequence[int], strides: Sequence[int], start: int, stop: int
) -> Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return storage.read(offset, offset + extent).as_strided(shape, strides)[start:stop].contiguous()


def _parameter(tensor: Any, *_: object) -> Any:
    return tensor


def _of_type(build: Callable[..., Any], _: object, arguments: Sequence[Any], *__: object) -> Any:
    return build(*arguments)


def _size(sizes: Sequence[int] = ()) -> tuple[int, ...]:
    return tuple(sizes)


def _member(owner: object, name: object) -> Record:
    """Return a member of an enum, which Python 3.11.0 to 3.11.3 write as `getattr` of its class."""
    is_recorded = isinstance(owner, type) and issubclass(owner, Record)
    if not is_recorded or not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise ValueError("its pickle calls getattr for something other than a member of an enum")
    return cast(type[Record], owner)(name)


STAND_INS: Mapping[str, Any] = {
    "builtins.getattr": _member,
    "__builtin__.getattr": _member,
    "collections.OrderedDict": collections.OrderedDict,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
}


def attributes(value: object) -> Mapping[str, Any]:
    """Return the attributes of a record or the entries of a dict; {} for anything else."""
    if isinstance(value, Record):
        return value.state
    return value if isinstance(value, dict) else {}
