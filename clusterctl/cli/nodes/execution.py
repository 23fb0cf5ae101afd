"""Run one command on many nodes, and show its output and how it ended in the form that the user chose."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from clusterctl.cli import screen
from clusterctl.cli.declared import flag, option
from clusterctl.cli.screen import report_error
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.exec import output
from clusterctl.exec.command import Command, Everywhere, FileInput, PipeInput, SecretInput
from clusterctl.inventory import nodeset
from clusterctl.text import plural
from clusterctl.transport.completed import Completed
from clusterctl.transport.failures import fold_failures
from clusterctl.transport.fanout import Connections, Outcome, on_each
from clusterctl.transport.shell import ShellSession

if TYPE_CHECKING:
    from rich.status import Status

    from clusterctl.exec.answers import Answers, Group
    from clusterctl.inventory.cluster import Cluster, Node

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
    json: bool = flag("Print one JSON document.")
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


class Sink(Protocol):
    """The interface that receives the output of the nodes as it arrives."""

    def feed(self, node: str, stream: str, data: bytes) -> None: ...

    def end(self, node: str) -> None: ...

    def ended(self, outcome: Outcome[Completed]) -> None: ...


def run_command(
    command: Command,
    chosen: Cluster,
    form: Form,
    connections: Connections,
    fanout: int | None = None,
    body: FileInput | PipeInput | SecretInput | None = None,
) -> int:
    """Run a command on every node, without an agent where possible; return the exit code for all."""
    most = len(chosen.nodes) if body is not None and body.together else fanout or connections.fanout
    with ShellSession(connections.transport) as once:
        # One step of an allocation starts the agents of all nodes; a command without an agent would need one for each.
        by_agents = connections.kept or any(node.allocation for node in chosen.nodes)
        everywhere = Everywhere(command, chosen.nodes, connections, None if by_agents else once, body)
        outcomes = Execution(chosen, form, most).run(everywhere.run)
    if any(outcome.value and outcome.value.exit_code == NOT_FOUND for outcome in outcomes):
        _explain_not_found(command)
    if form.out:
        screen.log(f"{form.out}: the output of {plural(len(chosen.nodes), 'node')}")
    return conclude(outcomes)


def _explain_not_found(command: Command) -> None:
    """Report that a whole line was taken for the name of a program."""
    line = command.words[0]
    if len(command.words) == 1 and len(line.split()) > 1 and not command.shell:
        screen.log(f"{line!r} was taken for one program; as words: -- {line}; for a line of /bin/sh: --shell")


def conclude(outcomes: list[Outcome[Completed]]) -> int:
    """Show which nodes failed and how; return the largest exit code, or 255 if a node is unreachable."""

    _show_endings(outcomes)
    return output.exit_code(outcomes)


class Execution:
    """Runs the same work on many nodes and shows its output."""

    def __init__(self, chosen: Cluster, form: Form, fanout: int) -> None:

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
        with self._change:
            if self._timer is not None:
                self._timer.cancel()
            failures, self._waiting = self._waiting, []
            failures.sort(key=lambda failure: self._order[failure[0].name])
            for error in fold_failures(failures):
                report_error(error, self._given)


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
        sys.exit(OUTPUT_GONE)


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
    endings: dict[str, list[str]] = {}
    for outcome in outcomes:
        how = output.ending(outcome.value) if outcome.value is not None else ""
        if how:
            endings.setdefault(how, []).append(outcome.node.name)
    for how, names in endings.items():
        screen.log(f"{nodeset.fold(names)}: {how}", style="yellow")
