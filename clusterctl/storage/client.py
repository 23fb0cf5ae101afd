"""Let nodes, or this machine, move files from and to an object store."""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from clusterctl.errors import UsageError, WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.storage import program
from clusterctl.storage.address import Address
from clusterctl.storage.credentials import Access
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import on_each
from clusterctl.wire.typed_json import BadValue, decode, parse

# The list of a folder in a store: it is written after all files that it names, so a folder without it is unfinished.
LIST = "clusterctl-files.json"
FORMAT = 1
# Limit of bytes of one line of an answer, such as the list of a large folder.
MOST_ANSWER = 64 << 20
Progress = Callable[[int], None]
T = TypeVar("T")


@dataclass(frozen=True)
class StoredFile:
    """One file in a store: its size, and the SHA-256 of each of its pieces."""

    bytes: int
    piece: int
    pieces: tuple[str, ...]

    def fault(self) -> str:
        """Return the fault of this entry of a list, or ""."""
        count = max(1, -(-self.bytes // self.piece)) if self.piece > 0 and self.bytes >= 0 else -1
        sound = all(len(digest) == 64 for digest in self.pieces)
        return "" if count == len(self.pieces) and sound else "its size, piece or hashes are wrong"


@dataclass(frozen=True)
class FileList:
    """The list of a folder in a store."""

    files: dict[str, StoredFile]
    format: int = FORMAT
    step: int = -1
    digest: str = ""
    """The SHA-256 of a checkpoint's manifest."""

    @property
    def size(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def text(self) -> str:
        """Return the list as it is stored."""
        files = {
            name: {"bytes": file.bytes, "piece": file.piece, "pieces": list(file.pieces)}
            for name, file in sorted(self.files.items())
        }
        return json.dumps({"format": self.format, "step": self.step, "digest": self.digest, "files": files})

    @property
    def id(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()


def read_list(text: str, where: str) -> FileList:
    """Return the list in a text; raise WorkFailed if it is no list, or names a file outside its folder."""
    try:
        found = decode(FileList, parse(text))
    except BadValue as problem:
        raise WorkFailed(f"{where}: damaged: {problem}", "upload the folder again") from None
    if found.format != FORMAT:
        raise WorkFailed(f"{where}: has format {found.format}", "use the version that wrote it")
    for name, file in found.files.items():
        wrong = any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name or "\\" in name
        if wrong or file.fault():
            fault = "no path inside the folder" if wrong else file.fault()
            raise WorkFailed(f"{where}: damaged: {name[:80]!r}: {fault}", "upload the folder again")
    return found


@dataclass(frozen=True)
class StoredNames:
    """The folders below a prefix of a store, and the size and ETag of each object, by its key."""

    folders: tuple[str, ...]
    sizes: dict[str, int]
    tags: dict[str, str]


@dataclass(frozen=True)
class Downloaded:
    """Bytes that a download fetched, and bytes that existed already."""

    fetched: int
    present: int


@dataclass(frozen=True)
class ProgramAnswer:
    """The last line of the program's output: the result of an order, or why it was refused."""

    result: Any = None
    refused: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Done:
    """The result of an order without a value."""


@dataclass(frozen=True)
class _Texts:
    texts: tuple[str | None, ...]


Send = Callable[[dict[str, object], Progress], object]
"""Carries out an order of the program on some machine; returns its result as JSON."""


class StoreClient:
    """An object store, accessed from one machine."""

    def __init__(self, machine: str, access: Access, send: Send) -> None:
        self._machine, self._access, self._send = machine, access, send

    def names(self, prefix: str, delimiter: str = "") -> StoredNames:
        """Return what is below a prefix, up to the next delimiter in each name."""
        return self._order(StoredNames, "names", prefix=prefix, delimiter=delimiter)

    def read(self, where: Address) -> str | None:
        """Return the text of an object, None if there is none."""
        return self.texts([where])[0]

    def texts(self, places: Sequence[Address]) -> tuple[str | None, ...]:
        """Return the texts of several objects."""
        return self._order(_Texts, "texts", keys=[where.prefix for where in places]).texts

    def probe(self, where: Address) -> None:
        """Write, read and delete a small object."""
        self._order(Done, "probe", key=where.prefix)

    def publish(self, texts: Sequence[tuple[Address, str]]) -> None:
        """Write small objects in order; the last one marks the others as complete."""
        self._order(Done, "publish", objects=[{"key": where.prefix, "text": text} for where, text in texts])

    def upload(self, paths: Mapping[str, str], target: Address) -> dict[str, StoredFile]:
        """Send files of that machine, each under its name below `target`."""
        files = [{"name": name, "path": path, "key": (target / name).prefix} for name, path in paths.items()]
        return self._order(FileList, "upload", files=files).files

    def download(
        self, files: Mapping[str, StoredFile], source: Address, folder: str, report: Progress | None = None
    ) -> Downloaded:
        """Fetch files below `source` to a folder of that machine; existing files are compared."""
        order = [
            {"key": (source / name).prefix, "path": posixpath.join(folder, name), **asdict(file)}
            for name, file in files.items()
        ]
        return self._order(Downloaded, "download", report, files=order)

    def _order(self, kind: type[T], action: str, report: Progress | None = None, **more: object) -> T:
        order = {"action": action, "store": self._access.order(), **more}
        try:
            return decode(kind, self._send(order, report or (lambda count: None)))
        except BadValue as problem:
            raise WorkFailed(f"{self._machine}: its answer about {action!r} is wrong: {problem}") from None


def on_node(node: Node, link: Connection, access: Access) -> StoreClient:
    """Return the store, accessed from a node with the ranks' Python."""

    def send(order: dict[str, object], report: Progress) -> object:
        source = Path(program.__file__).read_bytes()
        path = posixpath.join(
            link.hello().workdir, "storage", f"program-{hashlib.sha256(source).hexdigest()[:16]}.py"
        )
        link.put(path, source)
        lines = AnswerLines(report)
        errors: list[bytes] = []

        def take(stream: str, data: bytes) -> None:
            if stream == "stdout":
                lines.feed(data)
            elif sum(map(len, errors)) < 100_000:
                errors.append(data)

        text = json.dumps(order).encode() + b"\n"
        done = link.run([node.python, "-I", path], env=node.env, stdin=text, on_output=take)
        if lines.answer is None:
            output = b"".join(errors).decode("utf-8", "replace").strip().splitlines()
            reason = output[-1][:300] if output else f"exit {done.code}"
            raise WorkFailed(f"{node.name}: {node.python} could not move files: {reason}", program.NO_LIBRARY)
        if lines.answer.refused:
            raise WorkFailed(f"{node.name}: {lines.answer.refused}", lines.answer.hint)
        return lines.answer.result

    return StoreClient(node.name, access, send)


class AnswerLines:
    """Reads the output of the program."""

    def __init__(self, report: Progress) -> None:
        self._rest, self._report = b"", report
        self.answer: ProgramAnswer | None = None

    def feed(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_ANSWER:
            raise WorkFailed(
                "the program that moves files writes a line without end", "look at the node's Python"
            )
        for line in whole:
            with contextlib.suppress(BadValue):
                self._take(parse(line))

    def _take(self, value: object) -> None:
        if not isinstance(value, dict):
            return
        if type(value.get("bytes")) is int:
            self._report(value["bytes"])
        if "result" in value or "refused" in value:
            self.answer = decode(ProgramAnswer, value)


def here(access: Access) -> StoreClient:
    """Return the store, accessed from this machine."""

    opened: list[program.Store] = []

    def send(order: dict[str, object], report: Progress) -> object:
        try:
            if order["action"] == "probe":
                return program.carry_out(order, report)
            if not opened:
                opened.append(program.open_store(order))
            return program.carry_out(order, report, opened[0])
        except program.Refused as refused:
            kind = UsageError if order["action"] == "probe" else WorkFailed
            raise kind(str(refused), refused.hint) from None

    return StoreClient("here", access, send)


def check_access(nodes: Sequence[Node], access: Access, connect: Callable[[Node], Connection]) -> None:
    """Let every node write, read and delete a small object; raise one error that names all that cannot."""

    def work(node: Node) -> None:
        where = access.address / f".clusterctl-probe-{node.name}-{secrets.token_hex(4)}"
        on_node(node, connect(node), access).probe(where)

    failed = [outcome.error for outcome in on_each(nodes, work) if outcome.error is not None]
    if failed:
        hints = "\n".join(dict.fromkeys(error.hint for error in failed if error.hint))
        raise WorkFailed("\n".join(["nothing was started:", *(error.message for error in failed)]), hints)
