"""`logs tail`, `logs show` and `logs pull`: the output of the ranks."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import argument, flag, option
from clusterctl.errors import UsageError
from clusterctl.text import plural

if TYPE_CHECKING:
    from clusterctl.cli.views.log_printer import LogPrinter
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.logs.select import LogFilter
    from clusterctl.logs.times import Span


@dataclass(frozen=True)
class LogOptions:
    """The options of `logs tail` and `logs show` that choose lines and their form."""

    run: options.RunName = "last"
    rank: str | None = option(
        "Show only these ranks: 0,8-15. Default: rank 0, and the errors of every rank.",
        "--rank",
        "-r",
        metavar="RANKS",
    )
    node: str | None = option("Show only the ranks on these nodes.", metavar="SET")
    grep: str | None = option("Show only lines that match.", "--grep", "-g", metavar="REGEX")
    exclude: str | None = option("Hide lines that match.", metavar="REGEX")
    since: str | None = option(
        "Show only lines since this time: 10m (ago), 14:30, '2026-01-31 14:30'.", metavar="TIME"
    )
    until: str | None = option("Show only lines up to this time, as for --since.", metavar="TIME")
    before: int = option("With --grep: show N lines of the rank before.", "-B", default=0, min=0, metavar="N")
    after: int = option("With --grep: show N lines of the rank after.", "-A", default=0, min=0, metavar="N")
    timestamps: bool = flag("Begin each line with the time when it was written.", "--timestamps", "-t")
    errors: bool = flag("Show only lines that look like errors.")
    no_prefix: bool = flag("Do not write node:rank before each line.")
    as_json: options.Json = False

    def printer(self) -> LogPrinter:
        """Return the printer of the lines."""
        from clusterctl.cli.views.log_printer import LogPrinter

        return LogPrinter(prefix=not self.no_prefix, as_json=self.as_json, times=self.timestamps)

    def span(self) -> Span:
        """Return the times of --since and --until."""
        from clusterctl.logs.times import Span, moment

        given = ((option, text) for option, text in (("--since", self.since), ("--until", self.until)))
        span = Span(*(None if text is None else moment(text, option=option) for option, text in given))
        if span.since is not None and span.until is not None and span.since > span.until:
            raise UsageError(f"--since {self.since} is after --until {self.until}", "exchange the two")
        return span

    def filter(self, run: RunDir) -> LogFilter:
        """Return the filter for the lines of a run."""
        from clusterctl.logs.select import LogFilter, parse_ranks

        record = run.read_record()
        nodes = frozenset(record.cluster.select(self.node).names) if self.node else None
        ranks = parse_ranks(self.rank) if self.rank else None
        # A later attempt may have fewer ranks than the first one.
        if ranks and min(ranks) >= record.world_size and record.attempt == 1:
            # Below a launcher, each device has a worker, whose number begins its lines.
            devices = sum(len(record.devices_on(node)) for node in record.cluster.names)
            worker = (
                f"; a worker below the launcher: --rank 0-{record.world_size - 1} --grep '^.rank{min(ranks)}'"
            )
            raise UsageError(
                f"--rank {self.rank}: {run.run_id} has no such rank",
                f"use 0 to {record.world_size - 1}{worker if min(ranks) < devices else ''}",
            )
        if (self.before or self.after) and not (self.grep or self.errors):
            raise UsageError("-A and -B need --grep or --errors", "say around which lines: --grep REGEX")
        grep, exclude = _pattern("--grep", self.grep), _pattern("--exclude", self.exclude)
        return LogFilter(ranks, nodes, grep, self.errors, exclude, before=self.before, after=self.after)


Attempt = Annotated[
    int | None,
    typer.Option("--attempt", min=1, metavar="N", help="Show this start of the run. Default: the last one."),
]


def tail(
    chosen: LogOptions,
    *,
    lines: int = option(
        "How many of the last lines of each stream to show.", "--lines", "-n", default=20, min=0, metavar="N"
    ),
    follow: bool = flag("Keep following until the run ends.", "--follow", "-f"),
) -> None:
    """Show the last lines of the logs of a run; -f keeps following."""
    from clusterctl.client.run import Run

    found = options.run_named(chosen.run)
    wanted, span, printer = chosen.filter(found), chosen.span(), chosen.printer()
    if follow and span.until is not None:
        raise UsageError("--until contradicts --follow", "leave out one of them")
    begin = partial(_tail, found, wanted, lines, span, printer)
    if follow:
        for chunk in Run(found, choices.reach()).follow_logs(begin, warn):
            printer.chunk(chunk, wanted)
    else:
        bring_home(found)
        begin(goes_on=False)


def show(
    chosen: LogOptions,
    *,
    fold: bool = flag("Print equal lines once, with the ranks that wrote them. Default: all ranks."),
    fuzzy: bool = flag("With --fold: treat lines that differ only in numbers as equal."),
    tail: int | None = option("Show only the last N of the lines.", min=1, metavar="N"),
    attempt: Attempt = None,
) -> None:
    """Show the logs of a run from the beginning, in the order of time."""
    from clusterctl.logs.select import last_of
    from clusterctl.logs.store import kept_chunks

    if fuzzy and not fold:
        raise UsageError("--fuzzy needs --fold", "add --fold, or leave out --fuzzy")
    found = options.run_named(chosen.run)
    wanted, span, printer = chosen.filter(found), chosen.span(), chosen.printer()
    if fold and (tail or wanted.before or wanted.after):
        raise UsageError("--fold contradicts --tail, -A and -B", "leave out one of them")
    number = _attempt(found, attempt)
    bring_home(found)
    if fold:
        from clusterctl.logs.fold import fold_lines

        wanted = replace(wanted, everybody=True)
        printer.folded(
            fold_lines(kept_chunks(found, wanted, number, span, by_time=False), wanted, fuzzy=fuzzy)
        )
        return
    chunks = kept_chunks(found, wanted, number, span)
    if tail:
        printer.lines(last_of(chunks, wanted, tail))
        return
    for chunk in chunks:
        printer.chunk(chunk, wanted)


def pull(
    run: options.RunName = "last",
    dst: Path | None = argument("A new folder. Default: `pulled` in the folder of the run.", metavar="DST"),
    *,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Fetch the logs and system messages of all attempts, in one folder per node. `ascend-fd parse` can read them."""
    from clusterctl.logs import pull as logs_pull

    found = options.run_named(run)
    target = (dst or found.root / "pulled").absolute()
    if not dry_run:
        logs_pull.claim(target, replace=dst is None)
    bring_home(found)
    with options.connected_to(found) as connections:
        pulled = logs_pull.pull_run(found, connections, target, dry_run=dry_run)
    if as_json:
        screen.show_json(pulled.as_json())
        return
    for note in pulled.notes:
        screen.log(note, "yellow")
    if dry_run:
        screen.write("".join(f"{path}\n" for path in pulled.files))
    else:
        screen.log(f"{plural(len(pulled.files), 'file')}; for Ascend devices, next: {pulled.next_command}")
        screen.write(f"{target}\n")


