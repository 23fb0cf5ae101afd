"""`doctor`: check this machine and the nodes; each problem comes with a remedy."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.errors import Found
from clusterctl.text import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clusterctl.finding import Finding

# Sorted so that the worst findings come last, next to the prompt.
LEVELS = {
    "ok": ("ok", "green"),
    "note": ("note", "dim"),
    "warning": ("warn", "yellow"),
    "bad": ("bad", "bold red"),
}
# Values of `where` in a finding that are not node names.
PLACES = ("here", "all nodes")

Port = Annotated[
    int,
    typer.Option(
        "--master-port",
        min=0,
        max=65535,
        metavar="PORT",
        help="Check that ranks can connect to this port. 0: any free port, as `launch` uses.",
    ),
]


def doctor(
    selection: options.NodeOptions,
    *,
    master_port: Port = 0,
    fix_hints: Annotated[
        bool, typer.Option("--fix-hints", help="Show only problems, with commands that fix them.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    accept_new: options.AcceptNew = False,
    as_json: options.Json = False,
) -> None:
    """Check whether this machine and the nodes are ready for a run. Changes nothing; exits with 1 if a check fails."""
    from concurrent.futures import ThreadPoolExecutor

    from clusterctl.checks import doctor as checks_doctor
    from clusterctl.checks.doctor import folded

    named = selection.cluster or selection.nodes
    chosen = selection.chosen() if named or options.has_inventory() else None
    # Loading torch takes seconds, and so does an unreachable node: do both at the same time.
    with ThreadPoolExecutor(1) as background:
        here, nodes_findings = background.submit(checks_doctor.here), []
        if chosen is not None:
            with options.connected(chosen, accept_new) as connections:
                nodes_findings = checks_doctor.nodes(chosen, connections, master_port)
    if chosen is None:
        text, remedy = "no cluster.yaml in this folder: no node was checked", "clusterctl init, or -c FILE"
        nodes_findings = [checks_doctor.Finding("warning", "here", text, remedy, "inventory")]
    findings = [*here.result(), *nodes_findings]
    if as_json:
        screen.show_json([asdict(finding) for finding in findings])
    else:
        shown = folded([finding for finding in findings if not (fix_hints and finding.is_sound)])
        screen.show(
            view(sorted(shown, key=lambda finding: list(LEVELS).index(finding.level)), fix_hints=fix_hints)
        )
    _conclude(findings, strict=strict)


def _conclude(findings: Sequence[Finding], *, strict: bool) -> None:
    failing = ("bad", "warning") if strict else ("bad",)
    failed = [finding for finding in findings if finding.level in failing]
    if failed:
        raise Found(
            f"{len(failed)} of {plural(len(findings), 'finding')} must be fixed before a run",
            "clusterctl doctor --fix-hints shows how",
        )


def view(findings: Sequence[Finding], *, fix_hints: bool = False) -> RenderableType:
    """Return a table of the findings, each with its remedy; `fix_hints` adds the command that fixes it."""
    from rich.table import Table
    from rich.text import Text

    from clusterctl.text import escape_controls

    if not findings:
        return Text("nothing to fix")
    drawn = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        level, style = LEVELS[finding.level]
        text = Text(escape_controls(finding.what))
        if finding.remedy:
            lead = "" if fix_hints and finding.fix else "try: "
            text.append(f"\n{lead}{escape_controls(finding.remedy)}", style="dim")
        if fix_hints and finding.fix:
            text.append(f"\n$ {escape_controls(fix_command(finding))}", style="bold")
        drawn.add_row(Text(f"{level:<4}", style=style), Text(finding.where), text)
    return drawn


def fix_command(finding: Finding) -> str:
    """Return the command that fixes a finding, to be run on this machine."""
    if finding.where in PLACES or finding.fix.startswith("clusterctl "):
        return finding.fix
    return f"clusterctl exec {shlex.quote(finding.where)} -- sh -c {shlex.quote(finding.fix)}"
