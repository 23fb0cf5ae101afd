"""Why a run failed, in words: the first cause, what it said last, what followed from it, what to try."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.store import last_lines
from clusterctl.runs.aftermath import when
from clusterctl.runs.cause_patterns import Kind, kind_of, lost_another
from clusterctl.runs.cause_patterns import how_it_ended as how_it_ended
from clusterctl.text import plural

if TYPE_CHECKING:
    from clusterctl.runs.state import RunState

# Lines of the failed rank's log that are shown.
TAIL = 20
# Lines that are looked through for what ended it.
READ = 200
# Ranks that are worth naming.
FEW = 4
# Seconds: closer ends than that have no order, by two clocks and two supervisors.
SAME_TIME = 0.25
AFTER_STOP = (signal.SIGTERM, signal.SIGKILL)


@dataclass(frozen=True)
class Cause:
    """A failed run's root cause."""

    title: str
    tail: tuple[str, ...]
    log: str
    others: str
    hint: str
    folder: str = ""
    kernel: tuple[str, ...] = ()
    """What the kernel said of it."""
    node: str = ""
    rank: int | None = None
    device: int | None = None


def keep_cause(run: RunDir, state: RunState) -> Cause | None:
    """Write down how the present attempt ended, and why where it failed: for `status`, `runs` and the report."""
    attempt = run.read_record()["attempt"]
    run.write_json(run.attempt_state(attempt), asdict(state))
    if state.phase == "finished" or (state.phase == "stopped" and not state.failure):
        return None
    cause = find_cause(run, state.failure, state.ranks, state.nodes, attempt, state.orphaned)
    for path in (run.attempt_cause(attempt), run.cause):
        run.write_json(path, {"run": run.run_id, "attempt": attempt, **asdict(cause)})
    return cause


