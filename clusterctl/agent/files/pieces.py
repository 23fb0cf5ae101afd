"""Receive the pieces of a transfer, and the answer that follows them, from a request's body.

Runs on nodes too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import json
from typing import Any, Sequence

from clusterctl.agent.files import tree
from clusterctl.agent.files.tree import PIECE, Range
from clusterctl.agent.files.tree_build import Builder
from clusterctl.agent.frames import CHUNK
from clusterctl.agent.request import Refused, Request


def send_manifest(request: Request, scanned: tree.Scanned) -> tree.Pieces:
    """Send the manifest of scanned files and the hashes of their pieces; return the pieces."""
    manifest = tree.to_bytes(scanned.entries)
    sizes = {"manifest": len(manifest), "table": len(scanned.table)}
    content = manifest + scanned.table
    for begin in range(0, len(content), CHUNK):
        request.send(content[begin : begin + CHUNK], **sizes)
    request.send(b"", ready=True)
    return tree.Pieces([entry for entry in scanned.entries if entry.kind == "f"], scanned.table)


def take_pieces(request: Request, builder: Builder, wanted: Sequence[Range]) -> None:
    """Yield the bytes of some pieces from the request's body, one after another."""
    read = request.body.read
    for index, begin, end in builder.pieces.spans(wanted):
        entry = builder.files[index]
        if entry.size <= PIECE:
            data = read(entry.size)
            whole = len(data) == entry.size
            if whole:
                builder.take_file(index, data)
        else:
            whole = all(_take_piece(request, builder, number) for number in range(begin, end))
        if not whole:
            raise Refused("cut", f"the transfer ended inside {entry.path}; the old tree is untouched")


def read_answer(request: Request) -> Any:
    """Return an answer of the launcher: its length on a line, then JSON."""
    line = request.body.read_line(32)
    if not line.strip().isdigit() or int(line) > MAX_ANSWER:
        raise Refused("cut", "the transfer ended too early; the old tree is untouched")
    return json.loads(request.body.read(int(line)))


# Bytes of an answer of the launcher between the pieces.
MAX_ANSWER = 64 << 20


def _take_piece(request: Request, builder: Builder, number: int) -> bool:
    """Read, hash and write one piece of a large file; return False if it was shorter."""
    try:
        builder.take_from(number, request.body.read_into)
    except EOFError:
        return False
    return True
