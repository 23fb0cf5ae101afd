"""`plan`: show what a job would start, and what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from clusterctl.cli import options, screen
from clusterctl.cli.declared import flag, option
from clusterctl.cli.launch.job_request import JobRequest
from clusterctl.errors import FindingsError, UsageError
from clusterctl.text import escape_controls, plural, size

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.job import Job
    from clusterctl.wire.train_summary import TrainSummary

# Limit of files that a dry run names.
MOST_SHOWN = 5


def plan(
    request: JobRequest,
    *,
    what_if: str | None = option(
        "Plan for imaginary nodes that are like the first node of the inventory.",
        metavar="nodes=N[,devices=N,kind=K]",
    ),
    rehearse: bool = flag(
        "Build one rank of the layout on this machine and run a step, with tensors that take no memory."
    ),
    as_json: options.Json = False,
) -> None:
    """Show what a job would start on which node, the memory it needs and about how long it takes. Lists every error.
    Contacts no node. Exits with 1 if a training does not fit its devices."""
    from clusterctl.jobs import what_if as what_ifs

    imagined = what_ifs.read(what_if) if what_if is not None else None
    request = request.with_what_if(imagined) if imagined else request
    choice = request.choice(imagined)
    job = request.job(choice)
    summary = show_plan(choice.of(job)[0], job, as_json=as_json, rehearse=rehearse)
    if summary is not None and summary.fits is False:
        raise FindingsError(
            "the training does not fit its devices",
            "try parallel: auto, recompute: full, a higher zero, or a smaller micro_batch",
        )


def show_plan(
    cluster: Cluster, job: Job, *, as_json: bool = False, argv: bool = False, rehearse: bool = False
) -> TrainSummary | None:
    """Print the plan and return the trainer's summary (None for a command)."""
    from clusterctl.cli.views import layout, tables
    from clusterctl.jobs import job_check, what_if
    from clusterctl.jobs import plan as plans
    from clusterctl.wire.typed_json import encode

    summary = job_check.check(job, cluster)
    made = plans.make_plan(cluster, job)
    if rehearse and job.train is None:
        raise UsageError(
            "--rehearse is only for a training", f"leave it out: {job.source} runs its own command"
        )
    rehearsal = job_check.rehearse(job, cluster) if rehearse else None
    if as_json:
        answer = encode(summary) if summary else {}
        if rehearsal:
            answer["rehearsed"] = encode(rehearsal)
        screen.show_json({**made.as_json(), "summary": answer})
    else:
        nodes = [] if cluster.source == what_if.SOURCE else [tables.plan_table(made)]
        verdict = layout.verdict(summary) if summary else ""
        if summary and verdict:
            screen.show(verdict if summary.fits else f"[bold red]{verdict}[/]")
        training = layout.training(summary, rehearsal) if summary else ()
        screen.show(tables.plan_facts(made, summary), *training, *nodes)
        if argv:
            screen.show(tables.commands_table(made))
            show_pushes(job, len(made.nodes))
        for note in (*_assumptions(cluster), *(layout.notes(summary) if summary else ())):
            screen.log(f"note: {note}", "yellow")
    return summary


def _assumptions(cluster: Cluster) -> Iterator[str]:
    """Yield what the plan takes for granted about nodes that a start would ask."""
    from clusterctl.inventory import nodeset

    if unnamed := [node.name for node in cluster.nodes if node.is_asked]:
        subject = f"{cluster.source} does not name the devices of {nodeset.fold(unnamed)}"
        yield f"{subject}: planned for CPUs; `launch` asks the nodes"


def show_pushes(job: Job, nodes: int) -> None:
    """Print which folders the start would push, and how large they are."""
    from clusterctl.runs.prepare.stage import pushes

    for name, root, manifest in pushes(job, options.runs_folder()):
        files = f"{plural(len(manifest.files), 'file')}, {size(manifest.size)}"
        where = f"to {plural(nodes, 'node')}, unless they have it"
        screen.write(f"pushes {name} {escape_controls(str(root))} ({files}) {where}\n")
        largest = sorted(manifest.files, key=lambda file: -file.size)[:MOST_SHOWN]
        if len(manifest.files) > MOST_SHOWN:
            names = ", ".join(f"{escape_controls(file.path)} ({size(file.size)})" for file in largest)
            screen.write(f"       largest: {names}\n")
        for warning in manifest.warnings:
            screen.log(f"warning: {warning}", "yellow")


def schema() -> None:
    """Print the JSON schema of job files, for editors that complete and check YAML. Save it with
    `clusterctl schema > job.schema.json` and write `# yaml-language-server: $schema=job.schema.json` as the first line
    of the job file."""
    from clusterctl.jobs.job_check import job_schema

    screen.show_json(job_schema())
