"""`launch --sweep`: run the variants of a job one after another or side by side, then compare them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.cli import options, screen
from clusterctl.cli.launch.job_request import JobRequest
from clusterctl.cli.launch.options import JobChanges
from clusterctl.client.attempts import Launch, Target
from clusterctl.client.interrupt import InterruptGuard
from clusterctl.errors import ClusterctlError, Fault, InputFaults, RunFailed, UsageError
from clusterctl.jobs.run_folder import make_runs, new_run, new_run_id
from clusterctl.jobs.sweep import (
    EXAMPLE,
    PREFIX,
    SweepRecord,
    SweepRequest,
    Variant,
    places_of,
    read_sweep,
    variants_of,
    write_sweep,
)
from clusterctl.text import plural

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.run_folder import RunDir

# Seconds between two checks of runs that are side by side, and until a run without a controller counts as lost.
LOOK, ORPHANED = 0.3, 5.0


def launch_sweep(
    request: JobRequest,
    texts: Sequence[str],
    each: str | None,
    changes: JobChanges,
    no_checks: bool,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Check all variants, then run them and compare them."""

    if not texts:
        raise UsageError("--each is for a sweep", EXAMPLE)
    words = request.words or []
    if len(words) != 1 or not words[0].endswith(options.JOB_FILES):
        raise UsageError("--sweep needs a job file", "clusterctl init --job NAME writes one")
    recorded = SweepRequest(
        str(Path(words[0]).absolute()), str(request.cluster.absolute()) if request.cluster else None,
        request.nodes, request.exclude, request.include, request.devices, tuple(request.overrides or ()), each,
        changes.restarts, changes.hang_after, changes.share, changes.notify, no_checks,
    )  # fmt: skip
    record = SweepRecord(recorded, variants_of(texts))
    prepared = _prepare(record, asks=not dry_run)
    if dry_run:
        _foresee(record, prepared, as_json)
        return
    name = new_run_id(f"{PREFIX}{prepared[0].job.name.removesuffix('-v1')}"[:40])
    _Sweep(make_runs(options.runs_folder()) / name, record, prepared, as_json).run()


def resume_sweep(name: str, *, as_json: bool) -> None:
    """Continue a sweep: variants that finished stay as they are, the others are resumed or started."""
    folder = options.runs_folder() / name
    record = read_sweep(folder)
    _Sweep(folder, record, _prepare(record, asks=True), as_json).run()


def _prepare(record: SweepRecord, *, asks: bool) -> list[Target]:
    """Return each variant's job and nodes; raise InputFaults with the errors of all variants."""
    recorded = record.request
    changes = JobChanges(recorded.restarts, recorded.hang_after, recorded.share, recorded.notify)
    prepared: list[Target] = []
    faults: list[Fault] = []
    for number, variant in enumerate(record.variants, 1):
        request = JobRequest(
            cluster=Path(recorded.cluster) if recorded.cluster else None,
            nodes=recorded.nodes,
            exclude=recorded.exclude,
            words=[recorded.job],
            include=recorded.include,
            overrides=[*recorded.settings, *variant.settings],
            devices=recorded.devices,
        )
        choice = request.choice(asks=asks)
        try:
            job = changes.made_in(request.job(choice))
            cluster, spares = choice.of(job)
            job = replace(job, name=f"{job.name[:36]}-v{number}")
            _check(job, cluster, recorded.each)
            prepared.append(Target(job, cluster, spares))
        except InputFaults as error:
            faults += error.faults
    if faults:
        unique = {str(fault): fault for fault in faults}
        raise InputFaults(list(unique.values()), "nothing was started")
    return prepared


def _check(job: Job, cluster: Cluster, each: str | None) -> None:
    from clusterctl.jobs import job_check

    chosen, changed = places_of(cluster, job, each)[0] if each else (cluster, job)
    job_check.check(changed, chosen)


