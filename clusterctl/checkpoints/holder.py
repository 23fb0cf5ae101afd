"""Ask one machine about its checkpoints: a node over its connection, or this machine directly."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from clusterctl.agent.files import checkpoints as on_disk
from clusterctl.agent.request import Refused
from clusterctl.errors import LinkLost, UsageError, WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.transfer.pull import pull_tree
from clusterctl.transfer.push import Progress
from clusterctl.transport.connection import Connection, read_answer
from clusterctl.wire import saved
from clusterctl.wire.saved import Manifest
from clusterctl.wire.typed_json import decode

Report = Callable[[int], None]
"""Called with the number of bytes that were read since the last call."""
HERE = "here"


@dataclass(frozen=True)
class SavedLayout:
    """The layout of the ranks that saved a checkpoint, from its manifest."""

    world: int | None = None
    data: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    sequence_parallel: bool | None = None
    zero: int | None = None
    engine: str | None = None
    precision: str | None = None

    def as_json(self) -> dict[str, object]:
        """Return the entries that the manifest has."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Entry:
    """The files of a checkpoint on one machine."""

    name: str
    path: str
    step: int
    digest: str
    """The SHA-256 of the manifest; "" if it cannot be read."""
    have: tuple[str, ...] = ()
    """The files that exist there with the right size."""
    faults: tuple[str, ...] = ()
    in_use: bool = False
    """Whether it is being read or copied."""
    count: int = 0
    bytes: int = 0
    """Bytes of all files of the checkpoint, on any machine."""
    state: str | None = None
    loss: float | None = None
    eval_loss: float | None = None
    tokens: int | None = None
    consumed_samples: int | None = None
    time: float | None = None
    save_seconds: float | None = None
    layout: SavedLayout | None = None


@dataclass(frozen=True)
class Disk:
    """The disk of a folder."""

    free: int
    total: int


@dataclass(frozen=True)
class Listing:
    """The checkpoints in a folder of one machine, newest first."""

    path: str
    missing: bool
    latest: str
    checkpoints: tuple[Entry, ...]
    disk: Disk


@dataclass(frozen=True)
class FileCheck:
    """The verification of one file: its fault, or "", and the damaged tensor if one is known."""

    fault: str = ""
    tensor: str = ""
    file: str = ""


@dataclass(frozen=True)
class Verification:
    """The verification of one machine's part of a checkpoint."""

    path: str
    files: dict[str, FileCheck] = field(hash=False)
    faults: tuple[FileCheck, ...] = ()
    digest: str = ""


@dataclass(frozen=True)
class Removal:
    """The bytes that a removal freed, or why the folder stays."""

    bytes: int
    kept: str


class Holder(Protocol):
    """A machine with checkpoints."""

    @property
    def name(self) -> str:
        """Return the node's name, or "here"."""

    @property
    def node(self) -> Node:
        """Return the node; this machine counts as one."""

    def listing(self, folder: str) -> Listing:
        """Return the checkpoints in a folder."""

    def verify(self, path: str, report: Report) -> Verification:
        """Compare the files of a checkpoint with their hashes."""

    def held(self, paths: Sequence[str]) -> AbstractContextManager[None]:
        """Protect checkpoints from being removed."""

    def remove(self, path: str, digest: str, *, check: bool) -> Removal:
        """Remove a checkpoint unless it is in use; with `check`, only report whether it is."""

    def manifest(self, path: str) -> Manifest:
        """Return the manifest of a checkpoint."""

    def manifest_content(self, path: str) -> bytes:
        """Return the manifest's file byte for byte: its hash is over the text."""

    def fetch(self, path: str, names: Sequence[str], dest: Path, progress: Progress) -> None:
        """Fetch files of a checkpoint to a folder of this machine."""


class ThisMachine:
    """The machine that runs this program."""

    name = HERE
    node = Node(name=HERE, host="local", address="127.0.0.1")

    def listing(self, folder: str) -> Listing:
        return decode(Listing, on_disk.listing(folder))

    def entry(self, path: str) -> Entry:
        """Return the checkpoint in one folder of any name."""
        return decode(Entry, on_disk.describe(path))

    def verify(self, path: str, report: Report) -> Verification:
        return decode(Verification, on_disk.verify(path, report))

    @contextlib.contextmanager
    def held(self, paths: Sequence[str]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path in paths:
                stack.enter_context(on_disk.protected(path, secrets.token_hex(6)))
            yield

    def remove(self, path: str, digest: str, *, check: bool) -> Removal:
        try:
            return decode(Removal, on_disk.remove(path, digest, check))
        except Refused as refused:
            raise UsageError(str(refused)) from None
        except OSError as error:
            raise WorkFailed(f"{path}: {error.strerror}", "check the folder's permissions") from None

    def manifest(self, path: str) -> Manifest:
        try:
            return saved.read_manifest(path)
        except saved.Damaged as problem:
            raise UsageError(str(problem)) from None
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None

    def manifest_content(self, path: str) -> bytes:
        return Path(path, saved.MANIFEST).read_bytes()

    def fetch(self, path: str, names: Sequence[str], dest: Path, progress: Progress) -> None:
        dest.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(f"{path}/{name}", dest / name)


@dataclass(frozen=True)
class NodeHolder:
    """A node, over its connection."""

    node: Node
    connection: Connection = field(hash=False, compare=False)

    @property
    def name(self) -> str:
        return self.node.name

    def listing(self, folder: str) -> Listing:
        return self.connection.ask(Listing, "checkpoints", {"path": folder})

    def verify(self, path: str, report: Report) -> Verification:
        request = self.connection.open("verify_checkpoint", {"path": path})
        try:
            for frame in request:
                report(int(frame.fields.get("bytes", 0)))
        except BaseException:
            request.cancel()
            raise
        return read_answer(Verification, request.result, self.name, "verify_checkpoint")

    @contextlib.contextmanager
    def held(self, paths: Sequence[str]) -> Iterator[None]:
        request = self.connection.open("hold_checkpoint", {"paths": list(paths)})
        try:
            next(iter(request), None)
            yield
        finally:
            # A node without a connection needs no cancelling.
            with contextlib.suppress(LinkLost):
                request.cancel()

    def remove(self, path: str, digest: str, *, check: bool) -> Removal:
        params = {"path": path, "digest": digest, "check": check}
        return self.connection.ask(Removal, "remove_checkpoint", params)

    def manifest(self, path: str) -> Manifest:
        content = self.manifest_content(path)
        try:
            return saved.decode_manifest(content, f"{self.name}:{path}/{saved.MANIFEST}")
        except saved.Damaged as problem:
            raise WorkFailed(
                str(problem), "another node's copy may be valid: see `checkpoint verify`"
            ) from None

    def manifest_content(self, path: str) -> bytes:
        return self.connection.get(f"{path}/{saved.MANIFEST}", limit=saved.MOST_MANIFEST)

    def fetch(self, path: str, names: Sequence[str], dest: Path, progress: Progress) -> None:
        pull_tree(self.connection, path, dest, files=names, progress=progress)
