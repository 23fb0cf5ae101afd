"""Call the roll while a run is watched: before ranks that hang are ended, and when all ranks have been silent."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.runs.causes.blame import judge
from clusterctl.runs.causes.places import Place
from clusterctl.runs.causes.roll_call import Roll, call_roll, keep_roll

if TYPE_CHECKING:
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.runs.decide.attempt import StopRequest
    from clusterctl.transport.fanout import Connections

# Samples of a slow rank's stack. A rank that works in fewer than WORKS of them waits for another one.
SAMPLES, WORKS = 5, 2


class Roller:
    """Calls the roll of one attempt, and reports in one line where its ranks stand."""

    def __init__(
        self,
        run: RunDir,
        connections: Connections,
        gone: Callable[[], Container[str]],
        report: Callable[[str], None],
    ) -> None:
        """`gone` returns the nodes without a connection, which are not asked."""
        self.run, self.connections, self.gone, self.report = run, connections, gone, report
        self.record = run.read_record()

    def before_end(self, hung: float, request: StopRequest) -> StopRequest:
        """Record where all ranks stand after `hung` seconds; return the request to end them, with the rank to blame."""
        roll = self._call(hung, save=True)
        keep_roll(self.run, self.record.attempt, roll)
        verdict, hang = judge(roll.ranks, hung), request.hang
        # Ranks that nobody could see write their stacks at their end: the cause says where they stood.
        abort = any(seen.unseen for seen in roll.ranks)
        if roll.ranks and not abort:
            self.report(verdict.sentence)
        if hang and verdict.blamed:
            hang = replace(hang, node=verdict.blamed[0].node, rank=verdict.blamed[0].via)
        return replace(request, hang=hang, abort=abort)

    def report_silence(self, seconds: float, last: str) -> None:
        """Report, from a thread, that no rank has written anything for so long, and where they stand."""

        def report() -> None:
            roll = self._call(seconds)
            standing = f": {judge(roll.ranks, seconds).sentence}" if roll.ranks else ""
            self.report(f"no rank has written anything for {seconds:.0f} s{last}{standing}")

        threading.Thread(target=report, daemon=True, name="roll call").start()

    def report_slow(self, node: str, rank: int) -> None:
        """Report, from a thread, where a rank that holds up the others is mostly seen, if its stack can be seen."""

        def report() -> None:
            nodes = [self.record.cluster.node(node)]
            found = Counter[Place]()
            for _ in range(SAMPLES):
                roll = call_roll(self.connections, self.record, nodes, 0.0, save=True, only=rank)
                found.update(seen.place for seen in roll.ranks if seen.place)
            works = Counter({place: count for place, count in found.items() if not place.waits})
            for place, count in (works if sum(works.values()) >= WORKS else found).most_common(1):
                # Waiting within a pass counts as a rank's own time, such as that of a tensor parallel partner.
                seen, then = ("waits", ": another rank holds it up") if place.waits else ("is", "")
                where = f"{seen} in {place.describe()} in {count} of {SAMPLES} samples{then}"
                self.report(f"straggler: rank {rank} {where}")

        threading.Thread(target=report, daemon=True, name="slow rank").start()

    def _call(self, seconds: float, *, save: bool = False) -> Roll:
        gone = self.gone()
        nodes = [node for node in self.record.cluster.nodes if node.name not in gone]
        return call_roll(self.connections, self.record, nodes, seconds, save=save)
