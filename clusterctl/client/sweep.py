"""The variants of a sweep in their order: one after another, or side by side on parts of the nodes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from clusterctl.client import launcher
from clusterctl.client.attempts import Launch, Resume, Target
from clusterctl.client.interrupt import InterruptGuard
from clusterctl.client.run import Run
from clusterctl.client.session import Reach
from clusterctl.errors import ClusterctlError, Fault, InputFaults
from clusterctl.jobs import job_check
from clusterctl.jobs.run_folder import RunDir, new_run
from clusterctl.jobs.run_lines import Metric
from clusterctl.jobs.sweep import SweepRecord, Variant, places_of, write_sweep
from clusterctl.runs.causes.cause import find_cause
from clusterctl.runs.state import read_state
from clusterctl.text import plural

# Seconds between two checks of runs that are side by side, and until a run without a controller counts as lost.
LOOK, ORPHANED = 0.3, 5.0


def prepared(record: SweepRecord, target_of: Callable[[Variant], Target]) -> list[Target]:
    """Return each variant's job and nodes, checked; raise InputFaults with the errors of all variants."""
    targets: list[Target] = []
    faults: list[Fault] = []
    each = record.request.each
    for number, variant in enumerate(record.variants, 1):
        try:
            target = target_of(variant)
            job = replace(target.job, name=f"{target.job.name[:36]}-v{number}")
            cluster, changed = places_of(target.nodes, job, each)[0] if each else (target.nodes, job)
            job_check.check(changed, cluster)
            targets.append(replace(target, job=job))
        except InputFaults as error:
            faults += error.faults
    if faults:
        raise InputFaults(list({str(fault): fault for fault in faults}.values()), "nothing was started")
    return targets


