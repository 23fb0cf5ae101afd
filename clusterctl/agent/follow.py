"""Files as they grow: from a cursor each, many at once, until the attempt that writes them has ended."""

from __future__ import annotations

import glob
import json
import os
import time
from io import FileIO
from typing import Any, Dict

from clusterctl.agent.frames import CHUNK
from clusterctl.agent.request import Refused, Request
from clusterctl.agent.supervisor import FINAL, AttemptFiles, read_json, read_node

# Seconds between two looks at files that did not grow.
LOOK = 0.05
LONGEST_LOOK = (
    # Seconds, where nothing has grown for 1.5: eight silent ranks cost 0.4 % of a core otherwise.
    0.2
)
# Times: each pause to the one before.
LONGER = 1.1
# Seconds between two looks for new files and at the attempt's state.
STATE_LOOK = 0.25


class _Files:
    """The files that are followed, each with the offset that was sent up to."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.patterns = [os.path.expanduser(one) for one in request.params.get("globs") or []]
        self.offsets: Dict[str, int] = {}
        self.open: Dict[str, FileIO] = {}
        for one in request.params.get("files") or []:
            if not isinstance(one, dict) or not isinstance(one.get("path"), str):
                raise Refused("usage", f"follow: a file is {{path, offset}}, not {one!r:.80}")
            self.offsets[os.path.expanduser(one["path"])] = int(one.get("offset", 0))

    def find(self) -> None:
        """Take up files that have appeared; those of the patterns begin at 0 unless a cursor was given."""
        for pattern in self.patterns:
            for path in sorted(glob.glob(pattern)):
                self.offsets.setdefault(path, 0)
        for path, offset in self.offsets.items():
            if path not in self.open and os.path.isfile(path):
                # It stays open while it grows.
                file = FileIO(path)
                file.seek(offset)
                self.open[path] = file

    def send_new(self) -> int:
        """One piece of each file, so that a long one does not hold up the others; how many bytes in all."""
        sent = 0
        for path, file in self.open.items():
            chunk = file.read(CHUNK)
            if chunk:
                self.request.send(chunk, path=path, offset=self.offsets[path], **_age(file, chunk))
                self.offsets[path] += len(chunk)
                sent += len(chunk)
        return sent

    def close(self) -> None:
        for file in self.open.values():
            file.close()


def _age(file: FileIO, chunk: bytes) -> Dict[str, float]:
    """How many seconds ago a file's last bytes were written; of a piece from its middle nobody knows."""
    if len(chunk) == CHUNK:
        return {}
    return {"age": round(max(0.0, time.time() - os.fstat(file.fileno()).st_mtime), 3)}


def follow(request: Request) -> Dict[str, Any]:
    """Send what files hold from their cursors on, and what is added, until `until` says that it is enough.

    `until` is "now" (what is there), or {run_dir, attempt} (until that attempt ended and all its bytes were
    sent); without one it goes on until the launcher cancels. An attempt's first failure is told when it is seen, as
    a chunk of no file: its end may be seconds away. So is how long its ranks take for a step, each time it is measured.
    """
    files = _Files(request)
    try:
        state = _follow(request, files)
    finally:
        files.close()
    return {"offsets": files.offsets, "state": state}


def _follow(request: Request, files: _Files) -> Any:
    until = request.params.get("until")
    looked, ended, state, told, paced = 0.0, False, None, False, 0
    written, pause = 0, LOOK
    while not request.cancelled.is_set():
        if time.monotonic() - looked >= STATE_LOOK or _written(until) != written:
            # Before it is read: what is written now is seen next.
            looked, written = (
                time.monotonic(),
                _written(until),
            )
            node = _node(until)
            state = _ended(until, node)
            # Asked before the last look at the files, so that nothing is missed.
            ended = state is not None
            if node.get("first_failure") and not told:
                told = True
                request.send(json.dumps(node["first_failure"]).encode(), path="", offset=0, word="failure")
            paced = _tell_pace(request, until, paced)
            files.find()
        if not files.send_new():
            if ended:
                return state
            request.cancelled.wait(pause)
            pause = min(pause * LONGER, LONGEST_LOOK)
        else:
            pause = LOOK
    return None


def _tell_pace(request: Request, until: Any, told: int) -> int:
    """Send what was measured since; gives when that was."""
    if not isinstance(until, dict):
        return told
    path = AttemptFiles(os.path.expanduser(str(until["run_dir"])), int(until["attempt"])).pace
    try:
        written = os.stat(path).st_mtime_ns
    except OSError:
        return told
    if written != told:
        request.send(json.dumps(read_json(path) or {}).encode(), path="", offset=0, word="pace")
    return written


def _written(until: Any) -> int:
    """When the watched attempt's node file was written: a failure should not wait for the next look."""
    if not isinstance(until, dict):
        return 0
    try:
        path = AttemptFiles(os.path.expanduser(str(until["run_dir"])), int(until["attempt"])).node
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _node(until: Any) -> Dict[str, Any]:
    """What the watched attempt's node file says; nothing where no attempt is watched."""
    if not isinstance(until, dict):
        return {}
    return read_node(os.path.expanduser(str(until["run_dir"])), int(until["attempt"]))[1] or {}


def _ended(until: Any, node: Dict[str, Any]) -> Any:
    """How the watched attempt ended; None while it goes on."""
    if until == "now":
        return "now"
    state = node.get("state")
    return state if state in FINAL or state == "lost" else None
