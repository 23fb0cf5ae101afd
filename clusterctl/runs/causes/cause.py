"""Find why a run failed: the rank that failed first, the end of its log, the consequences, and a remedy."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import FORMAT
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.store import last_lines
from clusterctl.runs.causes.mismatch import judge_ends
from clusterctl.runs.causes.patterns import MISMATCHED, OF_PROGRAMS, Kind, kind_of, lost_another, raised_in
from clusterctl.runs.causes.patterns import how_it_ended as how_it_ended
from clusterctl.runs.causes.workers import Worker, failed_worker, own_lines, prefixed
from clusterctl.runs.state import write_state
from clusterctl.text import plural
from clusterctl.wire.typed_json import BadValue, decode, encode

if TYPE_CHECKING:
    from clusterctl.runs.state import RankState, RunState

# Lines of the failed rank's log that are shown.
TAIL = 20
# Last lines of the log that are searched for the cause.
READ = 1000
# Number of ranks up to which they are named one by one.
FEW = 4
# Seconds: the order of ends that are closer is uncertain, because two clocks and two supervisors are involved.
SAME_TIME = 0.25
AFTER_STOP = (signal.SIGTERM, signal.SIGKILL)


@dataclass(frozen=True)
class Cause:
    """The root cause of a failed run."""

    title: str
    tail: tuple[str, ...] = ()
    """The last lines of the failed rank's log."""
    log: str = ""
    others: str = ""
    """What happened to the other ranks, in one line."""
    hint: str = ""
    folder: str = ""
    kernel: tuple[str, ...] = ()
    """Messages of the node's kernel about the failed process."""
    node: str = ""
    rank: int | None = None
    device: int | None = None
    attempt: int = 1
    quoted: str = ""
    """The part of `title` that the program wrote, which may be secret."""
    passes: str = ""
    """Why the same start may succeed later; empty for other failures."""

    def as_json(self) -> dict[str, object]:
        result = encode(self)
        assert isinstance(result, dict)
        return result


def record_end(run: RunDir, state: RunState) -> Cause | None:
    """Record how the present attempt ended; if it failed, find, record and return the cause."""
    attempt = run.read_record().attempt
    write_state(run, state, run.attempt_state(attempt))
    if state.phase is Phase.FINISHED or (state.phase is Phase.STOPPED and not state.failure):
        return None
    cause = find_cause(run, state, attempt)
    for path in (run.attempt_cause(attempt), run.cause):
        run.write_json(path, {"format": FORMAT, "run": run.run_id, **cause.as_json()})
    return cause


def read_cause(run: RunDir) -> Cause | None:
    """Return the recorded cause of a failed run; None if there is none, or if it cannot be read."""
    try:
        return decode(Cause, run.read_json(run.cause)) if run.cause.exists() else None
    except (BadValue, UsageError):
        return None


def find_cause(run: RunDir, state: RunState, attempt: int = 1) -> Cause:
    """Return the root cause, as far as the reports of the nodes and the logs that were copied here show it."""
    ends = _Ends(run, state, attempt)
    first, folder = ends.first(), str(run.root)
    gone = [name for name, phase in state.nodes.items() if phase in (Phase.LOST, Phase.UNKNOWN)]
    # A lost node explains failures elsewhere, unless a rank's own log explains its end.
    if gone and not (first and ends.kinds[_key(first)].sure):
        title, hint = _lost(state, gone)
        return Cause(
            title, (), str(run.logs(attempt)), ends.others(None), hint, folder, node=gone[0], attempt=attempt
        )
    if first is None:
        title = "ended without a recorded reason"
        hint = "clusterctl status shows every rank"
        return Cause(title, log=str(run.logs(attempt)), hint=hint, folder=folder, attempt=attempt)
    if ends.kinds[_key(first)].follows and (left := ends.left_early(first)):
        first = left
    kind = ends.kinds[_key(first)]
    first = next((entry for entry in ends.all if entry.rank == kind.source), first)
    first, kind = ends.mismatched(first, kind)
    log, tail = ends.log_of(first)
    hint = "\n".join(filter(None, (ends.did_not_wait() if kind.follows else "", kind.hint)))
    trains = run.record.exists() and run.read_record().job.train is not None
    for ours, others in () if trains else OF_PROGRAMS:
        hint = hint.replace(ours, others)
    return Cause(
        title=_title(first, kind.words),
        tail=tuple(tail[-TAIL:]),
        log=str(log),
        others="; ".join(filter(None, (ends.others(first), f"lost {', '.join(gone)}" if gone else ""))),
        hint=hint,
        folder=folder,
        kernel=first.kernel,
        node=first.node,
        rank=first.rank if first.worker is None else first.worker,
        device=first.device,
        attempt=attempt,
        quoted=kind.quoted,
        passes=kind.passes,
    )


