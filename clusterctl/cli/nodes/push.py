"""`push` and `pull`: copy files and folders to nodes and back."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli import options, screen
from clusterctl.cli.declared import argument, flag, option
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from clusterctl.cli.views.progress_bar import Bar
    from clusterctl.inventory.cluster import Node
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transfer.push import PushEstimate, PushResult, Source
    from clusterctl.transfer.relay import Relay
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections, Outcome


@dataclass(frozen=True)
class PushOptions:
    """The options of a push: what it copies, and how."""

    replace: bool = flag(options.REPLACE)
    include_vcs: bool = flag("Also push .git and other version-control folders.")
    relay: str = option(
        "Copy from node to node over TLS, so that about one copy leaves this machine. auto: for 4 MB or "
        "more to 3 or more nodes. plain: always, verified but not encrypted, for a trusted network.",
        default="auto",
        metavar="auto|on|off|plain",
    )
    checksum: bool = flag("Compare files by content, not by size and time.")
    fanout: options.Fanout = None
    image: bool = flag(
        "SRC is the archive of an image: load it on the nodes that lack it, and delete it there."
    )
    runtime: str = option(
        "For --image: the program that loads it.", default="docker", metavar="docker|podman"
    )


def push(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A local folder or file.")],
    *,
    node_path: str | None = argument("Path on the nodes. Default: ~/NAME.", metavar="NODE_PATH"),
    selection: options.NodeOptions,
    how: PushOptions,
    connection: options.ConnectionOptions,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Copy a file or folder to every node. Only differences are sent, files that are gone here are deleted there, and
    the result is verified by hash. An interrupted push is resumed by the next one."""
    from clusterctl.cli.views.progress_bar import bar
    from clusterctl.transfer.relay import relay_for

    chosen = selection.chosen()
    if not source.exists():
        raise UsageError(f"{source}: no such file or folder", "give the file or folder to push")
    if not source.is_file() and not source.is_dir():
        raise UsageError(f"{source}: neither a file nor a folder", "give the file or folder to push")
    _refuse_node_in(node_path, f"clusterctl push {shlex.quote(str(source))} {{path}} -n {{nodes}}")
    if how.image:
        from clusterctl.cli.nodes.push_image import push_image

        loaded = push_image(
            source, chosen, connection, runtime=how.runtime, relay_choice=how.relay, dry_run=dry_run
        )
        show_pushed(loaded, as_json)
        return
    with (
        connection.open(chosen) as connections,
        relay_for(how.relay, chosen.nodes) as relay,
        bar("push") as drawn,
    ):
        pushing = _Push(how, connections, relay, drawn)
        work = pushing.estimate if dry_run else pushing.send
        tree, dest, outcomes = pushing.on_each(
            chosen.nodes, work, lambda: _source(source, node_path, how.include_vcs, how.checksum)
        )
    if dry_run:
        _show_dry_run(tree, dest, outcomes, as_json)
    else:
        show_pushed(outcomes, as_json)


def _refuse_node_in(path: str | None, example: str) -> None:
    """Raise a UsageError for a path in the form of scp, NODE:/PATH: nodes are chosen by options."""
    if path is not None:
        options.require_node_path(path)
    if path and (found := re.fullmatch(r"(?P<nodes>[^/:~]+):(?P<path>[/~].*)", path)):
        words = example.replace("{path}", shlex.quote(found["path"]))
        words = words.replace("{nodes}", shlex.quote(found["nodes"]))
        raise UsageError(f"{path}: give the path alone; options choose the nodes", words)


