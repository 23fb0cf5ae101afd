"""Send files as they grow, many in parallel and each from an offset, until the attempt that writes them has ended."""

from __future__ import annotations

import os
import threading
import time
from io import FileIO
from typing import Any, Dict, Iterator, Optional

from clusterctl.agent import compact_json
from clusterctl.agent.frames import CHUNK, StreamEnded
from clusterctl.agent.holes import read
from clusterctl.agent.processes import state_letter
from clusterctl.agent.ranks.attempts import STARTING, read_node, read_state
from clusterctl.agent.ranks.changes import Changes
from clusterctl.agent.records import FINAL, AttemptFiles, read_beat, read_json
from clusterctl.agent.request import Refused, Request

# Seconds between two checks of files that grow: lines that are written meanwhile are sent together.
LOOK = 0.05
# Without inotify: the longest pause between two checks, reached after 1.5 s without growth. With inotify: the longest
# time until a cancelled request ends.
LONGEST_LOOK = 0.2
# Factor by which each pause is longer than the one before.
LONGER = 1.1
# Seconds from the start of an attempt without inotify: a short one is not worth the 10 ms that it takes to set up.
UNWATCHED = 2.0
# Seconds between two checks for new files and of the attempt's state; inotify reports a change of either immediately.
STATE_LOOK, WATCHED_STATE_LOOK = 0.25, 1.0
# Seconds between two reports of a supervisor that does not respond.
REPORT = 2.0
# Seconds without a heartbeat after which a supervisor is reported, unless the launcher names others.
SILENT_AFTER = 10.0


class _Files:
    """The files that are followed, each with the offset up to which it was sent."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.offsets: Dict[str, int] = {}
        self.open: Dict[str, FileIO] = {}
        for entry in request.params.get("files") or []:
            if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
                raise Refused("usage", f"follow: a file is {{path, offset}}, not {entry!r:.80}")
            self.offsets[os.path.expanduser(entry["path"])] = int(entry.get("offset", 0))

    def find(self) -> None:
        """Open files that have appeared."""
        for path in self.offsets:
            if path not in self.open and os.path.isfile(path):
                # The file stays open while it grows.
                self.open[path] = FileIO(path)

    def send_new(self) -> int:
        """Send one piece of each file, so that a long one does not delay the others; return how many bytes."""
        sent = 0
        for path, file in self.open.items():
            start, chunk = read(file.fileno(), self.offsets[path], CHUNK)
            if chunk:
                # Bytes of a log that became too long were dropped.
                hole = {"hole": start - self.offsets[path]} if start > self.offsets[path] else {}
                self.request.send(chunk, path=path, offset=start, **_age(file, chunk), **hole)
                self.offsets[path] = start + len(chunk)
                sent += len(chunk)
        return sent

    def folders(self) -> Iterator[str]:
        """Yield the folders in which the files are, or will be."""
        for path in self.offsets:
            yield os.path.dirname(path)

    def close(self) -> None:
        for file in self.open.values():
            file.close()


def _age(file: FileIO, chunk: bytes) -> Dict[str, float]:
    """Return how many seconds ago a file's last bytes were written; None for a piece from its middle."""
    if len(chunk) == CHUNK:
        return {}
    return {"age": round(max(0.0, time.time() - os.fstat(file.fileno()).st_mtime), 3)}


def follow(request: Request) -> Dict[str, Any]:
    """Send what files hold after their offsets, and what is added, until `until` is reached; return how that ended.

    `until` is "now" (send what exists), or {run_dir, attempt} (until that attempt has ended and all bytes were sent).
    Chunks without a path are reports: the first failure of the attempt as soon as it is seen, the ranks' pace when it
    was measured, and a supervisor that does not respond. The answer, {state, report}, has the state of the attempt:
    "unknown" if only what exists was sent. Of an attempt that finished it also has the whole state, as `state` returns
    it, once its supervisor has exited.
    """
    files, until = _Files(request), request.params.get("until")
    if not isinstance(until, dict):
        _send_existing(request, files)
        return {"state": "unknown"}
    attempt = AttemptFiles(os.path.expanduser(str(until["run_dir"])), int(until["attempt"]))
    with _Attempt(request, attempt) as followed:
        state = followed.send_until_end(files) or "lost"
    report = read_state(attempt.run_dir, attempt.attempt) if state == "finished" else None
    return {"state": state, "report": report}


def _send_existing(request: Request, files: _Files) -> None:
    try:
        files.find()
        while not request.cancelled.is_set() and files.send_new():
            pass
    finally:
        files.close()


