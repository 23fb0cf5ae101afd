"""`push` and `pull`: trees to nodes and back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options, screen

if TYPE_CHECKING:
    from clusterctl.inventory import Node
    from clusterctl.push import Manifest, Progress, PushResult
    from clusterctl.transport import Connection, Outcome


def push(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder or a file here.")],
    node_path: Annotated[
        str | None, typer.Argument(metavar="[NODE_PATH]", help="Where on the nodes; ~/NAME by default.")
    ] = None,
    cluster: options.ClusterFile = None,
    nodes: options.Nodes = None,
    exclude: options.Exclude = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Also in the place of a folder that no push made, with all in it."),
    ] = False,
    include_vcs: Annotated[bool, typer.Option("--include-vcs", help="With .git and the like.")] = False,
    accept_new: options.AcceptNew = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Make a folder (or file) on every node the same as here; only what is missing travels."""
    from clusterctl import push as pushing

    chosen = options.cluster_of(cluster, nodes, exclude)
    dest = node_path or f"~/{source.resolve().name}"
    manifest = None if source.is_file() else pushing.make_manifest(source, include_vcs)
    for warning in manifest.warnings if manifest else ():
        screen.say(f"warning: {warning}", style="yellow")
    if dry_run:
        return _show_dry_run(source, dest, manifest, chosen.names, as_json)

    def work(node: Node, link: Connection, progress: Progress) -> PushResult:
        if manifest is None:
            return pushing.push_file(link, source, dest, progress=progress)
        return pushing.push_tree(link, source, manifest, dest, replace=replace, progress=progress)

    with options.connected(chosen, accept_new) as connections, _bar("push") as bar:
        outcomes = connections.on_each(chosen.nodes, lambda node, link: work(node, link, bar.of(node.name)))
    _show(outcomes, as_json)


def pull(
    node_path: Annotated[str, typer.Argument(metavar="NODE_PATH", help="A folder or file on the nodes.")],
    dest: Annotated[
        Path, typer.Argument(metavar="DST", help="A folder here; each node's tree goes below DST/<node>/.")
    ],
    cluster: options.ClusterFile = None,
    nodes: options.Nodes = None,
    exclude: options.Exclude = None,
    accept_new: options.AcceptNew = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Bring a folder or file of every node home, verified; nothing is written outside DST."""
    from clusterctl import push as pushing

    chosen = options.cluster_of(cluster, nodes, exclude)
    places = {node.name: pushing.pull_place(dest, node.name, node_path) for node in chosen.nodes}
    if dry_run:
        rows = [{"node": name, "from": node_path, "to": str(place)} for name, place in places.items()]
        return (
            screen.show_json(rows)
            if as_json
            else screen.write("".join(f"{one['node']}: {node_path} -> {one['to']}\n" for one in rows))
        )
    with options.connected(chosen, accept_new) as connections, _bar("pull") as bar:
        outcomes = connections.on_each(
            chosen.nodes,
            lambda node, link: pushing.pull_tree(
                link, node_path, places[node.name], progress=bar.of(node.name)
            ),
        )
    _show(outcomes, as_json)


class _Bar:
    """Bytes of all nodes together, on a terminal; nothing elsewhere."""

    def __init__(self, update: object = None) -> None:
        self._update = update
        self._seen: dict[str, tuple[int, int]] = {}
        self._change = threading.Lock()

    def of(self, node: str) -> Progress:
        """What one node's transfer reports to."""

        def report(done: int, total: int) -> None:
            with self._change:
                self._seen[node] = (done, total)
                if callable(self._update):
                    self._update(
                        sum(one for one, _ in self._seen.values()), sum(one for _, one in self._seen.values())
                    )

        return report


@contextmanager
def _bar(verb: str) -> Iterator[_Bar]:
    if not screen.on_terminal():
        yield _Bar()
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen.error_console(), transient=True) as drawn:
        task = drawn.add_task(verb, total=None)
        yield _Bar(lambda done, total: drawn.update(task, completed=done, total=total))


def _show_dry_run(
    source: Path, dest: str, manifest: Manifest | None, names: Sequence[str], as_json: bool
) -> None:
    from clusterctl import nodeset, words

    files = (
        [(one.path, one.size) for one in manifest.files]
        if manifest
        else [(source.name, source.stat().st_size)]
    )
    if as_json:
        value = {
            "nodes": list(names),
            "to": dest,
            "files": [{"path": path, "size": size} for path, size in files],
        }
        return screen.show_json(value)
    for path, size in files:
        screen.show(screen.safe(f"{size:>12,}  {path}"))
    total = sum(size for _, size in files)
    screen.say(
        f"would push {words.some(len(files), 'file')}, {total:,} bytes, to {dest} on {nodeset.fold(names)}; "
        "what is there does not travel again"
    )


def _show(outcomes: Sequence[Outcome[PushResult]], as_json: bool) -> None:
    from dataclasses import asdict

    from clusterctl import views, words
    from clusterctl.run import raise_failures

    done = [(one.node.name, one.value) for one in outcomes if one.value is not None]
    if as_json:
        screen.show_json([{"node": name, **asdict(value)} for name, value in done])
    else:
        rows = [
            [
                name,
                value.path,
                "unchanged" if value.unchanged else words.some(value.files_sent, "file"),
                words.size(value.bytes_sent),
                f"{value.seconds:.2f} s",
            ]
            for name, value in done
        ]
        if rows:
            screen.show(
                views.table(
                    ["NODE", "PATH", "MOVED", "BYTES", "TIME"], rows, right=["MOVED", "BYTES", "TIME"]
                )
            )
    raise_failures(outcomes)
