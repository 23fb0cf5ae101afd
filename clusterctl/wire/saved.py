"""Read checkpoints without the trainer: manifests, headers of safetensors files, hashes.

The format is described in docs/internals/checkpoints.md; `trainer/checkpoint` writes it, and reads manifests and
headers by this module too. Nothing is allocated because a file claims a size.

Agents run it too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

FORMAT, OLD_FORMAT = 2, 1
MANIFEST, LATEST, PARTS = "manifest.json", "latest", ".safetensors"
# Files of format 1.
OLD_FILES = ("model.safetensors", "optimizer.safetensors")
MOMENTS = ("exp_avg.", "exp_avg_sq.")
# Names of older checkpoints of a step that is saved again, until the new one is complete on all nodes; and of folders
# that are being written or removed.
OLD, UNFINISHED = ".old", ".tmp-"
# A file with a name of this prefix protects a step's folder while it is younger than FRESH seconds. Its process
# renews it every RENEWED seconds.
IN_USE, FRESH, RENEWED = ".in-use.", 600.0, 60.0
# A manifest of 1,536 ranks has 1 MB; the safetensors library has the same limit for headers.
MOST_MANIFEST, MOST_HEADER = 256 << 20, 100_000_000
MOST_PIECE = 64 << 20
MOST_DIMENSIONS = 8
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
_KEY = b',\n"sha256": "'
_END = b'"\n}\n'
_HEX = frozenset("0123456789abcdef")


class Damaged(Exception):
    """A checkpoint that cannot be used; `tensor` is the tensor that is damaged, if one is known."""

    def __init__(self, problem: str, tensor: str = "", remedy: str = "") -> None:
        super().__init__(f"{problem}: {remedy}" if remedy else problem)
        self.problem, self.tensor, self.remedy = problem, tensor, remedy


class SavedFile(NamedTuple):
    """The entry of one file in a manifest, or in the journal of a conversion."""

    bytes: int
    sha256: str
    """Of the header, which contains the hashes of the data, or of the whole file if it has no tensors."""
    holds: Any = None
    """Which boxes of which tensors the file contains, unchecked; `boxes_of` reads it. None for a file without
    tensors, and in format 1.
    """

    def as_json(self) -> dict[str, object]:
        document: dict[str, object] = {"bytes": self.bytes, "sha256": self.sha256}
        return document if self.holds is None else {**document, "holds": self.holds}


class Manifest(NamedTuple):
    """The manifest of a checkpoint."""

    format: int
    step: int
    files: dict[str, SavedFile]
    tensors: dict[str, list[int]]
    """The shape of each tensor; none in format 1."""
    facts: dict[str, Any]
    """The other entries, unchanged: they are only shown."""


class Tensor(NamedTuple):
    """One entry of a header: type, shape, and the first and last + 1 byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


# ---- the manifest


def read_manifest(folder: str) -> Manifest:
    """Return the manifest of a step's folder; raise Damaged with the file and the reason."""
    path = os.path.join(folder, MANIFEST)
    check_above(folder)
    check_access(folder)
    return decode_manifest(manifest_content(path), path)


def manifest_content(path: str) -> bytes:
    """Return the bytes of a manifest; raise Damaged for a file that is no manifest, by its kind or size."""
    if size_of(path) > MOST_MANIFEST:
        raise Damaged(f"{path}: larger than {MOST_MANIFEST >> 20} MB, which no manifest is")
    with open(path, "rb") as file:
        return file.read()


def decode_manifest(content: bytes, path: str) -> Manifest:
    """Return the manifest in the bytes of `path`, after checking its hash and its entries."""
    facts = manifest_object(content, path)
    number, step, files, tensors = (facts.pop(key, None) for key in ("format", "step", "files", "tensors"))
    return Manifest(
        number,
        step,
        files_of(files),
        {key: entry["shape"] for key, entry in tensors.items()} if number != OLD_FORMAT else {},
        facts,
    )


