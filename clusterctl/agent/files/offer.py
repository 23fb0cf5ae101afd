"""Offer files of a folder to another node, which fetches them as in a relayed push."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Dict

from clusterctl.agent import compact_json
from clusterctl.agent.files import tree
from clusterctl.agent.files.pieces import read_answer, send_manifest
from clusterctl.agent.files.relay import Giver, prepared
from clusterctl.agent.files.tree import BadTree, Pieces
from clusterctl.agent.request import Refused, Request

# How much lower than the training's the priority of reading and hashing is.
NICE = 10


class WholeTree:
    """A complete tree in the form that the relay serves."""

    def __init__(self, root: str, pieces: Pieces) -> None:
        self.root = root
        self.pieces = pieces
        self.ready = bytearray(b"\1" * pieces.count)
        self.is_shared = True

    def await_piece(self, number: int, timeout: float) -> bool:
        """Return True: every piece is here."""
        return True

    def open_file(self, file: int) -> int:
        """Open a file for reading."""
        path = os.path.join(self.root, self.pieces.files[file].path)
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def offer(request: Request) -> Dict[str, Any]:
    """Send the manifest of a folder, or of some `files` in it, then serve the pieces as the launcher's messages say.

    `{"terms": ...}` lets another node fetch them: the reply has the port. `{"pieces": ...}` sends pieces in the reply.
    `{"end": true}` ends the offer.
    """
    folder, wanted = request.path(), request.params.get("files")
    names = {str(name) for name in wanted} if isinstance(wanted, list) else set()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    scanned = tree.scan(folder, lambda path, is_dir: bool(names) and path not in names)
    missing = names - {entry.path for entry in scanned.entries if entry.kind == "f"}
    if missing:
        raise Refused("not-found", f"{folder}: has no file {', '.join(sorted(missing)[:5])}")
    whole = WholeTree(folder, send_manifest(request, scanned))
    with contextlib.ExitStack() as serving:
        while _serve(request, whole, read_answer(request), serving):
            continue
    return {"path": folder}


def _serve(request: Request, whole: WholeTree, message: Any, serving: contextlib.ExitStack) -> bool:
    """Handle one message of the launcher; return False for the last one."""
    if not isinstance(message, dict):
        raise Refused("usage", "offer: a message must be an object")
    if "terms" in message:
        giver, problem = None, ""
        try:
            giver = Giver(whole, prepared(message["terms"], os.path.join(request.workdir, "tmp")))
            serving.callback(giver.close)
            request.on_cancel.append(giver.close)
        except OSError as error:
            problem = str(error)
        request.send(b"", listening=giver.port if giver else 0, why=problem)
    elif "pieces" in message:
        try:
            wanted = whole.pieces.checked(message["pieces"])
            tree.send_pieces(
                lambda entry: os.path.join(whole.root, entry.path), whole.pieces, wanted, request.send
            )
        except BadTree as problem:
            raise Refused("changed", f"{problem}; copy it again") from None
        request.send(compact_json.dumps(True).encode(), sent=True)
    return "end" not in message