def bring_home(run: RunDir) -> None:
    """Fetch the log bytes that are still only on the nodes."""
    from clusterctl.client.run import Run

    Run(run, choices.reach()).fetch_logs(warn)


def warn(text: str) -> None:
    """Show a message about the logs."""
    screen.log(text, "yellow")


def _tail(
    run: RunDir,
    wanted: LogFilter,
    lines: int,
    span: Span,
    printer: LogPrinter,
    *,
    goes_on: bool,
) -> dict[Path, int]:
    """Print the last lines of the local files; return how far each file was read.

    If the caller continues from there (`goes_on`), an incomplete last line is left for it.
    """
    from clusterctl.logs.store import kept_files

    read, last = {}, []
    for file in kept_files(run, run.read_record().attempt):
        read[file.path] = size = file.path.stat().st_size
        start, end = span.bytes_of(file.path)
        # A file that still grows may end in half a line.
        end = size if goes_on and end is None else end
        last.append(file.last(lines, wanted, start, end))
    printer.lines(heapq.merge(*last, key=lambda line: line.at))
    return read


def _attempt(run: RunDir, attempt: int | None) -> int:
    last = int(run.read_record().attempt)
    if attempt is not None and attempt > last:
        raise UsageError(
            f"--attempt {attempt}: {run.run_id} has {plural(last, 'attempt')}", f"use 1 to {last}"
        )
    return attempt or last


def _pattern(option: str, text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        hint = "this is a regular expression: write \\ before ( [ . * + ?"
        raise UsageError(f"{option} {text}: {error}", hint) from None