def files_of(files: Any) -> dict[str, SavedFile]:
    """Return the entries of a manifest's files, which are checked already."""
    return {
        name: SavedFile(entry["bytes"], entry["sha256"], entry.get("holds")) for name, entry in files.items()
    }


def manifest_object(content: bytes, path: str) -> dict[str, Any]:
    """Return the JSON object in the bytes of a manifest, after checking its hash, format, step, files and tensors."""
    at = content.rfind(_KEY) + len(_KEY)
    hashed = at >= len(_KEY) and content[at + 64 :] == _END
    if hashed and hashlib.sha256(content[:at]).hexdigest().encode() != content[at : at + 64]:
        raise Damaged(f"{path}: damaged: its content does not have the hash that it records")
    try:
        given = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: damaged: not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Damaged(f"{path}: damaged: not a JSON object")
    number = given.get("format")
    if type(number) is int and number > FORMAT and hashed:
        problem = f"{path}: written in format {number} by a newer version; this one reads up to {FORMAT}"
        raise Damaged(problem, remedy="update clusterctl")
    if number != (FORMAT if hashed else OLD_FORMAT) or type(number) is not int:
        raise Damaged(f"{path}: damaged: format {number!r:.20} {'with' if hashed else 'without'} a hash")
    step, files, tensors = given.get("step"), given.get("files"), given.get("tensors")
    wrong = ["step"] * (type(step) is not int or step < 0) + ["files"] * (not isinstance(files, dict))
    for name, entry in files.items() if isinstance(files, dict) else ():
        wrong += [] if _is_entry(name, entry) else [f"files[{name!r}]"]
    if number == FORMAT and not (isinstance(tensors, dict) and all(map(_is_shape, tensors.values()))):
        wrong.append("tensors")
    if wrong:
        raise Damaged(f"{path}: damaged: {', '.join(wrong[:5])} missing or of the wrong kind")
    return given


def encode_manifest(manifest: Mapping[str, object]) -> bytes:
    """Return the bytes of a manifest file, one top-level entry or file on each line."""
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in manifest.items()]
    content = ("{\n" + ",\n".join(lines)).encode() + _KEY
    return content + hashlib.sha256(content).hexdigest().encode() + b'"\n}\n'


def _lines(value: Any) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return (
        "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()) + "}"
    )


def _is_entry(name: str, entry: Any) -> bool:
    """Return whether `name` is a plain file name, and its entry has a size and a hash."""
    plain = name == os.path.basename(name) and name not in ("", ".", "..", MANIFEST) and "\0" not in name
    if not plain or not isinstance(entry, dict) or type(entry.get("bytes")) is not int or entry["bytes"] < 0:
        return False
    digest = entry.get("sha256")
    return isinstance(digest, str) and len(digest) == 64 and _HEX.issuperset(digest)


def _is_shape(entry: Any) -> bool:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    return isinstance(shape, list) and bool(shape) and all(type(size) is int and size > 0 for size in shape)


def check_access(folder: str) -> None:
    """Raise Damaged if every user may change the folder: its hashes would prove nothing."""
    if os.stat(folder).st_mode & 0o002:
        raise Damaged(f"{folder}: every user of this machine can change what is in it", remedy=_close(folder))


def check_above(folder: str) -> None:
    """Raise Damaged if every user may replace the folder by another one."""
    above = os.path.dirname(os.path.abspath(folder))
    mode = os.stat(above).st_mode
    # In a folder such as /tmp users cannot replace what belongs to others.
    if mode & 0o002 and not mode & stat.S_ISVTX:
        raise Damaged(f"{above}: every user of this machine can replace what is in it", remedy=_close(above))


