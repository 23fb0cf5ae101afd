"""One standard input for many nodes, of any size: what is held of it stays small."""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from clusterctl.agent.frames import CHUNK

AHEAD = 8  # chunks that the fastest node may be ahead of the slowest: 1 MB


def broadcast(number: int, nodes: Sequence[str]) -> FileInput | PipeInput:
    """What stands behind a file descriptor, for all of some nodes."""
    is_file = stat.S_ISREG(os.fstat(number).st_mode)
    return FileInput(number) if is_file else PipeInput(number, nodes)


class FileInput:
    """A regular file: every node reads it at its own pace, whenever it begins."""

    together = False

    def __init__(self, number: int) -> None:
        self._number = number
        self._from = os.lseek(number, 0, os.SEEK_CUR)

    def view(self, node: str) -> Iterator[bytes]:
        offset = self._from
        while data := os.pread(self._number, CHUNK, offset):
            offset += len(data)
            yield data

    def leave(self, node: str) -> None:
        """Nothing: nobody waits for anybody."""


class PipeInput:
    """A pipe or a terminal, which can be read once only: all nodes take a piece before many more are read."""

    together = True
    """All nodes have to begin at once."""

    def __init__(self, number: int, nodes: Sequence[str]) -> None:
        self._number = number
        self._queues: dict[str, deque[bytes]] = {name: deque() for name in nodes}
        self._change = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._begun = False

    def view(self, node: str) -> Iterator[bytes]:
        """The pieces for one node; `leave` ends it."""
        with self._change:
            if not self._begun:
                self._begun = True
                self._reader.start()
        while True:
            with self._change:
                queue = self._queues.get(node)
                while queue is not None and not queue and not self._ended:
                    self._change.wait()
                    queue = self._queues.get(node)
                if not queue:
                    return
                data = queue.popleft()
                self._change.notify_all()
            yield data

    def leave(self, node: str) -> None:
        """A node takes no more: the others must not wait for it."""
        with self._change:
            self._queues.pop(node, None)
            self._change.notify_all()

    def _read(self) -> None:
        while self._wait_for_room():
            try:
                data = os.read(self._number, CHUNK)
            except OSError:  # a terminal that is gone
                data = b""
            with self._change:
                for queue in self._queues.values() if data else ():
                    queue.append(data)
                self._ended = not data
                self._change.notify_all()

    def _wait_for_room(self) -> bool:
        """Whether anybody wants more."""
        with self._change:
            while any(len(queue) >= AHEAD for queue in self._queues.values()):
                self._change.wait()
            return bool(self._queues) and not self._ended
