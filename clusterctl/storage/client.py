"""Let nodes, or this machine, move files from and to an object store."""

from __future__ import annotations

import hashlib
import json
import posixpath
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.errors import UsageError, WorkFailed
from clusterctl.json_types import JsonObject
from clusterctl.storage import program
from clusterctl.storage.address import Address
from clusterctl.storage.credentials import Access
from clusterctl.typed_json import BadValue, decode, parse

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.connection import Connection

# The list of a folder in a store: it is written after all files that it names, so a folder without it is unfinished.
LIST = "clusterctl-files.json"
FORMAT = 1
# Bytes of one line of an answer: the list of a large folder takes some.
MOST_ANSWER = 64 << 20
Progress = Callable[[int], None]


@dataclass(frozen=True)
class StoredFile:
    """One file in a store: its size, and the SHA-256 of each of its pieces."""

    bytes: int
    piece: int
    pieces: tuple[str, ...]

    def fault(self) -> str:
        """Return what is wrong with this entry of a list; "" if nothing is."""
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
    """Return the list in a text; raise WorkFailed if it is none, or names a file outside its folder."""
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


def on_node(
    node: Node, link: Connection, access: Access, action: str, report: Progress | None, **more: Any
) -> Any:
    """Run an action of the store on a node with the ranks' Python; return its result."""
    source = Path(program.__file__).read_bytes()
    path = posixpath.join(
        link.hello().workdir, "storage", f"program-{hashlib.sha256(source).hexdigest()[:16]}.py"
    )
    link.put(path, source)
    order = json.dumps({"action": action, "store": access.order(), **more}).encode() + b"\n"
    lines = AnswerLines(report)
    errors: list[bytes] = []

    def take(stream: str, data: bytes) -> None:
        if stream == "stdout":
            lines.feed(data)
        elif sum(map(len, errors)) < 100_000:
            errors.append(data)

    done = link.run([node.python, "-I", path], env=node.env, stdin=order, on_output=take)
    if lines.answer is None:
        text = b"".join(errors).decode("utf-8", "replace").strip().splitlines()
        reason = text[-1][:300] if text else f"exit {done.code}"
        raise WorkFailed(f"{node.name}: {node.python} could not move files: {reason}", program.NO_LIBRARY)
    if "refused" in lines.answer:
        raise WorkFailed(f"{node.name}: {lines.answer['refused']}", str(lines.answer.get("hint", "")))
    return lines.answer.get("result")


class AnswerLines:
    """Reads the output of the program."""

    def __init__(self, report: Progress | None) -> None:
        self._rest, self._report = b"", report
        self.answer: JsonObject | None = None

    def feed(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_ANSWER:
            raise WorkFailed(
                "the program that moves files writes a line without end", "look at the node's Python"
            )
        for line in whole:
            try:
                value = parse(line)
            except BadValue:
                continue
            if not isinstance(value, dict):
                continue
            if type(value.get("bytes")) is int and self._report:
                self._report(value["bytes"])
            if "result" in value or "refused" in value:
                self.answer = value


def here(access: Access, action: str, report: Progress | None = None, **more: Any) -> Any:
    """Run an action of the store on this machine; return its result."""
    try:
        order = {"action": action, "store": access.order(), **more}
        return program.carry_out(order, report or (lambda count: None))
    except program.Refused as refused:
        kind = UsageError if action == "probe" else WorkFailed
        raise kind(str(refused), refused.hint) from None


def downloads(files: Mapping[str, StoredFile], source: Address, folder: str) -> list[JsonObject]:
    """Return the part of an order that fetches files of a list to a folder."""
    return [
        {
            "key": (source / name).prefix,
            "path": posixpath.join(folder, name),
            "bytes": file.bytes,
            "piece": file.piece,
            "pieces": list(file.pieces),
        }
        for name, file in files.items()
    ]


def check_access(nodes: Sequence[Node], access: Access, connect: Callable[[Node], Connection]) -> None:
    """Let every node write, read and delete a small object; raise one error that names all that cannot."""
    from clusterctl.transport.fanout import on_each

    def work(node: Node) -> None:
        key = (access.address / f".clusterctl-probe-{node.name}-{secrets.token_hex(4)}").prefix
        on_node(node, connect(node), access, "probe", None, key=key)

    failed = [outcome.error for outcome in on_each(nodes, work) if outcome.error is not None]
    if failed:
        hints = "\n".join(dict.fromkeys(error.hint for error in failed if error.hint))
        raise WorkFailed("\n".join(["nothing was started:", *(error.message for error in failed)]), hints)