def size_of(path: str) -> int:
    """Return the size of a regular file that not every user can change; raise Damaged otherwise."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{path}: not a regular file")
    if status.st_mode & 0o002:
        raise Damaged(f"{path}: every user of this machine can change it", remedy=_close(path))
    return status.st_size


def _close(path: str) -> str:
    return f"chmod o-w {path}, if you trust what is there"


def boxes_of(manifest: Manifest, name: str) -> Iterator[tuple[str, list[int]]]:
    """Yield each tensor of which a file contains a box, and the box as start, stop, start, stop, ..."""
    keys = list(manifest.tensors)
    try:
        for box, ranges in manifest.files[name].holds:
            for first, last in pairs(ranges):
                if not 0 <= first < last <= len(keys):
                    raise ValueError
                for key in keys[first:last]:
                    yield key, box
    except (TypeError, ValueError):
        raise Damaged(f"{MANIFEST}: damaged: files[{name!r}].holds is missing or wrong") from None


def pairs(flat: list[int]) -> list[tuple[int, int]]:
    """Return (first, second), (third, fourth), ... of a list."""
    return [(flat[at], flat[at + 1]) for at in range(0, len(flat) - 1, 2)]


def volume(box: list[int]) -> int:
    """Return how many numbers are in a box."""
    result = 1
    for start, stop in pairs(box):
        result *= stop - start
    return result


def check_cover(manifest: Manifest) -> None:
    """Raise Damaged unless the files together contain every tensor exactly once."""
    if manifest.format == OLD_FORMAT:
        return
    found = dict.fromkeys(manifest.tensors, 0)
    for name in manifest.files:
        if name.endswith(PARTS):
            for key, box in boxes_of(manifest, name):
                found[key] += volume(box)
    for key, shape in manifest.tensors.items():
        if found[key] != volume([end for size in shape for end in (0, size)]):
            raise Damaged(f"its files do not hold {key} exactly once", key)


# ---- the header of a file


def read_header(handle: int, path: str, digest: str = "") -> tuple[list[Tensor], dict[str, str], int]:
    """Return the tensors of an open file in order, its metadata, and where its data begin.

    `digest` is the SHA-256 of the header that the manifest records.
    """
    size = os.fstat(handle).st_size
    length = int.from_bytes(os.pread(handle, 8, 0), "little")
    if not 2 <= length <= min(size - 8, MOST_HEADER):
        raise Damaged(f"{path}: claims a header of {length} bytes in a file of {size}")
    content = os.pread(handle, 8 + length, 0)
    if digest and hashlib.sha256(content).hexdigest() != digest:
        raise Damaged(f"{path}: damaged: its header does not have the hash in the manifest")
    return decode_header(content[8:], size, path)


def decode_header(content: bytes, size: int, path: str) -> tuple[list[Tensor], dict[str, str], int]:
    """Return what a header says; its tensors must fill a file of `size` bytes, without gap or overlap."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: its header is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise Damaged(f"{path}: its header is not a JSON object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Damaged(f"{path}: the metadata in its header are not texts")
    begin = 8 + len(content)
    tensors = [_tensor(name, entry, begin, size, path) for name, entry in document.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    end = begin
    for tensor in tensors:
        if tensor.start != end:
            raise Damaged(f"{path}: its place overlaps another, or leaves a gap before it", tensor.name)
        end = tensor.stop
    if end != size:
        raise Damaged(f"{path}: its tensors end at byte {end}, and it has {size}")
    return tensors, metadata, begin


def _tensor(name: str, entry: Any, begin: int, size: int, path: str) -> Tensor:
    given: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype: Any = given.get("dtype")
    shape: Any = given.get("shape")
    ends: Any = given.get("data_offsets")
    width = WIDTHS.get(dtype) if isinstance(dtype, str) else None
    sound = _are_counts(shape, MOST_DIMENSIONS) and _are_counts(ends, 2) and len(ends) == 2
    if width is None or not sound:
        raise Damaged(f"{path}: its type, shape or place in the file is wrong", name)
    need = width * volume([end for each in shape for end in (0, each)])
    start, stop = begin + ends[0], begin + ends[1]
    if stop - start != need or stop > size:
        raise Damaged(f"{path}: needs {need:,} bytes, and its place has not that many", name)
    return Tensor(name, dtype, tuple(shape), start, stop)


def _are_counts(value: Any, most: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(number) is int and number >= 0 for number in value)
    )


