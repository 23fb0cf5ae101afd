"""`exec`: run a command on many nodes in parallel."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from clusterctl.cli import options, screen
from clusterctl.cli.options import flag, option
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.settings import load_settings
from clusterctl.text import plural

if TYPE_CHECKING:
    from rich.status import Status

    from clusterctl.exec.answers import Answers, Group
    from clusterctl.exec.command import Command, FileInput, PipeInput, SecretInput
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job
    from clusterctl.transport.connection import Completed
    from clusterctl.transport.fanout import Connections, Outcome

    Work = Callable[[Node, Callable[[str, bytes], None]], Completed]
    """Called with a node, and with what receives its output: "stdout" or "stderr", and bytes."""

# The exit code of shells for a program that they do not find.
NOT_FOUND = 127
# The exit code that shells give for a program ended by SIGPIPE.
OUTPUT_GONE = 141
# Seconds without another failed node after which failed nodes are reported, although the command still runs on others.
QUIET = 2.0
# The same if nodes wait for their turn: a connection may take 10 s to time out, and the next batch as long again.
QUIET_IN_TURNS = 12.0
# Seconds before the number of finished nodes is shown.
PATIENCE = 2.0


@dataclass(frozen=True)
class Form:
    """The options that say how the output is shown; by default, lines as they arrive."""

    fold: bool = flag("Print equal output once, under the names of its nodes.", "--fold", "-b")
    diff: bool = flag("Show only how nodes differ from the most common output.")
    against: str | None = option("Show only how nodes differ from this node.", metavar="NODE")
    out: Path | None = option("Write the output to files instead: NODE.out and NODE.err.", metavar="FOLDER")
    json: options.Json = False
    json_lines: bool = flag(
        "Print one JSON object per line of output and per node that ends, as they arrive."
    )

    def check(self, cluster: Cluster) -> None:
        named = {
            "--fold": self.fold,
            "--diff": self.diff or self.against is not None,
            "--json": self.json,
            "--json-lines": self.json_lines,
            "--out": self.out is not None,
        }
        wanted = [name for name, is_wanted in named.items() if is_wanted]
        if len(wanted) > 1:
            raise UsageError(f"{' and '.join(wanted)} cannot be combined", "choose one of them")
        if self.against is not None and self.against not in cluster.names:
            raise UsageError(f"--against {self.against!r} is not one of the chosen nodes", "name one of them")


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


class Sink(Protocol):
    """The interface that receives the output of the nodes as it arrives."""

    def feed(self, node: str, stream: str, data: bytes) -> None: ...

    def end(self, node: str) -> None: ...

    def ended(self, outcome: Outcome[Completed]) -> None: ...


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
    from clusterctl.exec.command import Command

    if not words[0].strip():
        raise UsageError(
            "the command is empty", "name a program after `--`; is a variable of the shell unset?"
        )
    chosen = options.cluster_of(cluster, selection, exclude)
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
    at_once = len(chosen.nodes) if how.stdin else how.fanout or load_settings().fanout
    with connection.open(chosen, at_once) as connections:
        command = replace(command, code=_pushed_code(job, chosen, connections)) if job else command
        outcomes = _execute(command, chosen, form, connections, how)
    if any(outcome.value and outcome.value.exit_code == NOT_FOUND for outcome in outcomes):
        _explain_not_found(words, how)
    if form.out:
        screen.log(f"{form.out}: the output of {plural(len(chosen.nodes), 'node')}")
    conclude(outcomes)


def _explain_not_found(words: Sequence[str], how: CommandOptions) -> None:
    """Report that a whole line was taken for the name of a program."""
    if len(words) == 1 and len(words[0].split()) > 1 and not how.shell:
        screen.log(
            f"{words[0]!r} was taken for one program; as words: -- {words[0]}; for a line of /bin/sh: --shell"
        )


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


def conclude(outcomes: list[Outcome[Completed]]) -> None:
    """Show which nodes failed and how; exit with the largest code, or 255 if a node is unreachable."""
    from clusterctl.exec import output

    _show_endings(outcomes)
    raise typer.Exit(output.exit_code(outcomes))


def _execute(
    command: Command, chosen: Cluster, form: Form, connections: Connections, how: CommandOptions
) -> list[Outcome[Completed]]:
    """Run the command on every node, without an agent where possible."""
    from clusterctl.exec.command import Everywhere
    from clusterctl.transport.shell import ShellSession

    body = _input(chosen.names) if how.stdin else _password(chosen) if how.sudo else None
    fanout = len(chosen.nodes) if body is not None and body.together else how.fanout or connections.fanout
    with ShellSession(connections.transport) as once:
        # One step of an allocation starts the agents of all nodes; a command without an agent would need one for each.
        by_agents = connections.kept or any(node.allocation for node in chosen.nodes)
        light = None if by_agents else once
        everywhere = Everywhere(command, chosen.nodes, connections, light, body)
        return Execution(chosen, form, fanout).run(everywhere.run)


class Execution:
    """Runs the same work on many nodes and shows its output."""

    def __init__(self, chosen: Cluster, form: Form, fanout: int) -> None:
        from clusterctl.exec import output

        self.chosen, self.form, self.fanout = chosen, form, fanout
        self.answers: Answers | None = None
        if form.out is not None:
            self.sink: Sink = output.Folder(form.out, chosen.names)
        elif form.json_lines:
            self.sink = output.JsonLines(_write)
        elif form == Form():
            self.sink = output.Prefixer(max(map(len, chosen.names)), _write, raw=not sys.stdout.isatty())
        else:
            from clusterctl.exec.answers import Answers

            self.sink = self.answers = Answers(chosen.names)

    def run(self, work: Work) -> list[Outcome[Completed]]:
        """Do the work on every node, then show the collected output."""
        with _patience(len(self.chosen.names), self.form) as count, _output_may_go():
            outcomes = self._on_each(work, count)
            self._show(outcomes)
        if self.answers is not None:
            self.answers.close()
        return outcomes

    def _on_each(self, run: Work, count: Callable[[], None]) -> list[Outcome[Completed]]:
        from clusterctl.transport.fanout import on_each

        def work(node: Node) -> Completed:
            try:
                return run(node, lambda stream, data: self.sink.feed(node.name, stream, data))
            finally:
                self.sink.end(node.name)

        in_turns = self.fanout < len(self.chosen.names)
        failures = _Failures(self.chosen.names, QUIET_IN_TURNS if in_turns else QUIET)

        def report(outcome: Outcome[Completed]) -> None:
            count()
            self.sink.ended(outcome)
            if outcome.error is not None and not (self.form.json or self.form.json_lines):
                failures.add(outcome.node, outcome.error)

        try:
            return on_each(self.chosen.nodes, work, fanout=self.fanout, on_outcome=report)
        finally:
            failures.show()

    def _show(self, outcomes: list[Outcome[Completed]]) -> None:
        if self.answers is None:
            return
        from clusterctl.exec import answers

        if self.form.json:
            screen.show_json([answers.as_json(outcome, self.answers) for outcome in outcomes])
            return
        groups = answers.folded(outcomes, self.answers)
        if self.form.fold:
            _show_folded(groups)
        elif groups:
            _show_differences(groups, self.form.against)


class _Failures:
    """Reports the nodes on which the command did not run: one line for all with the same reason."""

    def __init__(self, names: Sequence[str], quiet: float) -> None:
        """`quiet`: seconds without another failed node after which those so far are reported."""
        self._quiet = quiet
        self._order = {name: index for index, name in enumerate(names)}
        self._waiting: list[tuple[Node, ClusterctlError]] = []
        self._change = threading.Lock()
        self._timer: threading.Timer | None = None
        self._given = set[str]()

    def add(self, node: Node, error: ClusterctlError) -> None:
        """Report a node with the next ones: at the end of the command, or when no more nodes fail for a while."""
        with self._change:
            self._waiting.append((node, error))
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(self._quiet, self.show)
            self._timer.daemon = True
            self._timer.start()

    def show(self) -> None:
        """Report all nodes that were added since the last call."""
        from clusterctl.cli.screen import report_error
        from clusterctl.transport.failures import fold_failures

        with self._change:
            if self._timer is not None:
                self._timer.cancel()
            failures, self._waiting = self._waiting, []
            failures.sort(key=lambda failure: self._order[failure[0].name])
            for error in fold_failures(failures):
                report_error(error, self._given)


def _foresee(command: Command, chosen: Cluster, as_json: bool) -> None:
    """Show the command of each node; nodes with the same command share an entry."""
    from clusterctl.inventory import nodeset
    from clusterctl.text import escape_controls

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
    from clusterctl.exec.command import broadcast

    try:
        return broadcast(sys.stdin.fileno(), nodes)
    except (AttributeError, ValueError):
        raise UsageError("--stdin: there is no standard input", "use `< FILE` or a pipe") from None


def _password(chosen: Cluster) -> SecretInput:
    """Ask for the password of sudo; without a terminal there is none, and sudo may not ask for one."""
    from clusterctl.exec.command import SecretInput
    from clusterctl.inventory import nodeset

    typed = screen.ask_secret(f"password of sudo on {nodeset.fold(chosen.names)}: ")
    return SecretInput((typed or "").encode() + b"\n")


def _write(stream: str, data: bytes) -> None:
    target = sys.stderr if stream == "stderr" else sys.stdout
    target.buffer.write(data)
    target.buffer.flush()


@contextmanager
def _output_may_go() -> Iterator[None]:
    """End the command without an error if the reader of its output exits, as `head` does."""
    try:
        yield
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # Flushing the rest of the buffer must not fail again.
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise typer.Exit(OUTPUT_GONE) from None


@contextmanager
def _patience(total: int, form: Form) -> Iterator[Callable[[], None]]:
    """Show how many nodes are done while there is no other output, and the effect of Ctrl-C."""
    waiting = _Waiting(total)
    if form not in (Form(), Form(json_lines=True)) and sys.stderr.isatty():
        waiting.start()
    try:
        yield waiting.count
    except KeyboardInterrupt:
        screen.log("stopping the command on the nodes; press Ctrl-C again to leave without waiting")
        raise
    finally:
        waiting.stop()


class _Waiting:
    """Shows `12 of 64 nodes are done` after a short time."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._status: Status | None = None
        self._starter = threading.Timer(PATIENCE, self._show)
        self._starter.daemon = True

    def start(self) -> None:
        self._starter.start()

    def stop(self) -> None:
        self._starter.cancel()
        if self._status is not None:
            self._status.stop()

    def count(self) -> None:
        self._done += 1
        if self._status is not None:
            self._status.update(self._words())

    def _show(self) -> None:
        self._status = screen.error_console().status(self._words())
        self._status.start()

    def _words(self) -> str:
        return f"{self._done} of {self._total} nodes are done"


def _show_folded(groups: list[Group]) -> None:
    from clusterctl.exec import output

    for group in groups:
        rule = "-" * 15
        _write("stdout", f"{rule}\n{group.header()}\n{rule}\n".encode())
        for stream, chunk in group.output.items():
            for piece in chunk.pieces():
                _write(stream, output.shown(piece) + b"\n")


def _show_differences(groups: list[Group], against: str | None) -> None:
    from clusterctl.exec import answers

    if len(groups) == 1:
        screen.log(f"{groups[0].header()}: the output is the same")
    for line in answers.differences(groups, against):
        _write("stdout", line.encode())


def _show_endings(outcomes: list[Outcome[Completed]]) -> None:
    """Show one line for all nodes whose command failed in the same way."""
    from clusterctl.exec import output
    from clusterctl.inventory import nodeset

    endings: dict[str, list[str]] = {}
    for outcome in outcomes:
        how = output.ending(outcome.value) if outcome.value is not None else ""
        if how:
            endings.setdefault(how, []).append(outcome.node.name)
    for how, names in endings.items():
        screen.log(f"{nodeset.fold(names)}: {how}", style="yellow")
