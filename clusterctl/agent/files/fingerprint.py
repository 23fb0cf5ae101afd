"""Fingerprint data that is on a node already, reading so little that a terabyte takes seconds.

Files up to 64 MiB are hashed whole; of larger ones the size and 64 blocks spread over the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from typing import Any, Dict, Iterator, List, Tuple

from clusterctl.agent.processes import read_limited
from clusterctl.agent.request import Refused, Request

# Bytes of the largest file that is hashed whole, in 0.1 s.
WHOLE = 64 << 20
BLOCKS, BLOCK = 64, 64 << 10
MOST_FILES = 100_000
# Bytes that are read of the manifest of a build.
LARGEST_MANIFEST = 16 << 20
# The header of Megatron's .idx.
HEADER = struct.Struct("<9sQBQQ")
# Bytes of a token, by the type in the header.
WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}


def fingerprint_folder(request: Request) -> Dict[str, Any]:
    """Return size and hash of every file below a folder, and the detected faults."""
    path = request.path()
    if not os.path.isdir(path):
        return {"path": path, "missing": True, "sizes": {}, "hashes": {}, "faults": []}
    files: Dict[str, List[Any]] = {}
    for name, full in _files(path):
        if len(files) == MOST_FILES:
            raise Refused("too-many", f"{path} has more than {MOST_FILES} files")
        size = os.stat(full).st_size
        files[name] = [size, fingerprint_of(full, size)]
    faults = [fault for name in files for fault in faults_of(path, name, files)]
    sizes, hashes = ({name: entry[at] for name, entry in files.items()} for at in (0, 1))
    return {"path": path, "missing": False, "sizes": sizes, "hashes": hashes, "faults": faults}


def _files(root: str) -> Iterator[Tuple[str, str]]:
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(entry for entry in folders if not entry.startswith("."))
        for name in sorted(names):
            full = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(full):
                yield os.path.relpath(full, root), full


def fingerprint_of(path: str, size: int) -> str:
    """Return `sha256:` of a complete file, or `sample:` of blocks of a large one, which may miss a changed bit."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        if size <= WHOLE:
            for piece in iter(lambda: stream.read(1 << 20), b""):
                digest.update(piece)
            return "sha256:" + digest.hexdigest()
        for number in range(BLOCKS):
            stream.seek((size - BLOCK) * number // (BLOCKS - 1))
            digest.update(stream.read(BLOCK))
    return "sample:" + digest.hexdigest()


def faults_of(root: str, name: str, files: Dict[str, List[Any]]) -> Iterator[str]:
    """Yield the faults of one file: of an index, or of the manifest of a build."""
    if name.endswith(".idx"):
        yield from _index_faults(root, name, files)
    if name.endswith(".manifest.json"):
        yield from _manifest_faults(root, name, files)


def _index_faults(root: str, name: str, files: Dict[str, List[Any]]) -> Iterator[str]:
    """Yield a fault if the last sequence of an index does not end where its .bin ends."""
    binary = name[:-4] + ".bin"
    if binary not in files:
        yield f"{name}: its .bin is missing"
        return
    with open(os.path.join(root, name), "rb") as stream:
        head = stream.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(b"MMIDIDX\0\0"):
            return
        _, _, code, sequences, marks = HEADER.unpack(head)
        needed = HEADER.size + 12 * sequences + 8 * marks
        if code not in WIDTHS or files[name][0] not in (needed, needed + sequences):
            yield f"{name}: has {files[name][0]} bytes; its header asks for {needed}: it was cut"
            return
        end = 0
        if sequences:
            stream.seek(HEADER.size + 4 * (sequences - 1))
            (length,) = struct.unpack("<i", stream.read(4))
            stream.seek(HEADER.size + 4 * sequences + 8 * (sequences - 1))
            (start,) = struct.unpack("<q", stream.read(8))
            end = start + length * WIDTHS[code]
    if files[binary][0] != end:
        yield f"{binary}: has {files[binary][0]} bytes, but its index ends at {end}"


def _manifest_faults(root: str, name: str, files: Dict[str, List[Any]]) -> Iterator[str]:
    try:
        outputs = json.loads(read_limited(os.path.join(root, name), LARGEST_MANIFEST))["outputs"]
        output = {name[: -len("manifest.json")] + ending: entry for ending, entry in outputs.items()}
        for path, entry in output.items():
            size, digest = files.get(path, [None, ""])
            if size is None:
                yield f"{path}: is missing, and {name} names it"
            elif size != entry["bytes"]:
                yield f"{path}: has {size} bytes, its manifest says {entry['bytes']}"
            elif digest.startswith("sha256:") and digest != "sha256:" + entry["sha256"]:
                yield f"{path}: is not the file that was built: its hash differs"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield f"{name}: not a manifest of a build"
