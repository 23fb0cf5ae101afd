"""Stop an interrupted run; the second Ctrl-C kills it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.fanout import Connections


class InterruptGuard:
    """Defer a Ctrl-C until `may_force`, so that it cannot end this process before the run is stopped.

    100 ms or more pass between the first Ctrl-C and the request to stop. Without the guard, a second Ctrl-C in that
    time would end the command while the run continues.
    """

    def __init__(self) -> None:
        self.came = self.armed = False

    def __enter__(self) -> InterruptGuard:
        self.before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _note(self, *_: object) -> None:
        self.came = True
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    @contextmanager
    def may_force(self) -> Iterator[None]:
        """Within the block, raise the first Ctrl-C as KeyboardInterrupt, also one from before the block."""
        if self.came:
            raise KeyboardInterrupt
        self.armed = True
        try:
            yield
        finally:
            self.armed = False


def stop_interrupted(
    run: RunDir, connections: Connections, interrupt: BaseException, note: Callable[[str], object]
) -> int:
    """End every rank of an interrupted run and fetch its last output; return how many processes are left."""
    # Do this first: the next Ctrl-C may follow immediately.
    with InterruptGuard() as guard:
        from clusterctl.runs.in_charge import wait_for_end
        from clusterctl.runs.stop import stop_run

        grace = run.read_record().job.grace
        note(f"stopping {run.run_id}: up to {grace:g} s for a last checkpoint; press Ctrl-C again to kill it")
        run.add_event("interrupted", by=type(interrupt).__name__)
        try:
            with guard.may_force():
                left = stop_run(run, connections)
        except KeyboardInterrupt:
            left = stop_run(run, connections, grace=0.0)
        wait_for_end(run, connections)
    return sum(left.values())