class _Attempt:
    """Follows an attempt, and reports a supervisor that does not respond from a thread of its own.

    That thread reads no file: if the disk hangs, every thread that reads hangs too, and probably the supervisor.
    """

    def __init__(self, request: Request, files: AttemptFiles) -> None:
        self.request, self.files = request, files
        self.silent_after = float(request.params.get("silent_after", SILENT_AFTER))
        self.pid = 0
        self.beat: Optional[float] = None
        self.closed = threading.Event()
        self.changes: Optional[Changes] = None

    def __enter__(self) -> "_Attempt":
        threading.Thread(target=self._report_silence, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()

    def _report_silence(self) -> None:
        while not self.closed.wait(REPORT) and not self.request.cancelled.is_set():
            beat = self.beat
            silent = 0.0 if beat is None else time.monotonic() - beat
            if silent > self.silent_after:
                report = {"alive": True, "silent": round(silent, 1), "process": state_letter(self.pid)}
                try:
                    self._send(report, "supervisor")
                except StreamEnded:
                    return

    def _send(self, value: object, word: str) -> None:
        self.request.send(compact_json.dumps(value).encode(), path="", offset=0, word=word)

    def send_until_end(self, files: _Files) -> Optional[str]:
        """Send everything until the attempt has ended; return how it did, None if the request was cancelled."""
        try:
            return self._send_until_end(files)
        finally:
            files.close()
            if self.changes is not None:
                self.changes.close()

    def _send_until_end(self, files: _Files) -> Optional[str]:
        began, looked, written, pause = time.monotonic(), 0.0, 0, LOOK
        paced, failed, watched = 0, False, False
        state: Optional[str] = None
        while not self.request.cancelled.is_set():
            due = WATCHED_STATE_LOOK if watched else STATE_LOOK
            if time.monotonic() - looked >= due or _written(self.files.node) != written:
                # Read the time before the file: a later write is then seen next time.
                looked, written = time.monotonic(), _written(self.files.node)
                supervisor, node = read_node(self.files.run_dir, self.files.attempt)
                self._note_beat(supervisor)
                # Determined before the last check of the files, so that nothing is missed.
                state = _end_of(node or {})
                if supervisor is None and time.monotonic() - began > STARTING:
                    # A controller died while it started the attempt, and nobody starts it here any more.
                    state = "lost"
                failure = (node or {}).get("first_failure")
                if failure and not failed:
                    failed = True
                    self._send(failure, "failure")
                paced = self._send_pace(paced)
                # Before the look for files, so that none appears unseen.
                watched = time.monotonic() - began > UNWATCHED and self._watch(files)
                files.find()
            if files.send_new():
                pause = LOOK
                continue
            if state is not None:
                return state
            if watched and self.changes is not None and pause > LOOK:
                self._await_change(self.changes, looked)
            else:
                self.request.cancelled.wait(pause)
            pause = min(pause * LONGER, LONGEST_LOOK)
        return None

    def _watch(self, files: _Files) -> bool:
        """Watch the folders of the files and of the attempt; return True if all their changes are reported."""
        if self.changes is None:
            self.changes = Changes()
        return self.changes.watch({os.path.dirname(self.files.node), *files.folders()})

    def _await_change(self, changes: Changes, looked: float) -> None:
        """Wait until a file changes, the attempt's state is due, or the request is cancelled."""
        while time.monotonic() - looked < WATCHED_STATE_LOOK and not self.request.cancelled.is_set():
            if changes.wait(LONGEST_LOOK):
                return

    def _note_beat(self, supervisor: Optional[Dict[str, Any]]) -> None:
        """Remember the last heartbeat of a living supervisor."""
        if supervisor is not None and supervisor["alive"]:
            self.pid, self.beat = int(supervisor["pid"]), read_beat(self.files.beat)
        else:
            self.beat = None

    def _send_pace(self, sent: int) -> int:
        """Send the ranks' pace if it was measured again; return when it was."""
        written = _written(self.files.pace)
        if written and written != sent:
            self._send(read_json(self.files.pace) or {}, "pace")
        return written or sent


def _written(path: str) -> int:
    """Return when a file was written, in nanoseconds; 0 if it does not exist."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _end_of(node: Dict[str, Any]) -> Optional[str]:
    """Return how an attempt ended here; None while it runs."""
    state = node.get("state")
    return state if state in FINAL or state == "lost" else None