class _Push:
    """One `push`: nodes are connected while the folder is read; the work on a node waits for the folder."""

    def __init__(self, how: PushOptions, connections: Connections, relay: Relay | None, drawn: Bar) -> None:
        from clusterctl.cli.views.progress_bar import promised
        from clusterctl.transfer.unchanged import UnchangedCheck

        self.how, self.connections, self.relay, self.drawn = how, connections, relay, drawn
        self.reading: Future[tuple[Source, str]] = promised()
        self.unchanged: UnchangedCheck | None = None
        if not (connections.kept or how.checksum):
            self.unchanged = UnchangedCheck(connections, self.reading.result)

    def estimate(self, node: Node) -> PushEstimate:
        """Return what a push would change on a node."""
        from clusterctl.transfer import push as pushing

        link = self.connections.of(node)
        return pushing.estimate(link, *self.reading.result(), replace=self.how.replace)

    def send(self, node: Node) -> PushResult:
        from clusterctl.transfer import push as pushing

        unchanged = self.unchanged.at(node) if self.unchanged else None
        if unchanged is not None:
            return unchanged
        link = self.connections.of(node)
        return pushing.push_tree(
            link, *self.reading.result(), replace=self.how.replace, recheck=self.how.checksum,
            note=self.unchanged is not None, progress=self.drawn.of(node.name), relay=self.relay,
        )  # fmt: skip

    def on_each(
        self, nodes: Sequence[Node], work: Callable[[Node], Any], read: Callable[[], tuple[Source, str]]
    ) -> tuple[Source, str, list[Outcome[Any]]]:
        """Run `work` on each node while `read` reads the source; return the source, its path there, the outcomes."""
        from clusterctl.cli.views.progress_bar import begun
        from clusterctl.transport.fanout import on_each

        fanout = self.how.fanout or self.connections.fanout
        each: Future[list[Outcome[Any]]] = begun(lambda: on_each(nodes, work, fanout=fanout))
        try:
            tree, dest = read()
        except BaseException as problem:
            self.reading.set_exception(problem)
            raise
        for warning in tree.manifest.warnings:
            screen.log(f"warning: {warning}", style="yellow")
        self.reading.set_result((tree, dest))
        _load_tables()
        return tree, dest, each.result()


def _load_tables() -> None:
    """Load the tables (30 ms) while the nodes work."""
    from clusterctl.cli.views import tables  # noqa: F401

    screen.out_console()


def _source(source: Path, node_path: str | None, include_vcs: bool, checksum: bool) -> tuple[Source, str]:
    """Return the local source of the push, and its path on the nodes."""
    from clusterctl.transfer import push as pushing

    dest = node_path or f"~/{source.resolve().name}"
    if source.is_file():
        return pushing.file_source(source, dest, checksum)
    return pushing.Source(source, pushing.make_manifest(source, include_vcs, recheck=checksum)), dest


