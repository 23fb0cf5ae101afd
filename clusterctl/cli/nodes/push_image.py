"""`push --image`: bring an image archive to nodes and load it into their container runtime."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.cli import options, screen
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.cli.views.progress_bar import Bar
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.transfer.image import ImageArchive
    from clusterctl.transfer.push import PushResult, Source
    from clusterctl.transfer.relay import Relay
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Outcome


def push_image(
    source: Path,
    chosen: Cluster,
    connection: options.ConnectionOptions,
    *,
    runtime: str,
    relay_choice: str,
    dry_run: bool = False,
) -> list[Outcome[PushResult]]:
    """Push an archive to the nodes that lack its image, load it there, and verify that they have it."""
    from clusterctl.cli.views.progress_bar import bar
    from clusterctl.inventory import nodeset
    from clusterctl.transfer import image as images
    from clusterctl.transfer.relay import relay_for
    from clusterctl.transport.fanout import on_all

    if source.is_dir() or not source.exists():
        raise UsageError(f"{source} is not an archive of an image", images.NO_ARCHIVE)
    archive = images.read_archive(source)
    with connection.open(chosen) as connections:

        def ask(node: Node, link: Connection) -> bool:
            images.refuse_machine(archive, node.name, link)
            return images.has_image(archive, runtime, link)

        present = on_all(connections, chosen.nodes, ask)
        lacking = [node for node in chosen.nodes if not present[node.name]]
        have = [name for name, found in present.items() if found]
        if have:
            screen.log(f"{nodeset.fold(have)}: {archive.name} is there already")
        if dry_run or not lacking:
            names = nodeset.fold([node.name for node in lacking])
            screen.log(f"{names}: would get {archive.name}" if lacking else "nothing to do")
            return []
        with relay_for(relay_choice, lacking) as relay, bar("push") as drawn:
            work = _Work(archive, runtime, relay, drawn)
            return connections.on_each(lacking, work.send)


class _Work:
    """The push and the load of one archive."""

    def __init__(self, archive: ImageArchive, runtime: str, relay: Relay | None, drawn: Bar) -> None:
        self.archive, self.runtime, self.relay, self.drawn = archive, runtime, relay, drawn
        self.sources: dict[str, tuple[Source, str]] = {}

    def send(self, node: Node, link: Connection) -> PushResult:
        """Bring the archive to one node and load it."""
        from clusterctl.transfer import image as images
        from clusterctl.transfer import push as pushing

        began = time.monotonic()
        tree, dest = pushing.file_source(self.archive.path, self.archive.remote_path(node))
        progress = self.drawn.of(node.name)
        result = pushing.push_tree(link, tree, dest, replace=True, progress=progress, relay=self.relay)
        images.load(self.archive, self.runtime, node, link)
        return replace(result, path=self.archive.name, seconds=time.monotonic() - began)
