"""`fab`: a fabric task on many nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import argument, flag
from clusterctl.cli.nodes.execution import Execution, Form, conclude
from clusterctl.errors import UsageError
from clusterctl.settings import load_settings

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.ssh.choose import SshChoice


def fab(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A fabfile: Python with fabric's @task functions.")
    ],
    words: list[str] | None = argument(
        "The task, and its own options after `--`.", metavar="TASK [-- OPTION...]"
    ),
    *,
    selection: options.NodeOptions,
    form: Form,
    fanout: options.Fanout = None,
    accept_new: options.AcceptNew = False,
    connect_timeout: options.ConnectTimeout = None,
    list_tasks: bool = flag("List the tasks of the file.", "--list", "-l"),
    dry_run: options.DryRun = False,
) -> None:
    """Run a fabric task on nodes, each over a login whose host key was checked. The file runs on this machine with your
    rights, in one thread per node. The exit code is the largest one of the nodes, or 255 if a node is unreachable."""
    from clusterctl.ssh.fabfiles import TaskRunner, load_fabfile

    fabfile = load_fabfile(file)
    if list_tasks:
        return _show_tasks(fabfile.tasks, form.json)
    if not words:
        raise UsageError(f"{file}: no task is named", f"its tasks: {', '.join(fabfile.tasks) or 'none'}")
    chosen = selection.chosen()
    form.check(chosen)
    calls = fabfile.calls(words)
    choice = choice_of(chosen, accept_new, connect_timeout)
    if dry_run:
        rows = [{"node": node.name, "tasks": [call.task.name for call in calls]} for node in chosen.nodes]
        return (
            screen.show_json(rows)
            if form.json
            else screen.write("".join(f"{row['node']}: {' '.join(row['tasks'])}\n" for row in rows))
        )
    runner = TaskRunner(choice, calls)
    execution = Execution(chosen, form, fanout or load_settings().fanout)
    with runner.printing():
        outcomes = execution.run(runner.run)
    raise typer.Exit(conclude(outcomes))


def choice_of(chosen: Cluster, accept_new: bool, connect_timeout: float | None) -> SshChoice:
    """Return the SSH connections to the chosen nodes for fabric; refuse nodes that fabric cannot reach."""
    from clusterctl.ssh.choose import choice_for

    settings = load_settings()
    choice = choice_for(
        chosen,
        choices.ssh(),
        accept_new=accept_new or settings.accept_new_host_keys,
        connect_timeout=connect_timeout or settings.connect_timeout,
        ask=screen.ask_secret,
    )
    choices.warn_without_ssh(chosen)
    choice.require_paramiko(chosen.nodes)
    return choice


def _show_tasks(tasks: dict[str, str], as_json: bool) -> None:
    if as_json:
        return screen.show_json(tasks)
    from clusterctl.cli.views import tables

    screen.show(tables.table(["TASK", "WHAT IT DOES"], [[name, text] for name, text in tasks.items()]))