def pull(
    node_path: Annotated[
        str,
        typer.Argument(
            metavar="NODE_PATH", help="A folder or file on the nodes; or a run, for what its program wrote."
        ),
    ],
    dest: Annotated[
        Path, typer.Argument(metavar="DST", help="A local folder; the files of each node go to DST/<node>/.")
    ],
    selection: options.NodeOptions,
    connection: options.ConnectionOptions,
    fold: bool = flag("Store files that are equal on several nodes once (hard links)."),
    fanout: options.Fanout = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Copy a file or folder from every node into DST/<node>/, verified by hash. Nothing is written outside DST. An
    interrupted pull is resumed by the next one."""
    from clusterctl import text
    from clusterctl.cli.views.progress_bar import bar
    from clusterctl.transfer import pull as pulling

    if (run := _named_run(node_path)) is not None:
        if not dry_run:
            _refuse_dest(dest)
        return _pull_outputs(run, dest, dry_run=dry_run, as_json=as_json)
    _refuse_node_in(node_path, f"clusterctl pull {{path}} {shlex.quote(str(dest))} -n {{nodes}}")
    chosen = selection.chosen()
    places = {node.name: pulling.pull_place(dest, node.name, node_path) for node in chosen.nodes}
    if dry_run:
        return _show_places({name: (node_path, path) for name, path in places.items()}, as_json)
    _refuse_dest(dest)
    with connection.open(chosen) as connections, bar("pull") as drawn:

        def work(node: Node, link: Connection, others: tuple[Path, ...] = ()) -> PushResult:
            progress = drawn.of(node.name)
            return pulling.pull_tree(link, node_path, places[node.name], progress=progress, others=others)

        # With --fold, pull the first node alone: the others then reuse equal data from its local copy.
        ahead = connections.on_each(chosen.nodes[:1], work) if fold else []
        here = tuple(places[outcome.node.name] for outcome in ahead if outcome.ok)
        outcomes = ahead + connections.on_each(
            chosen.nodes[len(ahead) :], lambda node, link: work(node, link, here), fanout=fanout
        )
    if fold:
        files, saved = pulling.fold([places[outcome.node.name] for outcome in outcomes if outcome.ok])
        screen.log(f"{text.plural(files, 'file')} stored once, {text.size(saved)} saved")
    show_pushed(outcomes, as_json)


def _named_run(word: str) -> RunDir | None:
    """Return the run that a word names in full, or `last`; None for the path of a folder on the nodes."""
    from clusterctl.jobs.run_folder import all_runs

    if word.startswith(("/", "~", ".")):
        return None
    runs = all_runs(options.runs_folder())
    return next((run for run in runs if word in ("last", run.run_id)), None)


def _pull_outputs(run: RunDir, dest: Path, *, dry_run: bool, as_json: bool) -> None:
    """Copy what the ranks wrote to DST/<node>/; what they did not change of the pushed code stays there."""
    from clusterctl.runs.finish import bring_outputs
    from clusterctl.transport.fanout import Outcome

    record = run.read_record()
    paths = record.work_dirs
    if not paths:
        hint = f"its files are in {run.root}; for checkpoints: clusterctl checkpoint pull {run.run_id}"
        raise UsageError(f"{run.run_id} is a training, which has no working folder", hint)
    if dry_run:
        return _show_places({name: (path, dest / name) for name, path in paths.items()}, as_json)
    with options.connected_to(run) as connections:
        done = bring_outputs(run, connections, dest)
    show_pushed(
        [Outcome(node, done[node.name]) for node in record.cluster.nodes if node.name in done], as_json
    )


def _show_places(places: Mapping[str, tuple[str, Path]], as_json: bool) -> None:
    """Show what would be copied of each node, and where to."""
    rows = [{"node": name, "from": path, "to": str(dest)} for name, (path, dest) in places.items()]
    lines = "".join(f"{row['node']}: {row['from']} -> {row['to']}\n" for row in rows)
    return screen.show_json(rows) if as_json else screen.write(lines)


def _refuse_dest(dest: Path) -> None:
    """Raise if the destination cannot be created, before any node is contacted."""
    missing, existing = None, dest.absolute()
    while not existing.exists():
        missing, existing = existing, existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "not writable" if existing.is_dir() else "not a folder"
        raise UsageError(f"{dest}: {existing} is {reason}", "give a local folder that exists or can be made")
    try:
        if missing is not None:
            missing.mkdir()
            missing.rmdir()
    except OSError as error:
        raise UsageError(
            f"{dest}: no folder can be made here: {error.strerror}",
            "give a folder that exists or can be made",
        ) from None


def _show_dry_run(
    source: Source, dest: str, estimates: Sequence[Outcome[PushEstimate]], as_json: bool
) -> None:
    from clusterctl import text
    from clusterctl.inventory import nodeset
    from clusterctl.transport.fanout import raise_failures

    files = source.manifest.files
    done = [(outcome.node.name, outcome.value) for outcome in estimates if outcome.value is not None]
    if as_json:
        value = {
            "nodes": [outcome.node.name for outcome in estimates],
            "to": dest,
            "files": [{"path": file.path, "size": file.size} for file in files],
            "would": [{"node": name, **asdict(estimate)} for name, estimate in done],
        }
        screen.show_json(value)
        return raise_failures(estimates)
    for file in files:
        screen.show(screen.safe(f"{file.size:>12,}  {text.escape_controls(file.path)}"))
    screen.log(f"{text.plural(len(files), 'file')}, {source.manifest.size:,} bytes, to {dest}")
    alike: dict[tuple[bool, int, int], list[str]] = {}
    for name, estimate in done:
        alike.setdefault((estimate.unchanged, estimate.files, estimate.bytes), []).append(name)
    for (unchanged, count, size), names in alike.items():
        change = (
            "nothing would change"
            if unchanged
            else f"would bring {text.plural(count, 'file')}, {size:,} bytes"
        )
        screen.log(f"{nodeset.fold(names)}: {change}")
    raise_failures(estimates)


def show_pushed(outcomes: Sequence[Outcome[PushResult]], as_json: bool) -> None:
    """Show what each node received; raise the errors of the others."""
    from clusterctl import text
    from clusterctl.cli.views import tables
    from clusterctl.transport.fanout import raise_failures

    done = [(outcome.node.name, outcome.value) for outcome in outcomes if outcome.value is not None]
    for name, value in done:
        for note in value.notes:
            screen.log(text.escape_controls(f"{name}: {note}"), style="yellow")
    if as_json:
        screen.show_json([{"node": name, **asdict(value)} for name, value in done])
    else:
        relayed = any(value.bytes_relayed for _, value in done)
        rows = [
            [
                name,
                value.path,
                "unchanged" if value.unchanged else text.plural(value.files_sent, "file"),
                text.size(value.bytes_sent),
                *([text.size(value.bytes_relayed)] if relayed else []),
                f"{value.seconds:.2f} s",
            ]
            for name, value in done
        ]
        heads = ["NODE", "PATH", "MOVED", "BYTES", *(["FROM NODES"] if relayed else []), "TIME"]
        if rows:
            numbers = ["MOVED", "BYTES", "FROM NODES", "TIME"]
            screen.show(tables.table(heads, rows, right=numbers, drop=["TIME"], cut=["PATH"]))
    raise_failures(outcomes)