def read_cause(run: RunDir) -> dict[str, Any]:
    """Why a run failed, as it was written down; empty where it did not, or was brought to its end by nobody."""
    try:
        value = json.loads(run.cause.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def find_cause(
    run: RunDir,
    failure: Mapping[str, Any] | None,
    ranks: Sequence[Mapping[str, Any]],
    nodes: Mapping[str, str],
    attempt: int = 1,
    orphaned: Collection[str] = (),
) -> Cause:
    """The root cause as far as the nodes' records and the logs that came home tell; a node that is `orphaned` answers,
    and its supervisor is dead."""
    ends = _Ends(run, ranks, failure, attempt)
    first, folder = ends.first(), str(run.root)
    gone = [name for name, state in nodes.items() if state in ("lost", "unknown")]
    # What failed elsewhere followed from it.
    if gone and not (first and ends.kinds[_key(first)].sure):
        dead = [name for name in gone if name in orphaned]
        title = f"lost {', '.join(gone)}: the node or its link is gone"
        hint = "look at the node; `clusterctl doctor` asks all of them"
        if dead == gone:
            title = f"the supervisor on {', '.join(gone)} was killed; its ranks were ended"
            hint = "if nobody did, the kernel's out-of-memory killer did: see dmesg on that node"
        return Cause(title, (), str(run.logs(attempt)), ends.others(None), hint, folder, node=gone[0])
    if first is None:
        title = "ended without a reason that was recorded"
        return Cause(title, (), str(run.logs(attempt)), "", "clusterctl status shows every rank", folder)
    if ends.kinds[_key(first)].follows and (left := ends.left_early(first, nodes)):
        first = left
    kind, (log, tail) = ends.kinds[_key(first)], ends.said(first)
    title = f"rank {first['rank']} on {first['node']} (device {first.get('device')}) {kind.words}"
    others = "; ".join(part for part in (ends.others(first), gone and f"lost {', '.join(gone)}") if part)
    hint = "\n".join(filter(None, (ends.did_not_wait() if kind.follows else "", kind.hint)))
    kernel = tuple(first.get("kernel") or ())
    place = {"node": first["node"], "rank": first["rank"], "device": first.get("device")}
    return Cause(title, tuple(tail[-TAIL:]), str(log), others, hint, folder, kernel, **place)


def _key(rank: Mapping[str, Any]) -> tuple[str, int]:
    return rank["node"], rank["rank"]


class _Ends:
    """How the ranks of an attempt ended, by time."""

    def __init__(
        self,
        run: RunDir,
        ranks: Sequence[Mapping[str, Any]],
        failure: Mapping[str, Any] | None,
        attempt: int,
    ) -> None:
        self.run, self.attempt = run, attempt
        self.all = [one for one in ranks if "node" in one]
        self.failure = self._whole(failure) if failure else None
        bad = [one for one in self.all if one.get("exit_code") or one.get("signal") or one.get("hang")]
        self.kinds = {_key(one): self._kind(one) for one in bad}
        self.bad = sorted(bad, key=when)

    def _whole(self, failure: Mapping[str, Any]) -> Mapping[str, Any]:
        """A failure with all that its rank's record says; of a hang that record tells only how we ended it."""
        same = [one for one in self.all if _key(one) == _key(failure)]
        whole = {**same[0], **failure} if same else failure
        self.all = [one for one in self.all if _key(one) != _key(failure)] + [whole]
        return whole

    def _kind(self, rank: Mapping[str, Any]) -> Kind:
        if self._was_stopped(rank):
            return Kind(how_it_ended(rank), lost_another(self.said(rank)[1]) or "stopped", follows=True)
        return kind_of(rank, self.said(rank)[1])

    def _was_stopped(self, rank: Mapping[str, Any]) -> bool:
        """Ended by the signals of a stop, after the first failure: by clusterctl itself."""
        if self.failure is None or rank.get("signal") not in AFTER_STOP:
            return False
        return when(rank) > when(self.failure) + SAME_TIME

    def said(self, rank: Mapping[str, Any]) -> tuple[Path, list[str]]:
        """A rank's log and its last lines: what it wrote to stderr, or else to stdout."""
        logs = [self.run.log(rank["node"], rank["rank"], stream, self.attempt) for stream in ("err", "out")]
        for log in logs:
            if lines := [line for line in last_lines(log, READ) if line.strip()]:
                return log, lines
        return logs[1], []

    def first(self) -> Mapping[str, Any] | None:
        """The rank that the others followed: the first that failed, unless it says itself that it lost another."""
        if self.failure is None:
            return None
        began = when(self.failure)
        causes = [one for one in self.bad if not self.kinds[_key(one)].follows]
        near = [one for one in causes if when(one) <= began + SAME_TIME]
        if self.kinds.get(_key(self.failure), Kind("", "")).follows and causes:
            return (near or causes)[0]
        return self.failure

    def left_early(self, first: Mapping[str, Any], nodes: Mapping[str, str]) -> Mapping[str, Any] | None:
        """The first rank that ended well, as it has it, while the others still counted on it: they lost it.

        What ended well after a stop is none: told by clocks that were compared, else by its node's state.
        """
        well = [one for one in self.all if one.get("exit_code") == 0 and _key(one) not in self.kinds]
        before = when(first) + SAME_TIME
        left = [
            one
            for one in well
            if (when(one) <= before if "at" in one else nodes.get(one["node"]) == "finished")
        ]
        if not left:
            return None
        words = "exited with code 0 while other ranks still needed it"
        hint = "see that every rank takes the same number of steps, and that they leave together"
        earliest = min(left, key=when)
        self.kinds[_key(earliest)] = Kind(words, words, hint)
        return earliest

    def did_not_wait(self) -> str:
        """Who did not wait where the others waited in vain, or lost each other: stopped without a word of it."""
        silent = [one for one in self.bad if self.kinds[_key(one)].short == "stopped"]
        if not silent or len(silent) > FEW or 2 * len(silent) > len(self.all):
            return ""
        names = ", ".join(f"rank {one['rank']} on {one['node']}" for one in silent)
        return f"look at {names}: not waiting with the others, and still there when the run was stopped"

    def others(self, first: Mapping[str, Any] | None) -> str:
        """The other ranks in one line: they followed, they did not begin it."""
        others = [one for one in self.all if first is None or _key(one) != _key(first)]
        ways = Counter(self.kinds[_key(one)].short for one in others if _key(one) in self.kinds)
        if not others or not ways:
            return f"the {plural(len(others), 'other rank')} ended well" if others and first else ""
        number = sum(ways.values())
        parts = [words if count == number else f"{count} {words}" for words, count in ways.most_common(4)]
        more = number - sum(count for _, count in ways.most_common(4))
        parts += [f"{more} in other ways"] if more else []
        return f"{plural(number, 'other rank')} ended in consequence: {', '.join(parts)}"
