"""`doctor`: every check a finding with its remedy; exit 1 when something is bad."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.errors import Found

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clusterctl.finding import Finding

# In this order, so that what matters most stands where the eye is.
LEVELS = {
    "ok": ("ok", "green"),
    "note": ("note", "dim"),
    "warning": ("warn", "yellow"),
    "bad": ("bad", "bold red"),
}
# Of a finding, besides nodes.
PLACES = ("here", "all nodes")

Port = Annotated[
    int,
    typer.Option(
        "--master-port", min=0, max=65535, help="The port to try; 0 is any free one, as launch takes."
    ),
]


def doctor(
    cluster: options.ClusterFile = None,
    nodes: options.Nodes = None,
    exclude: options.Exclude = None,
    master_port: Port = 0,
    fix_hints: Annotated[
        bool, typer.Option("--fix-hints", help="Only what should be mended, with the command lines for it.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="A warning is enough for exit code 1.")] = False,
    accept_new: options.AcceptNew = False,
    as_json: options.Json = False,
) -> None:
    """Whether this machine and the nodes are fit for a run; changes nothing."""
    from concurrent.futures import ThreadPoolExecutor

    from clusterctl.checks import doctor as checks_doctor
    from clusterctl.checks.doctor import folded

    chosen = (
        options.cluster_of(cluster, nodes, exclude) if cluster or nodes or options.inventory_there() else None
    )
    # To load torch takes seconds, and so does a node that is gone.
    with ThreadPoolExecutor(1) as beside:
        here, there = beside.submit(checks_doctor.here), []
        if chosen is not None:
            with options.connected(chosen, accept_new) as connections:
                there = checks_doctor.nodes(chosen, connections, master_port)
    if chosen is None:
        text, remedy = "no cluster.yaml in this folder: no node was asked", "clusterctl init, or -c FILE"
        there = [checks_doctor.Finding("warning", "here", text, remedy, "inventory")]
    findings = [*here.result(), *there]
    if as_json:
        screen.show_json([asdict(one) for one in findings])
    else:
        shown = folded([one for one in findings if not (fix_hints and one.is_sound)])
        screen.show(view(sorted(shown, key=lambda one: list(LEVELS).index(one.level)), fix_hints))
    _conclude(findings, strict)


def _conclude(findings: Sequence[Finding], strict: bool) -> None:
    bad = [one for one in findings if one.level == "bad"]
    odd = [one for one in findings if one.level == "warning"] if strict else []
    if bad or odd:
        what = f"{len(bad) + len(odd)} of {len(findings)} findings"
        raise Found(f"{what} must be mended before a run", "clusterctl doctor --fix-hints says how")


def view(findings: Sequence[Finding], fix_hints: bool = False) -> RenderableType:
    """Each finding on a line, its remedy below it; with hints the command line too."""
    from rich.table import Table
    from rich.text import Text

    from clusterctl.text import escape_controls

    if not findings:
        return Text("nothing to mend")
    drawn = Table.grid(padding=(0, 2, 0, 0))
    for one in findings:
        word, style = LEVELS[one.level]
        said = Text(escape_controls(one.what))
        if one.remedy:
            lead = "" if fix_hints and one.fix else "try: "
            said.append(f"\n{lead}{escape_controls(one.remedy)}", style="dim")
        if fix_hints and one.fix:
            said.append(f"\n$ {escape_controls(typed(one))}", style="bold")
        drawn.add_row(Text(f"{word:<4}", style=style), Text(one.where), said)
    return drawn


def typed(finding: Finding) -> str:
    """A finding's command line, to be typed here."""
    if finding.where in PLACES or finding.fix.startswith("clusterctl "):
        return finding.fix
    return f"clusterctl exec {shlex.quote(finding.where)} -- sh -c {shlex.quote(finding.fix)}"
