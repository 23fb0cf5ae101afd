"""Copy files from one node to another: directly if the nodes can connect to each other, else through this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clusterctl.agent.files import tree
from clusterctl.agent.files.tree import Range
from clusterctl.inventory.cluster import Node
from clusterctl.transfer.manifest import Manifest
from clusterctl.transfer.push import PushResult, Source, launcher_error, push_apart
from clusterctl.transfer.relay import Relay
from clusterctl.transport.connection import Connection
from clusterctl.transport.link import PendingRequest, RequestFailed


@dataclass(frozen=True)
class End:
    """A node of a copy, and its connection."""

    node: Node
    connection: Connection


def copy_between(
    source: End,
    folder: str,
    names: Sequence[str] | None,
    target: End,
    dest: str,
) -> PushResult:
    """Copy a folder on one node, or some files in it, to a new folder on another; every piece is verified there."""
    with _offered(source, folder, names) as offer:
        relay = Between(source, target, offer)
        return push_apart(target.connection, offer, dest, relay)


class Offer(Source):
    """Files that a node offers. Their bytes pass through this machine only if the target cannot fetch them itself."""

    def __init__(self, node: str, request: PendingRequest) -> None:
        self._node, self._request = node, request
        self._frames = iter(request)
        super().__init__(Path(), self._read_manifest())

    def _read_manifest(self) -> Manifest:
        content, sizes = bytearray(), {"manifest": 0, "table": 0}
        for frame in self._frames:
            if frame.fields.get("ready"):
                break
            sizes = {key: int(frame.fields.get(key, 0)) for key in sizes}
            content += frame.payload
            if len(content) > 2 * tree.MAX_MANIFEST:
                raise RequestFailed(self._node, "bad-tree", "its manifest does not end")
        try:
            entries = tree.parse(bytes(content[: sizes["manifest"]]))
            return Manifest(tuple(entries), (), bytes(content[sizes["manifest"] :]))
        except tree.BadTree as problem:
            raise launcher_error(self._node, problem) from None

    def send(self, ranges: list[Range], send: Callable[[bytes], None]) -> tuple[str, ...]:
        """Pass the bytes of some pieces on; return no notes: the files of a node are copied as they were."""
        self.say({"pieces": ranges})
        for frame in self._frames:
            if frame.fields.get("sent"):
                break
            send(bytes(frame.payload))
        return ()

    def listen(self, terms: Mapping[str, str]) -> int:
        """Let the target fetch the files from the node; return its port, 0 if it cannot listen."""
        self.say({"terms": dict(terms)})
        frame = next(self._frames, None)
        return int(frame.fields.get("listening", 0)) if frame is not None else 0

    def say(self, message: dict[str, object]) -> None:
        text = json.dumps(message).encode()
        self._request.send(b"%d\n" % len(text) + text)

    def end(self) -> None:
        self.say({"end": True})
        for _ in self._frames:
            continue


@contextmanager
def _offered(source: End, folder: str, names: Sequence[str] | None) -> Iterator[Offer]:
    request = source.connection.open(
        "offer", {"path": folder, "files": None if names is None else list(names)}
    )
    try:
        offer = Offer(source.node.name, request)
        yield offer
        offer.end()
    except BaseException:
        request.cancel()
        raise


class Between(Relay):
    """A relay of two nodes, of which the first has all files."""

    def __init__(self, source: End, target: End, offer: Offer) -> None:
        super().__init__([source.node, target.node], always=True)
        self._source, self._offer = source.node, offer
        self._port = 0

    def terms(self, node: str, wanted: int, pieces: int = 1) -> dict[str, str]:
        """Return the terms for the target; the source begins to listen."""
        terms = super().terms(node, wanted, pieces)
        self._port = self._offer.listen({**terms, "address": self._source.address})
        return terms

    def join(self, node: str, port: int) -> list[dict[str, str | int]]:
        """Return the source as the only node to fetch from."""
        if not self._port:
            return []
        return [{"node": self._source.name, "address": self._source.address, "port": self._port}]

    def linger(self, request: PendingRequest) -> None:
        """End the target's part immediately: no node fetches from it."""
        request.send(b"done\n")
        request.end()
