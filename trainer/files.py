"""Whole-file replace, hashes and syncs: a reader never sees half of a file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write aside, sync, rename over `path`."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or to a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
