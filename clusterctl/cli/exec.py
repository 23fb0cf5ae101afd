"""`exec`: a command on many nodes at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options, screen

if TYPE_CHECKING:
    from clusterctl.inventory import Node
    from clusterctl.transport import Completed, Connection, Connections, Outcome


def exec_(
    selection: Annotated[
        str, typer.Argument(metavar="SET", help="The nodes: node[1-4], node1,node3, @group, all.")
    ],
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="The command, after `--`; never through a shell.")
    ],
    cluster: options.ClusterFile = None,
    exclude: options.Exclude = None,
    fold: Annotated[
        bool, typer.Option("--fold", "-b", help="Equal output once, with the nodes that said it above.")
    ] = False,
    shell: Annotated[
        bool, typer.Option("--shell", help="Give CMD as one line to each node's /bin/sh.")
    ] = False,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Send this command's standard input to every node.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.01, metavar="SECONDS", help="End the command after that long."),
    ] = None,
    fanout: Annotated[int | None, typer.Option("--fanout", min=1, help="Nodes at once.")] = None,
    accept_new: options.AcceptNew = False,
    persist: options.Persist = None,
    as_json: options.Json = False,
) -> None:
    """Run a command on many nodes in parallel; the exit code is the largest of theirs, 255 where one is
    unreachable."""
    from clusterctl import output

    chosen = options.cluster_of(cluster, selection, exclude)
    argv = ["/bin/sh", "-c", " ".join(command)] if shell else list(command)
    body = sys.stdin.buffer.read() if stdin else None
    collected = fold or as_json
    printer = output.Prefixer(max(map(len, chosen.names)), _write)

    def work(node: Node, link: Connection) -> Completed:
        on_output = None if collected else lambda stream, data: printer.feed(node.name, stream, data)
        try:
            return link.run(argv, env=node.env, stdin=body, timeout=timeout, on_output=on_output)
        finally:
            printer.end(node.name)

    with options.connected(chosen, accept_new, persist) as connections:
        outcomes = _run(connections, chosen.nodes, work, fanout, tell=not as_json)
    if as_json:
        screen.show_json([_as_json(one) for one in outcomes])
    elif fold:
        _show_folded(outcomes)
    _show_endings(outcomes)
    raise typer.Exit(output.exit_code(outcomes))


def _run(
    connections: Connections,
    nodes: Sequence[Node],
    work: Callable[[Node, Connection], Completed],
    fanout: int | None,
    tell: bool,
) -> list[Outcome[Completed]]:
    """The command everywhere; a node that can't be asked says so at once, not after the slowest one."""
    from clusterctl.cli.door import tell as tell_error

    def report(outcome: Outcome[Completed]) -> None:
        if outcome.error is not None and tell:
            tell_error(outcome.error)

    return connections.on_each(nodes, work, fanout=fanout, on_outcome=report)


def _write(stream: str, text: str) -> None:
    target = sys.stderr if stream == "stderr" else sys.stdout
    target.write(text)
    target.flush()


def _show_folded(outcomes: Sequence[Outcome[Completed]]) -> None:
    from clusterctl import nodeset, output

    for names, completed in output.folded(outcomes):
        rule = "-" * 15
        screen.write(f"{rule}\n{nodeset.fold(names)} ({len(names)})\n{rule}\n")
        for stream, data in (("stdout", completed.stdout), ("stderr", completed.stderr)):
            if data:
                _write(stream, output.printable(data) + "\n")


def _show_endings(outcomes: Sequence[Outcome[Completed]]) -> None:
    """One line for all nodes whose command ended badly in the same way."""
    from clusterctl import nodeset, output

    endings: dict[str, list[str]] = {}
    for outcome in outcomes:
        how = output.ending(outcome.value) if outcome.value is not None else ""
        if how:
            endings.setdefault(how, []).append(outcome.node.name)
    for how, names in endings.items():
        screen.say(f"{nodeset.fold(names)}: {how}", style="yellow")


def _as_json(outcome: Outcome[Completed]) -> dict[str, object]:
    done = outcome.value
    if done is None:
        return {"node": outcome.node.name, "error": str(outcome.error), "kind": type(outcome.error).__name__}
    return {
        "node": outcome.node.name,
        "exit_code": done.exit_code,
        "signal": done.signal,
        "timed_out": done.timed_out,
        "stdout": done.stdout.decode("utf-8", "backslashreplace"),
        "stderr": done.stderr.decode("utf-8", "backslashreplace"),
    }