# ---- verification


def verify_file(folder: str, manifest: Manifest, name: str, progress: Callable[[int], None]) -> None:
    """Compare every byte of a file with its hashes; raise Damaged with the file, and the tensor if one is known.

    `progress` is called with the number of bytes of each piece.
    """
    path, entry = os.path.join(folder, name), manifest.files[name]
    size = size_of(path)
    if size != entry.bytes:
        raise Damaged(f"{path}: damaged: has {size} bytes, the manifest says {entry.bytes}")
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if manifest.format == OLD_FORMAT or not name.endswith(PARTS):
            if _hash(handle, progress) != entry.sha256:
                raise Damaged(f"{path}: damaged: its content is not what was saved (sha256 differs)")
            return
        tensors, metadata, begin = read_header(handle, path, entry.sha256)
        wanted = {name_in_file(key, box, manifest.tensors[key]) for key, box in boxes_of(manifest, name)}
        if wanted != {tensor.name for tensor in tensors}:
            raise Damaged(f"{path}: does not hold the tensors that the manifest says")
        _verify_pieces(handle, path, tensors, metadata, begin, progress)
    finally:
        os.close(handle)


def name_in_file(key: str, box: list[int], shape: list[int]) -> str:
    """Return the name of a box in its file: the tensor's own name if it is the whole, else with its ranges."""
    if box == [end for size in shape for end in (0, size)]:
        return key
    return f"{key}@" + ",".join(f"{start}:{stop}" for start, stop in pairs(box))


def _hash(handle: int, progress: Callable[[int], None]) -> str:
    found = hashlib.sha256()
    at = 0
    while True:
        piece = os.pread(handle, 1 << 20, at)
        if not piece:
            return found.hexdigest()
        found.update(piece)
        at += len(piece)
        progress(len(piece))


def _verify_pieces(
    handle: int,
    path: str,
    tensors: list[Tensor],
    metadata: dict[str, str],
    begin: int,
    progress: Callable[[int], None],
) -> None:
    try:
        hashes, each = bytes.fromhex(metadata["sha256"]), int(metadata["sha256_piece_bytes"])
    except (KeyError, TypeError, ValueError):
        raise Damaged(f"{path}: its header has no hashes of its data") from None
    size = os.fstat(handle).st_size
    if not 0 < each <= MOST_PIECE or len(hashes) != 32 * -(-(size - begin) // each):
        raise Damaged(f"{path}: its header does not have one hash for each piece of its data")
    for number, start in enumerate(range(begin, size, each)):
        piece = os.pread(handle, min(each, size - start), start)
        if hashlib.sha256(piece).digest() != hashes[32 * number : 32 * number + 32]:
            raise Damaged(
                f"{path}: damaged: bytes {start} to {start + each} are not what was saved (sha256 differs)",
                _names_at(tensors, start, start + each),
            )
        bad = _not_finite(piece, start, tensors)
        if bad:
            raise Damaged(f"{path}: holds numbers that are not finite", bad)
        progress(len(piece))


def _names_at(tensors: list[Tensor], start: int, stop: int) -> str:
    """Return the tensors that have bytes in a range, in short form."""
    names = [tensor.name for tensor in tensors if tensor.start < stop and start < tensor.stop]
    return ", ".join(names[:3]) + (f" or {len(names) - 3} more" if len(names) > 3 else "")


def _not_finite(piece: bytes, start: int, tensors: list[Tensor]) -> str:
    """Return the first weight in fp32 of a piece that is infinite or no number, or "".

    Such a number has all bits of its exponent set, so that its highest byte is 7f or ff; few other numbers have that.
    """
    high = piece[3::4]
    for mark in (b"\x7f", b"\xff"):
        at = high.find(mark)
        while at >= 0:
            if piece[4 * at + 2] & 0x80:
                name = _names_at(tensors, start + 4 * at, start + 4 * at + 1)
                if not name.startswith(MOMENTS):
                    return name
            at = high.find(mark, at + 1)
    return ""
