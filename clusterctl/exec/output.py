"""What commands on many nodes say, put in a form to read: prefixed as it comes, kept apart, and how it ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from clusterctl.errors import UsageError
from clusterctl.text import UNSAFE, escape_controls, escape_in_json
from clusterctl.transport.fanout import Completed, Outcome

# A line is cut here, so that one without an end can't fill the memory.
LONG_LINE = 64 << 10
UNREACHABLE = 255
# What needs no second look.
PLAIN = bytes([0x09, 0x0A, *range(0x20, 0x7F)])
Write = Callable[[str, bytes], None]


class WholeLines:
    """Chunks of many nodes in, whole lines out, from any thread; what is left without a line break comes at the end."""

    def __init__(self) -> None:
        self._rest: dict[tuple[str, str], bytes] = {}

    def feed(self, node: str, stream: str, data: bytes) -> None:
        """Take a chunk of any size; each node is one thread's."""
        rest = self._rest.pop((node, stream), b"") + data
        end = rest.rfind(b"\n") + 1
        if len(rest) - end > LONG_LINE:
            end = len(rest)
        if end < len(rest):
            self._rest[(node, stream)] = rest[end:]
        if end:
            self.out(node, stream, rest[:end])

    def end(self, node: str) -> None:
        """No more will come of this node."""
        for stream in ("stdout", "stderr"):
            rest = self._rest.pop((node, stream), b"")
            if rest:
                self.out(node, stream, rest)

    def ended(self, outcome: Outcome[Completed]) -> None:
        """How a node's command ended, or why it did not run."""

    def out(self, node: str, stream: str, data: bytes) -> None:
        """One or more whole lines."""
        raise NotImplementedError


class Prefixer(WholeLines):
    """Each line with its node's name before it; a whole chunk costs one replacement, not one a line."""

    def __init__(self, width: int, write: Write) -> None:
        """`write("stdout" or "stderr", bytes)` gets whole lines; `width` is the longest node name's."""
        super().__init__()
        self._width = width
        self._write = write
        self._writing = threading.Lock()

    def out(self, node: str, stream: str, data: bytes) -> None:
        prefix = f"{node + ':':<{self._width + 1}} ".encode()
        said = shown(data)
        with self._writing:
            self._write(stream, b"".join((prefix, said.replace(b"\n", b"\n" + prefix), b"\n")))


class JsonLines(WholeLines):
    """Each line as an object with node, stream and text; each end as one with node and exit code, or error."""

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
    """A folder with what each node said, byte by byte: NODE.out, and NODE.err where there was any."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        """What the same nodes said before is removed: an old answer must not pass for a new one."""
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
        """A command that said nothing has a file too; a node that could not be asked has none."""
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
    """`printable` as bytes; plain text, which is nearly all of it, at 1 GB/s."""
    if not data.translate(None, PLAIN):
        return data.removesuffix(b"\n")
    return printable(data).encode()


def printable(data: bytes) -> str:
    """Remote bytes as text without the last line break, with everything that a terminal would obey made
    visible."""
    text = data.decode("utf-8", "surrogateescape").removesuffix("\n").replace("\r\n", "\n")
    if UNSAFE.search(text.replace("\n", "")) is None:
        return text
    return "\n".join(escape_controls(line) for line in text.split("\n"))


def ending(completed: Completed) -> str:
    """How a command ended where it did not end well: `exit 1`, `killed by signal 9`; else nothing."""
    if completed.timed_out:
        return "ended by its time-out"
    if completed.signal is not None:
        return f"killed by signal {completed.signal}"
    return f"exit {completed.exit_code}" if completed.exit_code else ""


def exit_code(outcomes: Sequence[Outcome[Completed]]) -> int:
    """The largest of the nodes' codes, 128+n for a signal; 255 where a node could not be asked."""
    return max((UNREACHABLE if one.value is None else one.value.code for one in outcomes), default=0)


def ending_as_json(outcome: Outcome[Completed]) -> dict[str, object]:
    """How one node's command ended, or why it did not run, for programs."""
    name, done = outcome.node.name, outcome.value
    if done is None:
        return {"node": name, "error": str(outcome.error), "kind": type(outcome.error).__name__}
    return {"node": name, "exit_code": done.exit_code, "signal": done.signal, "timed_out": done.timed_out}
