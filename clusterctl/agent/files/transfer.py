"""Receive the trees that a push brings to a node, and send those that a pull fetches."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from clusterctl.agent import compact_json
from clusterctl.agent.files import tree, tree_cache, tree_state
from clusterctl.agent.files.file_calls import foreign_link, matches_entry
from clusterctl.agent.files.pieces import MAX_ANSWER, read_answer, send_manifest, take_pieces
from clusterctl.agent.files.tree import BadTree, Entry
from clusterctl.agent.files.tree_build import Base, Builder
from clusterctl.agent.files.tree_cache import CacheEntry, Memory
from clusterctl.agent.processes import read_limited
from clusterctl.agent.request import Refused, Request


class Record(NamedTuple):
    """The files that a push put into a folder, and their state after that."""

    tree: str
    entries: List[Entry]
    rows: Dict[str, CacheEntry]


def receive(request: Request) -> Dict[str, Any]:
    """Take a tree: its name; its manifest, unless it is here already; then the pieces that are missing.

    `dest` may be a path below the work folder's store (there it is enough that it exists: its name is its content),
    or any folder that does not exist, is empty, or came from an earlier push; any other only with `replace`. `look`
    only reports what would be sent. `recheck` also reads files whose times say that they did not change. With
    `single` the tree is one file, and `dest` is that file, which is replaced. With `transient` no record is kept for
    the next push: the files will be moved elsewhere.
    """
    dest = request.path("dest")
    named, single = bool(request.params.get("content_named")), bool(request.params.get("single"))
    link = foreign_link(dest)
    if link:
        raise Refused("unsafe", f"{link} is another user's link, in a folder that everybody may write to")
    noted = record_path(request, dest)
    if named and os.path.isdir(dest):
        if os.path.exists(noted):
            # When it was last needed.
            os.utime(noted)
        return _same(dest)
    old = read_record(noted)
    if single and os.path.isdir(dest):
        raise Refused("exists", f"{dest} is a folder; with a / at its end the file goes into it")
    free = named or single or request.params.get("replace") or old is not None or not os.path.lexists(dest)
    if not free and not _is_empty(dest):
        raise Refused("exists", f"{dest} exists, and no push created it")
    if request.params.get("recheck") and old is not None:
        old = old._replace(rows={}, tree="")
    if old is not None and old.tree == request.need("tree", str) and _is_unchanged(request, old, noted):
        return _same(dest)
    builder = _builder(request, dest)
    builder.find_missing([Base(builder.root, old.rows if old else {})])
    if builder.is_same() and not (old and not single and _left_over(builder, old)):
        if not request.params.get("transient"):
            name, text = request.need("tree", str), builder.manifest
            _write_record(noted, builder.root, name, builder.entries, builder.known, manifest=text)
        return _same(dest)
    if request.params.get("look"):
        return _estimate(builder, _other_bases(request, dest) if named else [])
    try:
        if builder.stage(request.cancelled.is_set):
            builder.rescan()
            if builder.is_same():
                # Another transfer has installed it meanwhile.
                return _same(dest)
        return _take(request, builder, noted, old, _other_bases(request, dest) if named else [])
    finally:
        builder.close()


def _is_unchanged(request: Request, old: Record, noted: str) -> bool:
    """Return when the state of an unchanged tree was taken, for the launcher's next comparison.

    None if it changed.
    """
    dest, at = request.path("dest"), time.time_ns()
    reported = tree_state.state(dest) if request.params.get("note") else tree_state.NOTHING
    rows = _holds(_root(request), old, noted)
    if rows is None:
        return False
    tree_state.keep(
        tree_state.path_of(request.workdir, request.need("dest", str)), old.tree, reported, dest, rows, at
    )
    return True


def _left_over(builder: Builder, old: Record) -> bool:
    """Return True if the folder has files of the previous push that are not in this one."""
    wanted = {entry.path for entry in builder.entries}
    return any(
        os.path.lexists(os.path.join(builder.root, entry.path))
        for entry in old.entries
        if entry.path not in wanted
    )


def _take(
    request: Request, builder: Builder, noted: str, old: Optional[Record], bases: Sequence[Base]
) -> Dict[str, Any]:
    builder.adopt()
    ready = sum(builder.ready)
    wanted = builder.find_missing(bases)
    builder.room(wanted)
    request.send(compact_json.dumps(wanted).encode(), want=True, kept=ready)
    if not request.params.get("relay"):
        builder.copy_over()
        take_pieces(request, builder, wanted)
        return _put_in_place(request, builder, noted, old)
    # Imported here, because its cryptography takes 20 ms and few transfers need it.
    from clusterctl.agent.files import relay

    with relay.Exchange(request, builder, read_answer(request)) as exchange:
        builder.copy_over()
        exchange.fetch(wanted)
        result = {**_put_in_place(request, builder, noted, old), **exchange.report}
        request.send(compact_json.dumps(result).encode(), built=True)
        # Other nodes may still fetch from here, until the launcher reports the end.
        request.body.read_line(MAX_ANSWER)
    return result


def _put_in_place(request: Request, builder: Builder, noted: str, old: Optional[Record]) -> Dict[str, Any]:
    builder.finish()
    if old is not None and not request.params.get("single"):
        builder.keep_others([entry.path for entry in old.entries])
    builder.switch()
    if not request.params.get("transient"):
        name, entries, text = request.need("tree", str), builder.entries, builder.manifest
        _write_record(noted, builder.root, name, entries, {}, builder.written, text)
    return {"path": builder.dest, "unchanged": False}


def _root(request: Request) -> str:
    """Return the folder that the entries' names are in."""
    dest = request.path("dest")
    return os.path.dirname(dest) if request.params.get("single") else dest