def _title(first: RankState, words: str) -> str:
    if first.hang and first.stands and not first.odd:
        return f"hung for {first.hang:g} s: {first.stands}"
    rank = first.rank if first.worker is None else first.worker
    return f"rank {rank} on {first.node} (device {first.device}) {words}"


def _lost(state: RunState, gone: list[str]) -> tuple[str, str]:
    """Return title and hint for nodes that are lost."""
    names = ", ".join(gone)
    stuck = [name for name in gone if name in state.unresponsive]
    if stuck == gone:
        why = "; ".join(dict.fromkeys(state.unresponsive[name] for name in stuck))
        title = f"the supervisor on {names} did not respond: {why}; it was ended, and its ranks with it"
        return title, "see who sends SIGSTOP on that node, or which of its disks hangs: `clusterctl doctor`"
    if all(name in state.rebooted for name in gone):
        was = "was" if len(gone) == 1 else "were"
        return (
            f"{names} {was} restarted (another boot id)",
            "see `last -x` and `journalctl -b -1` on that node",
        )
    if all(name in state.orphaned for name in gone):
        title = f"the supervisor on {names} was killed; its ranks were ended"
        return title, "if no user did, the kernel's out-of-memory killer did: see dmesg on that node"
    reasons = {state.unreachable.get(name, "") for name in gone}
    if all(reason.startswith("no address for") for reason in reasons):
        title = f"lost {names}: this machine has {'; '.join(sorted(reasons))}"
        return title, "check the name server of this machine, or give the nodes addresses in the inventory"
    return (
        f"lost {names}: the node or its link is gone",
        "check the node; `clusterctl doctor` checks all of them",
    )


def _key(rank: RankState) -> tuple[str, int]:
    return rank.node, rank.rank


def _is_same(rank: RankState, other: RankState | None) -> bool:
    return other is not None and _key(rank) == _key(other)


