"""`launch --sweep`: run the variants of a job one after another or side by side, then compare them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clusterctl.cli import choices, options, screen
from clusterctl.cli.launch.job_request import JobRequest
from clusterctl.cli.launch.options import JobChanges
from clusterctl.cli.views.waiting import Waiting
from clusterctl.client.attempts import Launch, Target
from clusterctl.client.sweep import Sweep, prepared
from clusterctl.errors import RunFailed, UsageError
from clusterctl.jobs.run_folder import RunDir, make_runs, new_run_id
from clusterctl.jobs.sweep import (
    EXAMPLE,
    PREFIX,
    SweepRecord,
    SweepRequest,
    Variant,
    places_of,
    read_sweep,
    variants_of,
)
from clusterctl.text import plural


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
    targets = _prepare(record, asks=not dry_run)
    if dry_run:
        _foresee(record, targets, as_json)
        return
    name = new_run_id(f"{PREFIX}{targets[0].job.name.removesuffix('-v1')}"[:40])
    _Shown(make_runs(options.runs_folder()) / name, record, targets, as_json).run()


def resume_sweep(name: str, *, as_json: bool) -> None:
    """Continue a sweep: variants that finished stay as they are, the others are resumed or started."""
    folder = options.runs_folder() / name
    record = read_sweep(folder)
    _Shown(folder, record, _prepare(record, asks=True), as_json).run()


def _prepare(record: SweepRecord, *, asks: bool) -> list[Target]:
    """Return each variant's job and nodes; raise InputFaults with the errors of all variants."""
    recorded = record.request
    changes = JobChanges(recorded.restarts, recorded.hang_after, recorded.share, recorded.notify)

    def target_of(variant: Variant) -> Target:
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
        job = changes.made_in(request.job(choice))
        return Target(job, *choice.of(job))

    return prepared(record, target_of)


def _foresee(record: SweepRecord, targets: Sequence[Target], as_json: bool) -> None:
    rows = list(zip(record.variants, targets, strict=True))
    if as_json:
        screen.show_json([{"variant": variant.label, "nodes": entry.nodes.names} for variant, entry in rows])
        return
    first = targets[0]
    each = record.request.each
    at_once = len(places_of(first.nodes, first.job, each)) if each else 1
    screen.write(f"{plural(len(rows), 'variant')}, {at_once} at a time\n")
    for variant, entry in rows:
        screen.write(f"  {entry.job.name}: {variant.label}\n")


class _Shown(Sweep):
    """Starts and follows each run as `launch`, `resume` and `attach` do."""

    def __init__(self, folder: Path, record: SweepRecord, targets: Sequence[Target], as_json: bool) -> None:
        super().__init__(folder, record, targets, choices.reach())
        self.as_json, self.say, self.report = as_json, screen.log, screen.report_error

    def follow(self, target: Target, run: RunDir) -> None:
        from clusterctl.cli.launch.run import attach, launch_job, resume_run

        if run.is_watched():
            attach(run.run_id, take_over=False, quiet=False, as_json=self.as_json)
        elif run.record.exists():
            resume_run(run.run_id, options.NodeOptions(), as_json=self.as_json)
        else:
            launch_job(target, no_checks=self.record.request.no_checks, as_json=self.as_json, run=run)

    def start(self, target: Target, run: RunDir) -> None:
        from clusterctl.cli.launch.run import begin, resume_run
        from clusterctl.client.background import deliver_signals

        if run.record.exists():
            resume_run(run.run_id, options.NodeOptions(), detach=True)
            return
        begin(Launch.of(target, run.root.parent, checks=not self.record.request.no_checks, run=run))
        deliver_signals()

    def waiting(self) -> Waiting:
        return Waiting("the first variant")

    def run(self) -> None:
        """Run the variants and show the results; raise RunFailed unless all of them finished."""
        super().run()
        self._conclude()

    def _conclude(self) -> None:
        from clusterctl.cli.views import compare as views
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
            screen.show(views.results(self.record.variants, summaries))
            if comparison:
                screen.show("", *views.parts(comparison, screen.out_console()))
        finished = sum(variant.phase == "finished" for variant in self.record.variants)
        if finished < len(self.record.variants):
            raise RunFailed(
                f"{finished} of {plural(len(self.record.variants), 'variant')} finished",
                f"clusterctl resume {self.folder.name} runs the others again",
            )


def variant_json(variant: Variant) -> dict[str, object]:
    """Return a variant for `--json`."""
    values = dict(setting.split("=", 1) for setting in variant.settings)
    return {"settings": values, "run": variant.run, "phase": variant.phase, "problem": variant.problem}
