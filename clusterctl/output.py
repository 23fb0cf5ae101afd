"""What commands on many nodes said, put in a form to read: prefixed as it comes, or folded where it is the
same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from clusterctl.sanitize import UNSAFE, escape_controls
from clusterctl.transport import Completed, Outcome

LONG_LINE = 64 << 10  # a line is cut here, so that one without an end can't fill the memory
UNREACHABLE = 255


class Prefixer:
    """Whole lines of many nodes, each with its node's name before it; chunks in, text out, from any
    thread."""

    def __init__(self, width: int, write: Callable[[str, str], None]) -> None:
        """`write("stdout" or "stderr", text)` gets whole lines; `width` is the longest node name's."""
        self._width = width
        self._write = write
        self._rest: dict[tuple[str, str], bytes] = {}
        self._writing = threading.Lock()

    def feed(self, node: str, stream: str, data: bytes) -> None:
        """Take a chunk of any size; a whole chunk costs one replacement, not one a line."""
        rest = self._rest.pop((node, stream), b"") + data
        end = rest.rfind(b"\n") + 1
        if len(rest) - end > LONG_LINE:
            end = len(rest)
        if rest[end:]:
            self._rest[(node, stream)] = rest[end:]
        if end:
            self._out(node, stream, rest[:end])

    def end(self, node: str) -> None:
        """What a node's last line was, where it had no line break."""
        for stream in ("stdout", "stderr"):
            rest = self._rest.pop((node, stream), b"")
            if rest:
                self._out(node, stream, rest)

    def _out(self, node: str, stream: str, data: bytes) -> None:
        prefix = f"{node + ':':<{self._width + 1}} "
        body = printable(data).replace("\n", "\n" + prefix)
        with self._writing:
            self._write(stream, prefix + body + "\n")


def printable(data: bytes) -> str:
    """Remote bytes as text without the last line break, with everything that a terminal would obey made
    visible."""
    text = data.decode("utf-8", "surrogateescape").removesuffix("\n").replace("\r\n", "\n")
    if UNSAFE.search(text.replace("\n", "")) is None:
        return text
    return "\n".join(escape_controls(line) for line in text.split("\n"))


def folded(outcomes: Sequence[Outcome[Completed]]) -> list[tuple[list[str], Completed]]:
    """Nodes with the same output and the same end together, in the order of their first."""
    groups: dict[Completed, list[str]] = {}
    for outcome in outcomes:
        if outcome.value is not None:
            groups.setdefault(outcome.value, []).append(outcome.node.name)
    return [(names, completed) for completed, names in groups.items()]


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
