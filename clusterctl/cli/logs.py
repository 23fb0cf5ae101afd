"""`logs tail | show`: what the ranks wrote."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.logs import LogFilter, LogLine
    from clusterctl.rundir import RunDir

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What the ranks wrote: tail, show.")

Rank = Annotated[
    str | None,
    typer.Option(
        "--rank",
        "-r",
        metavar="RANKS",
        help="Only these ranks: 0,8-15. By default rank 0, and every rank's errors.",
    ),
]
Node = Annotated[str | None, typer.Option("--node", "-n", metavar="SET", help="Only these nodes' ranks.")]
Grep = Annotated[str | None, typer.Option("--grep", "-g", metavar="REGEX", help="Only lines that match.")]
Errors = Annotated[bool, typer.Option("--errors", help="Only lines that look like trouble.")]
NoPrefix = Annotated[bool, typer.Option("--no-prefix", help="Without node:rank in front.")]


@app.command()
def tail(
    run: options.RunName = "last",
    rank: Rank = None,
    node: Node = None,
    grep: Grep = None,
    errors: Errors = False,
    lines: Annotated[int, typer.Option("--lines", "-l", min=0, help="How many lines back to begin.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    no_prefix: NoPrefix = False,
    as_json: options.Json = False,
) -> None:
    """The end of a run's logs; with -f on and on."""
    from clusterctl.run import FINAL

    found, wanted = options.run_named(run), _filter(run, rank, node, grep, errors)
    bring_home(found)
    last = deque(_kept(found, wanted), maxlen=lines)
    _print(last, no_prefix, as_json)
    if follow and found.read_state().get("phase") not in FINAL:
        _print(_coming(found, wanted), no_prefix, as_json)


@app.command()
def show(
    run: options.RunName = "last",
    rank: Rank = None,
    node: Node = None,
    grep: Grep = None,
    errors: Errors = False,
    no_prefix: NoPrefix = False,
    as_json: options.Json = False,
) -> None:
    """A run's logs from the beginning, rank by rank."""
    found, wanted = options.run_named(run), _filter(run, rank, node, grep, errors)
    bring_home(found)
    _print(_kept(found, wanted), no_prefix, as_json)


def bring_home(run: RunDir) -> None:
    """What lies on the nodes and not here yet, unless the run ended and is here whole."""
    from clusterctl import run as runs
    from clusterctl.watch import Watch, open_watch

    if run.read_state().get("phase") in runs.FINAL:
        return
    with (
        options.connected_to(run) as connections,
        open_watch(run, connections, now=True) as watch,
    ):
        if isinstance(watch, Watch):
            for update in watch:
                if update.note:
                    screen.say(update.note, "yellow")


def _kept(run: RunDir, wanted: LogFilter) -> Iterable[LogLine]:
    from clusterctl.logs import kept_lines

    return kept_lines(run, wanted, run.read_record()["attempt"])


def _coming(run: RunDir, wanted: LogFilter) -> Iterable[LogLine]:
    from clusterctl import run as runs
    from clusterctl.watch import Watch, open_watch

    with options.connected_to(run) as connections, open_watch(run, connections) as watch:
        for update in watch:
            if update.line and wanted.wants(update.line):
                yield update.line
        if isinstance(watch, Watch):
            runs.finish(run, connections)


def _filter(run: str, rank: str | None, node: str | None, grep: str | None, errors: bool) -> LogFilter:
    from clusterctl.logs import LogFilter, parse_ranks
    from clusterctl.record import cluster_of

    try:
        pattern = re.compile(grep) if grep else None
    except re.error as error:
        raise UsageError(
            f"--grep {grep}: {error}", "a regular expression; put \\ before ( [ . * + ?"
        ) from None
    nodes = frozenset(cluster_of(options.run_named(run)).select(node).names) if node else None
    return LogFilter(parse_ranks(rank) if rank else None, nodes, pattern, errors)


def _print(lines: Iterable[LogLine], no_prefix: bool, as_json: bool) -> None:
    from clusterctl.views import log_line

    for line in lines:
        if as_json:
            screen.show_json_line(
                {"node": line.node, "rank": line.rank, "stream": line.stream, "text": line.text}
            )
        else:
            screen.out_console().print(log_line(line, prefix=not no_prefix), soft_wrap=True)
