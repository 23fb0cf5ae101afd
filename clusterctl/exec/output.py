"""Format the output of a command on many nodes: prefixed lines, JSON lines, or files, and how each command ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from clusterctl.errors import UsageError
from clusterctl.text import UNSAFE, escape_controls, escape_in_json
from clusterctl.transport.completed import Completed
from clusterctl.transport.fanout import Outcome

# A longer line is cut, so that a line without an end cannot fill the memory.
LONG_LINE = 64 << 10
UNREACHABLE = 255
# Bytes that need no further check.
PLAIN = bytes([0x09, 0x0A, *range(0x20, 0x7F)])
Write = Callable[[str, bytes], None]


class WholeLines:
    """Joins chunks of many nodes into whole lines.

    Thread-safe as long as each node is fed by one thread. A last line without a line break is written at
    the end.
    """

    def __init__(self) -> None:
        self._rest: dict[tuple[str, str], bytes] = {}

    def feed(self, node: str, stream: str, data: bytes) -> None:
        """Process a chunk of any size and write the lines that are complete."""
        rest = self._rest.pop((node, stream), b"") + data
        end = rest.rfind(b"\n") + 1
        if len(rest) - end > LONG_LINE:
            end = len(rest)
        if end < len(rest):
            self._rest[(node, stream)] = rest[end:]
        if end:
            self.out(node, stream, rest[:end])

    def end(self, node: str) -> None:
        """Write a node's last line if it has no line break."""
        for stream in ("stdout", "stderr"):
            rest = self._rest.pop((node, stream), b"")
            if rest:
                self.out(node, stream, rest)

    def ended(self, outcome: Outcome[Completed]) -> None:
        """Do nothing; subclasses may write how a node's command ended, or why it did not run."""

    def out(self, node: str, stream: str, data: bytes) -> None:
        """Write one or more whole lines; subclasses implement this."""
        raise NotImplementedError


class Prefixer(WholeLines):
    """Writes each line with its node's name before it; a whole chunk needs only one replacement."""

    def __init__(self, width: int, write: Write, *, raw: bool = False) -> None:
        """`write("stdout" or "stderr", bytes)` receives whole lines; `width` is that of the longest node name.

        `raw`: standard output is no terminal, and gets the bytes of the nodes unchanged.
        """
        super().__init__()
        self._width = width
        self._raw = raw
        self._write = write
        self._writing = threading.Lock()

    def out(self, node: str, stream: str, data: bytes) -> None:
        prefix = f"{node + ':':<{self._width + 1}} ".encode()
        text = data.removesuffix(b"\n") if self._raw and stream == "stdout" else shown(data)
        with self._writing:
            self._write(stream, b"".join((prefix, text.replace(b"\n", b"\n" + prefix), b"\n")))


class JsonLines(WholeLines):
    """Writes one JSON object per line (node, stream, text) and one per end (node, and exit code or error)."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self._write = write
        self._writing = threading.Lock()

    def out(self, node: str, stream: str, data: bytes) -> None:
        lines = data.removesuffix(b"\n").decode("utf-8", "backslashreplace").split("\n")
        self._say([{"node": node, "stream": stream, "text": line} for line in lines])

    def ended(self, outcome: Outcome[Completed]) -> None:
        self._say([ending_as_json(outcome)])

    def _say(self, rows: Sequence[dict[str, object]]) -> None:
        text = "".join(escape_in_json(json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
        with self._writing:
            self._write("stdout", text.encode("utf-8", "backslashreplace"))


class Folder:
    """Writes the output of each node unchanged into a folder: NODE.out, and NODE.err if there is any."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        """Remove earlier output of these nodes, so that it cannot be taken for new output."""
        self._folder = folder
        self._files: dict[tuple[str, str], BinaryIO] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for node in nodes:
                for stream in ("stdout", "stderr"):
                    self._path(node, stream).unlink(missing_ok=True)
        except OSError as problem:
            raise UsageError(
                f"--out {folder}: {problem.strerror}", "name a folder that can be written"
            ) from None

    def feed(self, node: str, stream: str, data: bytes) -> None:
        self._file(node, stream).write(data)

    def end(self, node: str) -> None:
        for stream in ("stdout", "stderr"):
            file = self._files.pop((node, stream), None)
            if file is not None:
                file.close()

    def ended(self, outcome: Outcome[Completed]) -> None:
        """Write an empty file for a command without output, and no file for a node that was not reached."""
        if outcome.value is not None:
            self._path(outcome.node.name, "stdout").touch()

    def _file(self, node: str, stream: str) -> BinaryIO:
        file = self._files.get((node, stream))
        if file is None:
            file = self._files[(node, stream)] = self._path(node, stream).open("wb", buffering=0)
        return file

    def _path(self, node: str, stream: str) -> Path:
        return self._folder / f"{node}.{'err' if stream == 'stderr' else 'out'}"


def shown(data: bytes) -> bytes:
    """Return `printable` as bytes; plain text, the usual case, is processed at 1 GB/s."""
    if not data.translate(None, PLAIN):
        return data.removesuffix(b"\n")
    return printable(data).encode()


def printable(data: bytes) -> str:
    """Return remote bytes as text without the last line break; control characters are made visible."""
    text = data.decode("utf-8", "surrogateescape").removesuffix("\n").replace("\r\n", "\n")
    if UNSAFE.search(text.replace("\n", "")) is None:
        return text
    return "\n".join(escape_controls(line) for line in text.split("\n"))


def ending(completed: Completed) -> str:
    """Return how a command failed: `exit 1`, `killed by signal 9`; "" if it succeeded."""
    if completed.timed_out:
        return "ended by its time-out"
    if completed.signal is not None:
        return f"killed by signal {completed.signal}"
    return f"exit {completed.exit_code}" if completed.exit_code else ""


def exit_code(outcomes: Sequence[Outcome[Completed]]) -> int:
    """Return the largest exit code of the nodes, 128+n for a signal; 255 if a node was not reached."""
    return max(
        (UNREACHABLE if outcome.value is None else outcome.value.code for outcome in outcomes), default=0
    )


def ending_as_json(outcome: Outcome[Completed]) -> dict[str, object]:
    """Return how one node's command ended, or why it did not run, as JSON values."""
    name, done = outcome.node.name, outcome.value
    if done is None:
        return {"node": name, "error": str(outcome.error), "kind": type(outcome.error).__name__}
    return {"node": name, "exit_code": done.exit_code, "signal": done.signal, "timed_out": done.timed_out}