class _Ends:
    """How the ranks of an attempt ended, in order of time."""

    def __init__(self, run: RunDir, state: RunState, attempt: int) -> None:
        self.run, self.attempt, self.nodes = run, attempt, state.nodes
        self.failure = state.failure
        self.all = [rank for rank in state.ranks if rank.node]
        if self.failure:
            # The failure says more than the rank's own record, which for a hang only shows how clusterctl ended the
            # process.
            self.all = [rank for rank in self.all if _key(rank) != _key(self.failure)] + [self.failure]
        self.workers: dict[tuple[str, int], Worker] = {}
        self.all = [self._with_worker(rank) for rank in self.all]
        bad = [
            rank
            for rank in self.all
            if rank.exit_code or rank.signal or rank.hang or _is_same(rank, self.failure)
        ]
        self.kinds = {_key(rank): self._kind(rank) for rank in bad}
        self.bad = sorted(bad, key=lambda rank: rank.end_time)

    def _with_worker(self, rank: RankState) -> RankState:
        """Return a launcher that failed with the end of its worker that failed first."""
        if not rank.exit_code or rank.hang:
            return rank
        # DeepSpeed's launcher names its worker on stdout.
        out = last_lines(self.run.log(rank.node, rank.rank, "out", self.attempt), TAIL)
        worker = failed_worker([*self.log_of(rank)[1], *out], partial(self._first_rank, rank.node))
        if worker is None:
            return rank
        self.workers[_key(rank)] = worker
        own = self.run.read_record().devices_on(rank.node)
        device = own[worker.local_rank] if worker.local_rank < len(own) else rank.device
        code, number = worker.exit_code, worker.signal
        new = replace(rank, worker=worker.rank, device=device, exit_code=code, signal=number, error="")
        self.failure = new if _is_same(rank, self.failure) else self.failure
        return new

    def _first_rank(self, node: str) -> int:
        """Return the global rank of the first worker on a node: one runs on each device, in the order of the nodes."""
        record = self.run.read_record()
        names = record.cluster.names
        return (
            sum(len(record.devices_on(name)) for name in names[: names.index(node)]) if node in names else 0
        )

    def _kind(self, rank: RankState) -> Kind:
        if self._was_stopped(rank):
            return Kind(how_it_ended(rank), lost_another(self.log_of(rank)[1]) or "stopped", follows=True)
        return kind_of(rank, self.log_of(rank)[1])

    def _was_stopped(self, rank: RankState) -> bool:
        """Return True if clusterctl itself ended the rank, after the first failure."""
        if rank.ended_here and rank.worker is None and not _is_same(rank, self.failure):
            return True
        signals = (*AFTER_STOP, signal.SIGABRT) if self.failure and self.failure.hang else AFTER_STOP
        if self.failure is None or rank.signal not in signals:
            return False
        return rank.end_time > self.failure.end_time + SAME_TIME

    def log_of(self, rank: RankState) -> tuple[Path, list[str]]:
        """Return a rank's log and its last lines: of stderr, or of stdout if stderr is empty."""
        if own := list(getattr(self.workers.get(_key(rank)), "lines", ())):
            return self.run.log(rank.node, rank.rank, "err", self.attempt), own
        logs = [self.run.log(rank.node, rank.rank, stream, self.attempt) for stream in ("err", "out")]
        recorded = [line for line in rank.error.splitlines() if line.strip()][-READ:]
        for log in logs:
            if lines := [line for line in last_lines(log, READ) if line.strip()]:
                # The recorded exception explains more than a log that does not end in an exception.
                return log, lines if raised_in(lines) or not recorded else [*lines, *recorded]
        return logs[1], recorded

    def first(self) -> RankState | None:
        """Return the rank whose failure caused the others: the first one, unless its log says that it lost another."""
        if self.failure is None:
            return None
        began = self.failure.end_time
        causes = [entry for entry in self.bad if not self.kinds[_key(entry)].follows]
        near = [entry for entry in causes if entry.end_time <= began + SAME_TIME]
        if not self.kinds.get(_key(self.failure), Kind("", "")).follows:
            return self.failure
        return next(iter(near or causes), None) or self._raised_below() or self.failure

    def _raised_below(self) -> RankState | None:
        """Return a worker with an error of its own below a launcher that was stopped before it could report it."""
        for rank in filter(self._was_stopped, self.all):
            tail = self.log_of(rank)[1]
            for number in prefixed(tail):
                local = number - self._first_rank(rank.node)
                lines = own_lines(number, local, tail)
                new = replace(rank, worker=number, exit_code=1, signal=None, error="")
                kind = kind_of(new, lines)
                if raised_in(lines) and not kind.follows:
                    own = self.run.read_record().devices_on(rank.node)
                    self.workers[_key(rank)] = Worker(local, number, 1, None, tuple(lines))
                    self.kinds[_key(rank)] = kind
                    return replace(new, device=own[local]) if 0 <= local < len(own) else new
        return None

    def left_early(self, first: RankState) -> RankState | None:
        """Return the first rank that exited with code 0 before the others were done, or None.

        A rank that exited after a stop does not count; the clocks show that if they were compared, else its node's
        phase does.
        """
        well = [entry for entry in self.all if entry.exit_code == 0 and _key(entry) not in self.kinds]
        before = first.end_time + SAME_TIME
        left = [
            entry
            for entry in well
            if (
                entry.end_time <= before
                if entry.at is not None
                else self.nodes.get(entry.node) is Phase.FINISHED
            )
        ]
        if not left:
            return None
        phrase = "exited with code 0 while other ranks still needed it"
        hint = "make every rank take the same number of steps, and exit together"
        earliest = min(left, key=lambda rank: rank.end_time)
        self.kinds[_key(earliest)] = Kind(phrase, phrase, hint)
        return earliest

    def mismatched(self, first: RankState, kind: Kind) -> tuple[RankState, Kind]:
        """Return the rank whose collective did not match, if a rank reports that and the stacks show which it was."""
        reported = next((entry for entry in self.kinds.values() if entry.short == MISMATCHED), None)
        blamed = judge_ends(self.all, lambda rank: self.log_of(rank)[1]) if reported else None
        if reported is None or blamed is None or not blamed.blamed:
            return first, kind
        wrong = next(entry for entry in self.all if entry.rank == blamed.blamed[0].rank)
        words = f"called a collective that does not match: {blamed.sentence}"
        return wrong, replace(reported, words=words)

    def did_not_wait(self) -> str:
        """Return a hint with the ranks that ended early while the others waited for them or lost each other."""
        silent = [entry for entry in self.bad if self.kinds[_key(entry)].short == "stopped"]
        if not silent or len(silent) > FEW or 2 * len(silent) > len(self.all):
            return ""
        names = ", ".join(f"rank {entry.rank} on {entry.node}" for entry in silent)
        return f"look at {names}: not waiting with the others, and still there when the run was stopped"

    def others(self, first: RankState | None) -> str:
        """Return in one line what happened to the other ranks as a consequence."""
        others = [entry for entry in self.all if first is None or _key(entry) != _key(first)]
        ways = Counter(self.kinds[_key(entry)].short for entry in others if _key(entry) in self.kinds)
        if not others or not ways:
            return f"the {plural(len(others), 'other rank')} ended well" if others and first else ""
        number = sum(ways.values())
        parts = [phrase if count == number else f"{count} {phrase}" for phrase, count in ways.most_common(4)]
        more = number - sum(count for _, count in ways.most_common(4))
        parts += [f"{more} in other ways"] if more else []
        return f"{plural(number, 'other rank')} ended as a consequence: {', '.join(parts)}"
