"""Split the bytes that arrive on a link into frames."""

from __future__ import annotations

from collections.abc import Iterator

from clusterctl.agent.frames import PREFIX, BadFrame, Frame, parse_frame, sizes_of


class FrameSplitter:
    """Turns bytes into complete frames; stores at most one incomplete frame."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        # Bytes that are needed for the next step: a prefix, or a whole frame.
        self._wanted = PREFIX.size

    @property
    def is_empty(self) -> bool:
        """Return whether no frame has arrived in part."""
        return not self._size

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that these bytes complete; raise BadFrame if they are invalid. Read all of them before the
        next call."""
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._wanted:
            return
        held = b"".join(self._parts) if len(self._parts) > 1 else data
        at, self._wanted = 0, PREFIX.size
        while len(held) - at >= PREFIX.size:
            header, payload = sizes_of(held, at)
            body = at + PREFIX.size
            end = body + header + payload
            if end > len(held):
                self._wanted = end - at
                break
            yield parse_frame(held[body : body + header], held[body + header : end])
            at = end
        rest = held[at:]
        self._parts, self._size = [rest] if rest else [], len(rest)

    def end(self) -> None:
        """Raise BadFrame if the bytes ended inside a frame."""
        if self._size:
            raise BadFrame("the stream ended inside a frame")
