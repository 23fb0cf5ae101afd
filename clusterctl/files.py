"""Write local files: replace them atomically, or add whole lines to them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import IO, Any

from clusterctl.errors import UsageError


class InFolder:
    """The path of a file in the folder that an attribute of an object names: `record = InFolder("run.json")`."""

    def __init__(self, name: str, folder: str = "root") -> None:
        self._name, self._folder = name, folder

    def __get__(self, owner: object, kind: type[object]) -> Path:
        folder: Path = getattr(owner, self._folder)
        return folder / self._name


def replace_file(path: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Replace a file atomically: write a temporary file, fsync, rename."""
    raw = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    try:
        with open(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException as problem:
        aside.unlink(missing_ok=True)
        if isinstance(problem, OSError) and problem.errno:
            problem.filename = str(path)
        raise


def make_private_folder(path: Path) -> None:
    """Create a folder, and those above it, that only its owner can enter."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file as `open` does; a file that this creates can be read by its owner only."""
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=lambda name, flags: os.open(name, flags, 0o600))


def add_lines(path: Path, lines: bytes) -> int:
    """Append whole lines to a private file of lines; return its size.

    If the file ends in an incomplete line, after a full disk or a kill, end that line first: otherwise the new line
    would be lost in it.
    """
    with open_private(path, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        broken = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * broken + lines)
        file.flush()
        return file.tell()


def save_new(path: Path, text: str, *, force: bool = False, dry_run: bool = False) -> bool:
    """Write a result to a file; return False if the file has this text already.

    A file with another text is refused unless `force` is set. A dry run writes nothing, with the same result.
    """
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", "name a file")
    if file := next((parent for parent in path.parents if parent.is_file()), None):
        raise UsageError(f"{path}: {file} is a file, not a folder", "name another folder")
    try:
        existing = path.read_bytes() if path.exists() else None
        if existing == text.encode() and not path.is_symlink():
            return False
        if existing is not None and not force:
            raise UsageError(
                f"{path}: another file with this name exists", "--force overwrites it; or choose another name"
            )
        if not dry_run:
            replace_file(path, text)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror or error}", "check the folder and its permissions"
        ) from None
    return True