def _same(dest: str) -> Dict[str, Any]:
    return {"path": dest, "unchanged": True}


def _estimate(builder: Builder, bases: Sequence[Base]) -> Dict[str, Any]:
    """Return what a push would send, without changing anything."""
    builder.adopt(prune=False)
    wanted = builder.find_missing(bases)
    builder.room(wanted)
    return {
        "path": builder.dest,
        "unchanged": False,
        "files": builder.pieces.file_count(wanted),
        "bytes": builder.pieces.size(wanted),
    }


def _builder(request: Request, dest: str) -> Builder:
    """Request the manifest and the digests of the pieces, and use them only after a check."""
    size, table_size = request.need("manifest_size", int), request.need("table_size", int)
    if not 0 < size <= tree.MAX_MANIFEST or not 0 <= table_size <= tree.MAX_MANIFEST:
        raise Refused("usage", f"a manifest of {size} + {table_size} bytes")
    request.send(b"", manifest=True)
    manifest, table = request.body.read(size), request.body.read(table_size)
    if tree.tree_id(manifest) != request.need("tree", str):
        raise Refused("damaged", "the manifest arrived damaged")
    try:
        entries = tree.parse(manifest)
        single = bool(request.params.get("single"))
        if single and [(entry.path, entry.kind) for entry in entries] != [(os.path.basename(dest), "f")]:
            raise BadTree(f"it is not the one file {dest}")
        return Builder(dest, entries, table, single, manifest)
    except BadTree as problem:
        raise Refused("bad-tree", str(problem)) from None


def _other_bases(request: Request, dest: str) -> List[Base]:
    """Return the newest other tree of the same kind in the store: usually the same code before an edit."""
    parent = os.path.dirname(dest)
    if not os.path.isdir(parent):
        return []
    present = [
        entry for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."
    ]
    newest = sorted(present, key=lambda entry: entry.stat(follow_symlinks=False).st_ctime)[-1:]
    result = []
    for entry in newest:
        record = read_record(record_path(request, entry.path))
        result.append(Base(entry.path, record.rows if record else {}))
    return result


def _is_empty(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)


# ---- the record of a push


