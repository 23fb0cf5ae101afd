"""The table of all operations that an agent offers, and the small ones on files."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Any, Dict, List, Optional

from clusterctl.agent.frames import CHUNK
from clusterctl.agent.processes import marked
from clusterctl.agent.request import Operation, Refused, Request

# Limit of listed entries of one folder.
MOST_ENTRIES = 200_000
# Folders below the work folder: `remove` touches nothing else.
OWN_FOLDERS = ("runs", "store", "trees", "tmp", "work")


def put(request: Request) -> Dict[str, Any]:
    """Write one file atomically: to a temporary name, verified, then renamed."""
    path = request.path()
    mode = int(request.params.get("mode", 0o600))
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    aside = f"{path}.{os.getpid()}.{request.id}.aside"
    digest = hashlib.sha256()
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            while True:
                frame = request.inbox.get()
                if frame is None:
                    break
                file.write(frame.payload)
                digest.update(frame.payload)
            os.fchmod(file.fileno(), mode & 0o777)
            file.flush()
            os.fsync(file.fileno())
        wanted = request.params.get("sha256")
        if wanted is not None and wanted != digest.hexdigest():
            raise Refused("damaged", f"{path} arrived damaged; nothing was changed")
        os.replace(aside, path)
    finally:
        if os.path.lexists(aside):
            os.unlink(aside)
    return {}


def get(request: Request) -> Dict[str, Any]:
    """Send one file from an offset to its present end."""
    path = request.path()
    offset = int(request.params.get("offset", 0))
    limit = request.params.get("limit")
    with open(path, "rb") as file:
        file.seek(offset)
        left = max(os.fstat(file.fileno()).st_size - offset, 0) if limit is None else int(limit)
        while left > 0:
            chunk = file.read(min(left, CHUNK))
            if not chunk:
                break
            request.send(chunk)
            left -= len(chunk)
    return {}


def fingerprint(request: Request) -> Dict[str, Any]:
    """Return kind (f, d, l, other, or empty), mode and hash of what is at a path; links are not followed."""
    path = request.path()
    try:
        results = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"path": path, "kind": ""}
    kinds = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l"}
    kind = kinds.get(stat.S_IFMT(results.st_mode), "other")
    result = {"path": path, "kind": kind, "mode": results.st_mode & 0o7777, "size": results.st_size}
    if kind == "f" and os.access(path, os.R_OK):
        from clusterctl.agent.files import tree

        result["sha256"] = tree.hash_file(path)[1]
    return result


def listing(request: Request) -> Dict[str, Any]:
    """Return the entries of one folder, sorted; `missing` is true if it does not exist."""
    path = request.path()
    if not os.path.isdir(path):
        return {"path": path, "missing": not os.path.lexists(path), "entries": []}
    entries: List[Dict[str, Any]] = []
    for entry in os.scandir(path):
        if len(entries) == MOST_ENTRIES:
            raise Refused("too-many", f"{path} has more than {MOST_ENTRIES} entries")
        result = entry.stat(follow_symlinks=False)
        kind = "l" if entry.is_symlink() else "d" if entry.is_dir() else "f"
        entries.append({"name": entry.name, "kind": kind, "size": result.st_size, "mtime": result.st_mtime})
    entries.sort(key=lambda described: str(described["name"]))
    return {"path": path, "missing": False, "entries": entries}


def mkdir(request: Request) -> Dict[str, Any]:
    """Create a folder and those above it."""
    path = request.path()
    os.makedirs(path, mode=int(request.params.get("mode", 0o700)), exist_ok=True)
    return {"path": path}


def remove(request: Request) -> Dict[str, Any]:
    """Remove a file or a tree below one of the agent's own folders; refuse every other path."""
    path = request.path()
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    roots = [os.path.join(os.path.realpath(request.workdir), name) for name in OWN_FOLDERS]
    if not any(real.startswith(root + os.sep) for root in roots):
        raise Refused("outside", f"{path} is not below {request.workdir}/{{{','.join(OWN_FOLDERS)}}}")
    if not os.path.lexists(real):
        return {"removed": False}
    if os.path.isdir(real) and not os.path.islink(real):
        import shutil

        shutil.rmtree(real)
    else:
        os.unlink(real)
    if request.params.get("empty_above"):
        _remove_empty(os.path.dirname(real), roots)
    return {"removed": True}


def _remove_empty(folder: str, roots: List[str]) -> None:
    """Remove a folder and those above it that are empty; the agent's own folders stay."""
    while any(folder.startswith(root + os.sep) for root in roots):
        try:
            os.rmdir(folder)
        except OSError:
            # Not empty: on a shared file system, it may hold another node's part of the run.
            return
        folder = os.path.dirname(folder)


def count(request: Request) -> Dict[str, Any]:
    """Return the living processes that carry a marker."""
    marker = request.need("marker", dict)
    if not marker:
        raise Refused("usage", "count: an empty marker would match every process")
    return {"pids": marked({str(name): str(value) for name, value in marker.items()})}


HERE: Dict[str, Operation] = {
    "put": put,
    "get": get,
    "fingerprint": fingerprint,
    "list": listing,
    "mkdir": mkdir,
    "remove": remove,
    "count": count,
}
# These modules are loaded when they are first needed: an idle agent stays small.
ELSEWHERE = {
    "run": ("child", "run"),
    "follow": ("ranks.follow", "follow"),
    "start": ("ranks.attempts", "start"),
    "state": ("ranks.attempts", "state"),
    "alive": ("ranks.attempts", "alive"),
    "stop": ("ranks.attempts", "stop"),
    "roll_call": ("ranks.roll_call", "roll_call"),
    "evidence": ("ranks.kernel", "evidence"),
    "work_folder": ("files.work_folder", "work_folder"),
    "collect_store": ("files.work_folder", "collect_store"),
    "receive": ("files.transfer", "receive"),
    "tree": ("files.transfer", "send_tree"),
    "examine": ("examine", "examine"),
    "setup": ("setups", "setup"),
    "listen": ("network", "listen"),
    "knock": ("network", "knock"),
    "fingerprint_folder": ("files.fingerprint", "fingerprint_folder"),
    "offer": ("files.offer", "offer"),
    "checkpoints": ("files.checkpoints", "checkpoints"),
    "complete_checkpoint": ("files.checkpoints", "complete_checkpoint"),
    "probe_shared": ("files.checkpoints", "probe_shared"),
    "verify_checkpoint": ("files.checkpoints", "verify_checkpoint"),
    "hold_checkpoint": ("files.checkpoints", "hold_checkpoint"),
    "remove_checkpoint": ("files.checkpoints", "remove_checkpoint"),
}


def find(op: str) -> Optional[Operation]:
    """Return the function of an operation; None if the agent does not know it."""
    if op not in ELSEWHERE:
        return HERE.get(op)
    module, name = ELSEWHERE[op]
    operation: Operation = getattr(__import__(f"clusterctl.agent.{module}", fromlist=[name]), name)
    return operation
