"""`doctor`: check this machine and the nodes; each problem comes with a remedy."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import flag, option
from clusterctl.cli.views.waiting import Waiting, shown_while
from clusterctl.errors import FindingsError, UsageError
from clusterctl.finding import Finding
from clusterctl.inventory import nodeset
from clusterctl.text import escape_controls, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clusterctl.checks.doctor import CheckedJob
    from clusterctl.inventory.cluster import Cluster, Node

# From harmless to bad.
LEVELS = {
    "ok": ("ok", "green"),
    "note": ("note", "dim"),
    "warning": ("warn", "yellow"),
    "bad": ("bad", "bold red"),
}
# Values of `where` in a finding that are not node names.
PLACES = ("here", "all nodes")


JobFile = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help="A job file: check its nodes and devices, run its setup, and report what would keep it from starting.",
        autocompletion=options.complete_jobs,
    ),
]


def doctor(
    selection: options.NodeOptions,
    *,
    job: JobFile = None,
    master_port: int = option(
        "Check that ranks can connect to this port. 0: any free port, as `launch` uses.",
        default=0,
        min=0,
        max=65535,
        metavar="PORT",
    ),
    fix_hints: bool = flag("Show only problems, with commands that fix them."),
    strict: bool = flag("Exit with 1 for warnings too."),
    verbose: bool = flag("Show every check that passed, every note and every op.", "--verbose", "-v"),
    accept_new: options.AcceptNew = False,
    as_json: options.Json = False,
) -> None:
    """Check whether this machine and the nodes are ready for a run. Changes nothing; exits with 1 if a check fails."""
    with shown_while("the nodes"):
        from concurrent.futures import ThreadPoolExecutor

        from clusterctl.checks import doctor as checks_doctor

        named = selection.cluster or selection.nodes or job
        checked, chosen = _checked(job, selection, accept_new) if job else (None, None)
        if chosen is None:
            chosen = selection.chosen() if named or choices.has_inventory() else None
    shown = Report(chosen.nodes if chosen else (), fix_hints=fix_hints, verbose=verbose, silent=as_json)
    # Loading torch takes seconds, and so does an unreachable node: do both at the same time.
    with shown.waiting, ThreadPoolExecutor(1) as background:
        here = background.submit(checks_doctor.here)
        if chosen is None:
            text, remedy = (
                "no cluster.yaml in this folder: no node was checked",
                "clusterctl init, or -c FILE",
            )
            shown([Finding("warning", "here", text, remedy, "inventory")], "")
        else:
            with choices.connected(chosen, accept_new) as connections:
                checks_doctor.nodes(chosen, connections, master_port, shown, checked)
        shown([], "this machine: torch and the fused ops")
        shown(here.result(), "")
    if as_json:
        screen.show_json([asdict(finding) for finding in shown.findings])
    else:
        shown.passes()
        if checked is not None and chosen is not None and not any(f.level == "bad" for f in shown.findings):
            screen.write(f"ok    {job}: it can start on {nodeset.fold(chosen.names)}\n")
    _conclude(shown.findings, strict=strict)


def _checked(job: str, selection: options.NodeOptions, accept_new: bool) -> tuple[CheckedJob, Cluster]:
    """Return a job in the form that the checks need, and its nodes with the spare ones; raise InputFaults for its
    errors.
    """
    from clusterctl.checks.doctor import checked_job
    from clusterctl.jobs import job as jobs
    from clusterctl.jobs import job_check
    from clusterctl.runs.prepare.stage import code_hash

    path = Path(job)
    if path.suffix not in options.JOB_FILES and not path.exists():
        raise UsageError(
            f"{job}: no such job file", f"to check nodes: clusterctl doctor -n {shlex.quote(job)}"
        )
    choice = selection.choose(asks=True, accept_new=accept_new)
    found = jobs.load(path, (), choice.faults)
    cluster, spares = choice.of(found)
    summary = job_check.check(found, cluster)
    code = code_hash(found, options.runs_folder())
    return checked_job(found, summary, code), replace(cluster, nodes=(*cluster.nodes, *spares))


class Report:
    """Shows each problem when it is found, and at the end the checks that passed, folded."""

    def __init__(self, nodes: Sequence[Node] = (), *, fix_hints: bool, verbose: bool, silent: bool) -> None:
        self.nodes = nodes
        self.fix_hints, self.verbose, self.silent = fix_hints, verbose, silent
        self.findings: list[Finding] = []
        self.waiting = Waiting("the nodes", quiet=silent, at_once=True)

    def __call__(self, findings: list[Finding], waits_for: str) -> None:
        """Show the problems among new findings, the worst first, and then the next wait."""
        from clusterctl.checks.doctor import folded

        self.findings += findings
        order = list(LEVELS)
        problems = [finding for finding in folded(findings, self.nodes) if not finding.is_sound]
        wanted = [entry for entry in problems if self.verbose or not _is_detail(entry)]
        if wanted and not self.silent:
            worst_first = sorted(wanted, key=lambda finding: -order.index(finding.level))
            with self.waiting.paused():
                screen.show(view(worst_first, fix_hints=self.fix_hints))
        if waits_for:
            self.waiting.on(waits_for)

    def passes(self) -> None:
        """Show the checks that passed: a line per place, or with `verbose` each check."""
        from clusterctl.checks.doctor import folded
        from clusterctl.checks.job_setup import SETUP

        sound = [finding for finding in folded(self.findings) if finding.is_sound]
        if self.fix_hints:
            if len(sound) == len(folded(self.findings)):
                screen.write("nothing to fix\n")
            return
        if self.verbose:
            screen.show(view(sound))
            return
        counts = Counter(
            finding.where for finding in self.findings if finding.is_sound and not _is_detail(finding)
        )
        for (number, noted), places in _alike(counts, self.findings).items():
            named = [place for place in places if place not in PLACES]
            where = ", ".join([*([nodeset.fold(named)] if named else []), *(set(PLACES) & set(places))])
            notes = f", {plural(noted, 'note')} (-v shows them)" if noted else ""
            screen.write(f"ok    {where}: {plural(number, 'check')} passed{notes}\n")
        for finding in sound:
            if finding.check == SETUP:
                screen.write(f"setup {finding.where}: {escape_controls(finding.what)}\n")


def _is_detail(finding: Finding) -> bool:
    from clusterctl.checks.doctor import OP_DETAIL

    return finding.check == OP_DETAIL or finding.level == "note"


def _alike(counts: Counter[str], findings: Sequence[Finding]) -> dict[tuple[int, int], list[str]]:
    """Return the places grouped by the numbers of passed checks and of notes."""
    notes = Counter(finding.where for finding in findings if finding.level == "note")
    groups: dict[tuple[int, int], list[str]] = {}
    for index in sorted(counts):
        groups.setdefault((counts[index], notes[index]), []).append(index)
    return groups


def _conclude(findings: Sequence[Finding], *, strict: bool) -> None:
    failing = ("bad", "warning") if strict else ("bad",)
    failed = [finding for finding in findings if finding.level in failing]
    if failed:
        raise FindingsError(
            f"{len(failed)} of {plural(len(findings), 'finding')} must be fixed before a run",
            "clusterctl doctor --fix-hints shows how",
        )


def view(findings: Sequence[Finding], *, fix_hints: bool = False) -> RenderableType:
    """Return a table of the findings, each with its remedy; `fix_hints` adds the command that fixes it."""
    from rich.table import Table
    from rich.text import Text

    if not findings:
        return Text("nothing to fix")
    drawn = Table.grid(padding=(0, 2, 0, 0))
    for finding, after in zip(findings, [*findings[1:], None], strict=True):
        level, style = LEVELS[finding.level]
        text = Text(escape_controls(finding.what))
        # A remedy of several findings in a row follows the last one.
        if finding.remedy and (fix_hints or after is None or finding.remedy != after.remedy):
            lead = "" if fix_hints and finding.fix else "try: "
            text.append(f"\n{lead}{escape_controls(screen.pasteable(finding.remedy))}", style="dim")
        if fix_hints and finding.fix:
            text.append(f"\n$ {escape_controls(fix_command(finding))}", style="bold")
        drawn.add_row(Text(f"{level:<4}", style=style), Text(finding.where), text)
    return drawn


def fix_command(finding: Finding) -> str:
    """Return the command that fixes a finding, to be run on this machine."""
    if finding.where in PLACES or finding.fix.startswith("clusterctl "):
        return screen.pasteable(finding.fix)
    start = screen.pasteable(f"clusterctl exec {shlex.quote(finding.where)}")
    return f"{start} -- sh -c {shlex.quote(finding.fix)}"
