"""Keep copies of each checkpoint's files on other nodes while the run continues."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

from clusterctl.checkpoints.checkpoint import Checkpoint
from clusterctl.checkpoints.find import folder_on, of_nodes
from clusterctl.checkpoints.moves import copies_wanted, move_all
from clusterctl.errors import ClusterctlError
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.parts.saving import saving_of
from clusterctl.jobs.record import RunRecord
from clusterctl.jobs.run_folder import RunDir
from clusterctl.text import size
from clusterctl.transport.fanout import Connections, raise_failures

# Seconds that the end of a run waits for the copies of its last checkpoint.
LAST = 600.0
# Seconds before each further attempt to copy a checkpoint.
PAUSES = (0.5, 5.0)


class Copier:
    """Copies each complete checkpoint in a separate thread, from node to node.

    The newest step whose copies are complete stays protected from pruning until a newer one has its copies.
    """

    # Whether the end of a failed run waits too.
    after_failures = False
    # The name of a failure in the run's events.
    subject = "a checkpoint has not all its copies"
    # Seconds between two checks for a new checkpoint; None: `note` reports each.
    every: float | None = None

    def __init__(self, run: RunDir, connections: Connections, copies: int = 1, last: float = LAST) -> None:
        """`last`: seconds that the end of a run waits."""
        self.run, self.connections, self.copies, self._last = run, connections, copies, last
        self._saved, self._closed, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._held = ExitStack()
        self._failed = ""
        # The newest checkpoint with all its copies.
        self._digest = ""

    def start(self) -> None:
        # A checkpoint of an earlier attempt may lack copies.
        self._saved.set()
        threading.Thread(target=self._work, daemon=True, name="copy checkpoints").start()

    def note(self) -> None:
        """Record that the trainer has saved a checkpoint."""
        self._idle.clear()
        self._saved.set()

    def finish(self) -> None:
        """Wait until the newest checkpoint has its copies, or cannot have them."""
        self._idle.clear()
        self._saved.set()
        self._idle.wait(self._last)

    def close(self) -> None:
        self._closed.set()
        self._saved.set()

    def _work(self) -> None:
        while True:
            self._saved.wait(self.every)
            if self._closed.is_set():
                break
            self._saved.clear()
            for pause in (*PAUSES, None):
                if self._attempt(last=pause is None) or pause is None or self._closed.wait(pause):
                    break
            if not self._saved.is_set():
                self._idle.set()
        self._held.close()

    def _attempt(self, *, last: bool) -> bool:
        """Return whether the newest checkpoint has its copies now; report the failure of the `last` attempt."""
        try:
            self._copy_newest()
        except ClusterctlError as error:
            # A lost node is detected elsewhere; the next checkpoint is tried again.
            if last and error.message != self._failed:
                self.run.add_event("note", text=_failure(self.subject, error))
                self._failed = error.message
            return False
        self._failed = ""
        return True

    def _copy_newest(self) -> None:
        began = time.monotonic()
        record = self.run.read_record()
        folders = folders_in(record)
        newest = self._newest(record)
        if newest is None:
            return
        moves = copies_wanted(newest, folders, self.copies)
        outcomes = move_all(newest, moves, self.connections)
        self._protect(newest)
        raise_failures(outcomes)
        if moves:
            moved = sum(outcome.get() for outcome in outcomes)
            seconds = time.monotonic() - began
            text = f"{newest.name} is on {self.copies} nodes each: copied {size(moved)} in {seconds:.1f} s"
            facts = {"step": newest.step, "bytes": moved, "seconds": round(seconds, 3)}
            self.run.add_event("copied", **facts, copies=self.copies, text=text)
        self._digest = newest.digest

    def _newest(self, record: RunRecord) -> Checkpoint | None:
        """Return the newest checkpoint that is complete on the nodes, unless it has been copied already."""
        found = of_nodes(list(folders_in(record).values()), self.connections)
        newest = next((item for item in found.checkpoints if item.is_resumable), None)
        return None if newest is None or newest.digest == self._digest else newest

    def _protect(self, newest: Checkpoint) -> None:
        """Protect the newest checkpoint with copies, and release the previous one."""
        before, self._held = self._held, ExitStack()
        try:
            for holding in newest.holdings:
                self._held.enter_context(holding.holder.held([holding.entry.path]))
        finally:
            before.close()


def folders_in(record: RunRecord) -> dict[str, tuple[Node, str]]:
    """Return each node of the present attempt, with its folder of checkpoints."""
    return {node.name: (node, folder_on(record, record.run_dirs[node.name])) for node in record.cluster.nodes}


def _failure(subject: str, error: ClusterctlError) -> str:
    remedy = f" ({error.hint})" if error.hint else ""
    return f"{subject}: {error.message}{remedy}"


def copier_for(run: RunDir, connections: Connections) -> Copier | None:
    """Return the copier of a run's checkpoints; None if its job requests no copies."""
    record = run.read_record()
    saving = saving_of(record.job.train)
    return Copier(run, connections, saving.copies) if saving.copies > 1 and not saving.dir else None