def record_path(request: Request, dest: str) -> str:
    """Return where the record about `dest` is kept: not next to it, since that folder is the user's."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(dest))).hexdigest()[:32]
    return os.path.join(request.workdir, "trees", name + ".json")


def _holds(dest: str, record: Record, noted: str) -> Optional[Dict[str, CacheEntry]]:
    """Return the files as they are if a folder is still what the last push made of it.

    Only changed files are read.
    """
    knows = Memory(record.rows)
    try:
        for entry in record.entries:
            path = f"{dest}/{entry.path}"
            if entry.kind != "f":
                if not matches_entry(dest, entry):
                    return None
                continue
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o777 != entry.mode:
                return None
            if status.st_size != entry.size or knows.read(entry.path, path, status)[1] != entry.content:
                return None
    except OSError:
        return None
    if knows.read_bytes:
        _write_record(noted, dest, record.tree, record.entries, knows.now)
    return knows.now


def read_record(path: str) -> Optional[Record]:
    """Return the record of a push; None if there is none or it cannot be read."""
    try:
        value = json.loads(read_limited(path, tree_cache.LARGEST))
        entries = [Entry(*row) for row in value["entries"]]
        return Record(str(value["tree"]), entries, tree_cache.rows_from_json(value["rows"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write_record(
    path: str,
    root: str,
    name: str,
    entries: Sequence[Entry],
    rows: Dict[str, CacheEntry],
    written: Optional[Dict[str, os.stat_result]] = None,
    manifest: bytes = b"",
) -> None:
    """Write the record of a push.

    `rows` are files as they were when they were read, `written` when they were written; the other files have just
    been put there. `manifest` is the entries' text if it is available.
    """
    written, now = written or {}, time.time_ns()
    for entry in entries:
        if entry.kind == "f" and entry.path not in rows:
            status = written.get(entry.path) or os.lstat(f"{root}/{entry.path}")
            # Just after a push, there are few.
            if tree_cache.is_settled(status.st_ctime_ns, now):
                rows[entry.path] = tree_cache.seen(status, entry.content)
    # One write is several times faster than several.
    rows_text = compact_json.dumps(tree_cache.rows_to_json(tree_cache.settled(rows)))
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    aside = f"{path}.{os.getpid()}.aside"
    with open(aside, "wb") as file:
        text = manifest or tree.to_bytes(entries)
        file.write(
            b'{"tree":%b,"entries":%b,"rows":%b}'
            % (compact_json.dumps(name).encode(), text, rows_text.encode())
        )
    os.replace(aside, path)


# ---- a pull


def send_tree(request: Request) -> Dict[str, Any]:
    """Send a folder or a file: its manifest, then the bytes of the pieces that the launcher requests.

    With `files`, only these files directly in the folder are sent. With `without`, a tree of the store, files that are
    still as they are there are left out. The result names files that grew meanwhile; they are sent as they were first.
    """
    path = request.path()
    if not os.path.lexists(path):
        raise Refused("not-found", f"no {path}")
    if os.path.isdir(path):
        root, scanned = path, _scan(request, path)
    else:
        root, scanned = os.path.dirname(path), _one_file(path)
    pieces = send_manifest(request, scanned)
    wanted = pieces.checked(read_answer(request))
    try:
        grown = tree.send_pieces(lambda entry: os.path.join(root, entry.path), pieces, wanted, request.send)
    except BadTree as problem:
        raise Refused("changed", f"{problem}; pull again") from None
    return {"path": path, "is_folder": os.path.isdir(path), "warnings": [*scanned.warnings, *grown]}


def _scan(request: Request, path: str) -> tree.Scanned:
    if request.params.get("without"):
        from clusterctl.agent.files.outputs import scan_outputs

        return scan_outputs(path, request.path("without"))
    files = request.params.get("files")
    names = {str(name) for name in files} if isinstance(files, list) else None
    return tree.scan(path, lambda name, is_dir: names is not None and name not in names)


def _one_file(path: str) -> tree.Scanned:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        # A device or a pipe may never end.
        raise Refused("not-found", f"{path} is neither a file nor a folder")
    size, content, table = tree.content_of(path)
    mode = stat.S_IMODE(status.st_mode) & 0o777
    return tree.Scanned([Entry(os.path.basename(path), "f", mode, size, content)], [], table)