def _foresee(record: SweepRecord, prepared: Sequence[Target], as_json: bool) -> None:
    rows = list(zip(record.variants, prepared, strict=True))
    if as_json:
        screen.show_json([{"variant": variant.label, "nodes": entry.nodes.names} for variant, entry in rows])
        return
    first = prepared[0]
    each = record.request.each
    at_once = len(places_of(first.nodes, first.job, each)) if each else 1
    screen.write(f"{plural(len(rows), 'variant')}, {at_once} at a time\n")
    for variant, entry in rows:
        screen.write(f"  {entry.job.name}: {variant.label}\n")


class _Sweep:
    """Runs the variants of a sweep and keeps its file up to date."""

    def __init__(self, folder: Path, record: SweepRecord, prepared: Sequence[Target], as_json: bool) -> None:
        self.folder, self.record, self.prepared, self.as_json = folder, record, prepared, as_json

    def run(self) -> None:
        """Run the variants that have not finished, then show the results. Raise RunFailed unless all variants
        finished.
        """
        left = [place for place, entry in enumerate(self.record.variants) if entry.phase != "finished"]
        write_sweep(self.folder, self.record)
        how = "side by side" if self.record.request.each else "one after another"
        screen.log(f"sweep      {plural(len(left), 'variant')} {how}; {self.folder.name}")
        try:
            if self.record.request.each:
                self._side_by_side(left)
            else:
                for number in left:
                    self._in_turn(number)
        except (KeyboardInterrupt, SystemExit):
            screen.log(f"interrupted; continue it with: clusterctl resume {self.folder.name}")
            raise
        self._conclude()

    def _run_of(self, number: int) -> RunDir | None:
        """Return the earlier run of a variant, if that run was recorded."""
        from clusterctl.jobs.run_folder import RunDir

        name = self.record.variants[number].run
        run = RunDir(options.runs_folder() / name)
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
        from clusterctl.cli.launch.run import attach, launch_job, resume_run

        screen.log(self._title(number), "bold")
        earlier, entry = self._run_of(number), self.prepared[number]
        run = earlier or new_run(entry.job.name, options.runs_folder())
        self._note(number, "running", run)
        try:
            if earlier and earlier.is_watched():
                attach(earlier.run_id, take_over=False, quiet=False, as_json=self.as_json)
            elif earlier:
                resume_run(earlier.run_id, options.NodeOptions(), as_json=self.as_json)
            else:
                launch_job(entry, no_checks=self.record.request.no_checks, as_json=self.as_json, run=run)
            self._note(number, "finished")
        except ClusterctlError as error:
            screen.report_error(error)
            self._note(number, _phase(run), problem=error.message)
        except (KeyboardInterrupt, SystemExit):
            self._note(number, _phase(run, "stopped"))
            raise

    # -- side by side

    def _side_by_side(self, left: Sequence[int]) -> None:
        """Run a variant on every place until no variant is left."""
        from clusterctl.cli.views.waiting import Waiting

        each = self.record.request.each or ""
        total = len(places_of(self.prepared[0].nodes, self.prepared[0].job, each))
        waiting, free = list(left), list(range(total))
        running: dict[int, tuple[RunDir, int]] = {}
        seen: dict[int, float] = {}
        try:
            with Waiting("the first variant") as shown:
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
                            self._ended(number, run, shown)
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
        from clusterctl.cli.launch.run import begin, resume_run
        from clusterctl.client.background import deliver_signals

        screen.log(self._title(number), "bold")
        entry, earlier = self.prepared[number], self._run_of(number)
        cluster, job = places_of(entry.nodes, entry.job, each)[place]
        run = earlier or new_run(job.name, options.runs_folder())
        self._note(number, "running", run, place=place)
        try:
            if earlier and not earlier.is_watched():
                resume_run(earlier.run_id, options.NodeOptions(), detach=True)
            elif not earlier:
                target = Target(job, cluster)
                checks = not self.record.request.no_checks
                begin(Launch.of(target, run.root.parent, checks=checks, run=run))
                deliver_signals()
            return run
        except ClusterctlError as error:
            screen.report_error(error)
            self._note(number, "failed", problem=error.message)
            return None

    def _progress(self, running: dict[int, tuple[RunDir, int]], waiting: int) -> str:
        """Return the runs that are side by side, with their steps, in one line."""
        from clusterctl.jobs.run_lines import Metric

        parts = []
        for number, (run, _) in sorted(running.items()):
            last = run.last_step() or Metric()
            loss = "" if last.loss is None else f" loss {last.loss:.4g}"
            parts.append(f"{self.record.variants[number].label} step {last.step or 0}{loss}")
        return " | ".join([*parts, *([f"{waiting} waiting"] if waiting else [])])

    def _ended(self, number: int, run: RunDir, shown: object) -> None:
        from clusterctl.runs.causes.cause import find_cause
        from clusterctl.runs.state import read_state

        phase = _phase(run, "lost")
        state = read_state(run)
        problem = ""
        if phase != "finished" and state is not None:
            problem = find_cause(run, state, run.read_record().attempt).title
        self._note(number, phase, problem=problem)
        screen.log(f"{phase:<10} {self._title(number)}" + (f": {problem}" if problem else ""))

    def _stop(self, running: dict[int, RunDir]) -> None:
        """Stop the runs that are side by side, all at the same time; a further Ctrl-C kills them."""
        from clusterctl.client.run import Run

        reach = options.reach()
        with InterruptGuard() as guard:
            screen.log(f"stopping {plural(len(running), 'run')}; press Ctrl-C again to kill them")
            for grace in (None, 0.0):
                pool = ThreadPoolExecutor(max(len(running), 1))
                waits = [pool.submit(Run(run, reach).end, grace) for run in running.values()]
                try:
                    with guard.may_force():
                        for wait in waits:
                            wait.result()
                    break
                except KeyboardInterrupt:
                    pool.shutdown(wait=False)
            for number, run in running.items():
                self._note(number, _phase(run, "stopped"))

    # -- the end

    def _conclude(self) -> None:
        from clusterctl.cli.views import compare as views
        from clusterctl.cli.views import sweep as table
        from clusterctl.report import compare as comparing
        from clusterctl.report.page import Subject

        runs = {number: run for number in range(len(self.record.variants)) if (run := self._run_of(number))}
        subjects = {number: Subject.of(run) for number, run in runs.items()}
        comparison = comparing.compare(list(subjects.values())) if len(subjects) > 1 else None
        if self.as_json:
            variants = [variant_json(variant) for variant in self.record.variants]
            more = comparison.as_json() if comparison else {}
            screen.show_json_line({"sweep": self.folder.name, "variants": variants, "comparison": more})
        else:
            summaries = {number: subject.summary for number, subject in subjects.items()}
            screen.show(table.results(self.record.variants, summaries))
            if comparison:
                screen.show("", *views.parts(comparison, screen.out_console()))
        finished = sum(variant.phase == "finished" for variant in self.record.variants)
        if finished < len(self.record.variants):
            raise RunFailed(
                f"{finished} of {plural(len(self.record.variants), 'variant')} finished",
                f"clusterctl resume {self.folder.name} runs the others again",
            )


def _first_line(problem: str) -> str:
    return problem.removeprefix("root cause: ").partition("\n")[0]


def variant_json(variant: Variant) -> dict[str, object]:
    """Return a variant for `--json`."""
    values = dict(setting.split("=", 1) for setting in variant.settings)
    return {"settings": values, "run": variant.run, "phase": variant.phase, "problem": variant.problem}


def _phase(run: RunDir, otherwise: str = "failed") -> str:
    """Return how a run ended; `otherwise` if that is not recorded."""
    phase = run.phase()
    return phase.value if run.record.exists() and phase.is_final else otherwise