class Sweep(ABC):
    """Runs the variants of a sweep, and keeps its file up to date. What extends it starts and shows each run."""

    def __init__(self, folder: Path, record: SweepRecord, prepared: Sequence[Target], reach: Reach) -> None:
        self.folder, self.record, self.prepared, self.reach = folder, record, prepared, reach
        self.say: Callable[..., object] = lambda text, style="": None
        self.report: Callable[[ClusterctlError], object] = lambda error: None

    @abstractmethod
    def follow(self, target: Target, run: RunDir) -> None:
        """Start the run of a variant, or one that was started before again, and follow it to its end."""

    @abstractmethod
    def start(self, target: Target, run: RunDir) -> None:
        """Do the same without following it."""

    @abstractmethod
    def waiting(self) -> AbstractContextManager[Display]:
        """Return what shows the runs that are side by side."""

    def run(self) -> None:
        """Run the variants that have not finished."""
        left = [place for place, entry in enumerate(self.record.variants) if entry.phase != "finished"]
        write_sweep(self.folder, self.record)
        how = "side by side" if self.record.request.each else "one after another"
        self.say(f"sweep      {plural(len(left), 'variant')} {how}; {self.folder.name}")
        try:
            if self.record.request.each:
                self._side_by_side(left)
            else:
                for number in left:
                    self._in_turn(number)
        except (KeyboardInterrupt, SystemExit):
            self.say(f"interrupted; continue it with: clusterctl resume {self.folder.name}")
            raise

    def _run_of(self, number: int) -> RunDir | None:
        """Return the earlier run of a variant, if that run was recorded."""
        name = self.record.variants[number].run
        run = RunDir(self.folder.parent / name)
        return run if name and run.record.exists() else None

    def _note(
        self, number: int, phase: str, run: RunDir | None = None, problem: str = "", place: int | None = None
    ) -> None:
        before = self.record.variants[number]
        name = run.run_id if run else before.run
        place = before.place if place is None else place
        after = replace(before, run=name, phase=phase, problem=_first_line(problem), place=place)
        self.record = self.record.with_variant(number, after)
        write_sweep(self.folder, self.record)

    def _title(self, number: int) -> str:
        return f"variant {number + 1} of {len(self.record.variants)}: {self.record.variants[number].label}"

    # -- one after another

    def _in_turn(self, number: int) -> None:
        """Start or resume a variant and follow it to its end; a failure is reported and noted."""
        self.say(self._title(number), "bold")
        target = self.prepared[number]
        run = self._run_of(number) or new_run(target.job.name, self.folder.parent)
        self._note(number, "running", run)
        try:
            self.follow(target, run)
            self._note(number, "finished")
        except ClusterctlError as error:
            self.report(error)
            self._note(number, _phase(run), problem=error.message)
        except (KeyboardInterrupt, SystemExit):
            self._note(number, _phase(run, "stopped"))
            raise

    # -- side by side

    def _side_by_side(self, left: Sequence[int]) -> None:
        """Run a variant on every place until no variant is left."""
        each = self.record.request.each or ""
        total = len(places_of(self.prepared[0].nodes, self.prepared[0].job, each))
        waiting, free = list(left), list(range(total))
        running: dict[int, tuple[RunDir, int]] = {}
        seen: dict[int, float] = {}
        try:
            with self.waiting() as shown:
                while waiting or running:
                    while (pair := self._next(waiting, free)) is not None:
                        number, place = pair
                        with shown.paused():
                            run = self._begin(number, place, each)
                        if run is None:
                            free.append(place)
                        else:
                            running[number] = (run, place)
                    shown.on(self._progress(running, len(waiting)))
                    time.sleep(LOOK)
                    for number, (run, place) in list(running.items()):
                        if run.is_watched():
                            seen[number] = time.monotonic()
                        elif (
                            run.phase().is_final
                            or time.monotonic() - seen.setdefault(number, time.monotonic()) > ORPHANED
                        ):
                            del running[number]
                            free.append(place)
                            self._ended(number, run)
        except (KeyboardInterrupt, SystemExit):
            self._stop({number: run for number, (run, _) in running.items()})
            raise

    def _next(self, waiting: list[int], free: list[int]) -> tuple[int, int] | None:
        """Take a variant and a free place for it out of the lists; None if no variant can start now."""
        for number in waiting:
            before = self.record.variants[number].place if self._run_of(number) else None
            if free and (before is None or before in free):
                place = free[0] if before is None else before
                waiting.remove(number)
                free.remove(place)
                return number, place
        return None

    def _begin(self, number: int, place: int, each: str) -> RunDir | None:
        """Start a variant on a place; return None if that failed."""
        self.say(self._title(number), "bold")
        entry = self.prepared[number]
        cluster, job = places_of(entry.nodes, entry.job, each)[place]
        run = self._run_of(number) or new_run(job.name, self.folder.parent)
        self._note(number, "running", run, place=place)
        try:
            if not run.is_watched():
                self.start(Target(job, cluster), run)
            return run
        except ClusterctlError as error:
            self.report(error)
            self._note(number, "failed", problem=error.message)
            return None

    def _progress(self, running: dict[int, tuple[RunDir, int]], waiting: int) -> str:
        """Return the runs that are side by side, with their steps, in one line."""
        parts = []
        for number, (run, _) in sorted(running.items()):
            last = run.last_step() or Metric()
            loss = "" if last.loss is None else f" loss {last.loss:.4g}"
            parts.append(f"{self.record.variants[number].label} step {last.step or 0}{loss}")
        return " | ".join([*parts, *([f"{waiting} waiting"] if waiting else [])])

    def _ended(self, number: int, run: RunDir) -> None:
        phase = _phase(run, "lost")
        state = read_state(run)
        problem = ""
        if phase != "finished" and state is not None:
            problem = find_cause(run, state, run.read_record().attempt).title
        self._note(number, phase, problem=problem)
        self.say(f"{phase:<10} {self._title(number)}" + (f": {problem}" if problem else ""))

    def _stop(self, running: dict[int, RunDir]) -> None:
        """Stop the runs that are side by side, all at the same time; a further Ctrl-C kills them."""
        with InterruptGuard() as guard:
            self.say(f"stopping {plural(len(running), 'run')}; press Ctrl-C again to kill them")
            for grace in (None, 0.0):
                pool = ThreadPoolExecutor(max(len(running), 1))
                waits = [pool.submit(Run(run, self.reach).end, grace) for run in running.values()]
                try:
                    with guard.may_force():
                        for wait in waits:
                            wait.result()
                    break
                except KeyboardInterrupt:
                    pool.shutdown(wait=False)
            for number, run in running.items():
                self._note(number, _phase(run, "stopped"))


class Display(Protocol):
    """Shows the runs that are side by side."""

    def on(self, subject: str) -> None:
        """Change the text."""

    def paused(self) -> AbstractContextManager[None]:
        """Hide it within the block."""


class Silent:
    """Shows nothing."""

    def on(self, subject: str) -> None:
        pass

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()


class QuietSweep(Sweep):
    """Starts each run as `Cluster.launch` and `resume` do, and shows nothing."""

    def follow(self, target: Target, run: RunDir) -> None:
        if not run.is_watched():
            self.start(target, run)
        Run(run, self.reach).wait()

    def start(self, target: Target, run: RunDir) -> None:
        if run.record.exists():
            again = Resume.of(run)
            again.check()
            launcher.start(again, self.reach)
        else:
            checks = not self.record.request.no_checks
            launcher.start(Launch.of(target, run.root.parent, checks=checks, run=run), self.reach)

    def waiting(self) -> AbstractContextManager[Display]:
        return nullcontext(Silent())


def _first_line(problem: str) -> str:
    return problem.removeprefix("root cause: ").partition("\n")[0]


def _phase(run: RunDir, otherwise: str = "failed") -> str:
    """Return how a run ended; `otherwise` if that is not recorded."""
    phase = run.phase()
    return phase.value if run.record.exists() and phase.is_final else otherwise
