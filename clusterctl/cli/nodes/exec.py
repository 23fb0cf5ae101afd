"""`exec`: run a command on many nodes in parallel."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import flag, option
from clusterctl.cli.nodes.execution import Form, run_command
from clusterctl.errors import UsageError
from clusterctl.exec.command import Command, FileInput, PipeInput, SecretInput, broadcast
from clusterctl.inventory import nodeset
from clusterctl.settings import load_settings
from clusterctl.text import escape_controls
from clusterctl.transport.completed import Completed
from clusterctl.transport.fanout import Connections

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job

    Work = Callable[[Node, Callable[[str, bytes], None]], Completed]
    """Called with a node, and with what receives its output: "stdout" or "stderr", and bytes."""


@dataclass(frozen=True)
class CommandOptions:
    """The options that say how the command runs on each node."""

    shell: bool = flag("Run CMD as one line of /bin/sh on each node.")
    literal: bool = flag("Do not replace {node}, {n}, {address}.")
    sudo: bool = flag("Run CMD as root by sudo; on a terminal, its password is asked once.")
    setup: bool = flag("Run CMD in the environment of each node's `setup`.")
    job: Path | None = option(
        "Like --setup, with the `setup` of this job file after the node's.",
        metavar="JOB",
        autocompletion=options.complete_jobs,
    )
    stdin: bool = flag("Send the standard input of this command to every node.")
    timeout: float | None = option(
        "Stop the command after this many seconds.", "--timeout", "-u", min=0.01, metavar="SECONDS"
    )
    fanout: options.Fanout = None

    def check(self, cluster: Cluster) -> None:
        """Raise a UsageError for options that cannot be used together, or on these nodes."""
        if self.sudo and self.stdin:
            raise UsageError("--sudo and --stdin cannot be combined", "push the input to a file first")
        if self.setup and not self.job and not any(node.setup for node in cluster.nodes):
            raise UsageError(
                f"--setup: no chosen node has a `setup` in {cluster.source}",
                "setup: /path/to/set_env.sh there, or --job JOB for the setup of a job",
            )


def exec_(
    selection: Annotated[
        str,
        typer.Argument(
            metavar="SET",
            help="The nodes: node[1-4], node1,node3, @group, all. Also as -n SET or -w SET.",
            autocompletion=options.complete_nodes,
        ),
    ],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="-- CMD...",
            help="The command, after `--`; no shell interprets it. {node}, {n} (the index, from 0) and {address} are "
            "replaced for each node; write {{node}} for a literal {node}.",
        ),
    ],
    *,
    cluster: options.ClusterFile = None,
    exclude: options.Exclude = None,
    form: Form,
    how: CommandOptions,
    connection: options.ConnectionOptions,
    dry_run: options.DryRun = False,
) -> None:
    """Run a command on many nodes in parallel. The exit code is the largest one of the nodes, or 255 if a node is
    unreachable."""
    if not words[0].strip():
        raise UsageError(
            "the command is empty", "name a program after `--`; is a variable of the shell unset?"
        )
    chosen = choices.cluster_of(cluster, selection, exclude)
    form.check(chosen)
    how.check(chosen)
    job = _job_with_setup(how.job) if how.job else None
    has_setup = how.setup or job is not None
    command = Command(
        tuple(words),
        how.shell,
        how.literal,
        how.timeout,
        has_setup,
        job.setup if job else None,
        sudo=how.sudo,
    )
    if dry_run:
        _foresee(command, chosen, form.json or form.json_lines)
        return
    body = _input(chosen.names) if how.stdin else _password(chosen) if how.sudo else None
    at_once = len(chosen.nodes) if how.stdin else how.fanout or load_settings().fanout
    with connection.open(chosen, at_once) as connections:
        command = replace(command, code=_pushed_code(job, chosen, connections)) if job else command
        code = run_command(command, chosen, form, connections, how.fanout, body)
    raise typer.Exit(code)


def _job_with_setup(path: Path) -> Job:
    """Return the job of a file; raise a UsageError if it has no setup."""
    from clusterctl.jobs import job as jobs

    job = jobs.load(path)
    if job.setup is None:
        raise UsageError(
            f"--job {path}: this job has no `setup`", "leave out --job, or add setup: {...} to it"
        )
    return job


def _pushed_code(job: Job, chosen: Cluster, connections: Connections) -> dict[str, str]:
    """Push the code of a job if its setup may read it; return its folder by node."""
    from clusterctl.checks.job_setup import JobSetup
    from clusterctl.runs.prepare.stage import code_hash, push_code

    assert job.setup is not None
    runs = options.runs_folder()
    if not JobSetup(job.setup, code_hash(job, runs)).needs_code:
        return {}
    return push_code(chosen, job, connections, lambda phase, text: None, runs)


def _foresee(command: Command, chosen: Cluster, as_json: bool) -> None:
    """Show the command of each node; nodes with the same command share an entry."""
    rows = [(node, command.on(node, index)) for index, node in enumerate(chosen.nodes)]
    if as_json:
        screen.show_json([{"node": node.name, "argv": argv, "env": sorted(node.env)} for node, argv in rows])
        return
    alike: dict[str, list[str]] = {}
    for node, argv in rows:
        alike.setdefault(shlex.join(argv), []).append(node.name)
    for line, names in alike.items():
        screen.write(f"{nodeset.fold(names)}: {escape_controls(line)}\n")


def _input(nodes: Sequence[str]) -> FileInput | PipeInput:
    try:
        return broadcast(sys.stdin.fileno(), nodes)
    except (AttributeError, ValueError):
        raise UsageError("--stdin: there is no standard input", "use `< FILE` or a pipe") from None


def _password(chosen: Cluster) -> SecretInput:
    """Ask for the password of sudo; without a terminal there is none, and sudo may not ask for one."""
    typed = screen.ask_secret(f"password of sudo on {nodeset.fold(chosen.names)}: ")
    return SecretInput((typed or "").encode() + b"\n")
