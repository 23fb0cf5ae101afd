"""Make the working folder of a run from the code in the store, and remove what no run uses from the store.

Source files become hard links, other files copies: a program may open these for writing, and a write through a link
would change the store. Large files are links too. If one was changed in place, which its time shows, the tree is
removed from the store and has to be pushed again.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from typing import Dict, List, Set

from clusterctl.agent.files.file_calls import copy_file, remove_tree, status_of
from clusterctl.agent.files.transfer import read_record, record_path
from clusterctl.agent.files.tree import Entry, walk
from clusterctl.agent.request import Refused, Request

# Endings of files that programs read and do not write in place.
SOURCE = (
    ".py .pyi .pyx .pxd .c .cc .cpp .cxx .h .hh .hpp .cu .cuh .rs .go .java .js .ts .sh .bash .so .a .o"
    " .rst .md .html .css .proto .cmake"
)
LINKED = tuple(SOURCE.split())
# Bytes from which any file is linked: a copy would take its time and its space in each run.
LARGE = 16 << 20
# Seconds in which another node on the same disk makes a folder, and the pause between two checks.
PATIENCE, PAUSE = 120.0, 0.05
# Seconds after its last push in which a tree is never removed: a start that has just found it may still need it.
RECENT = 600.0
# Files from which the folder of the next run is made in advance: 10,000 links take 0.2 s.
MANY = 1000
# Seconds after a start until that begins.
LATER = 5.0
KINDS = ("code", "data")


class Altered(Exception):
    """A file of the store was changed in place."""


def work_folder(request: Request) -> Dict[str, object]:
    """Make the folder `path` from the tree `code` of the store; return whether that tree has to be pushed again.

    A folder that exists stays as it is. With `keep`, its files change if their pushed content did since the last call.
    """
    path, code = request.path(), request.path("code")
    if os.path.isdir(path) and not request.params.get("keep"):
        return {"altered": False}
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    spare = os.path.join(os.path.dirname(path), f".next-{os.path.basename(code)}")
    if not request.params.get("keep") and os.path.isdir(spare):
        if _is_altered(code):
            remove_tree(spare)
        elif _rename(spare, path):
            _make_spare(request, spare, code)
            return {"altered": False}
    entries = _entries(request, code)
    try:
        if os.path.isdir(path):
            _update(request, path, code, entries)
        else:
            _make(path, code, entries)
    except Altered:
        remove_tree(code)
        return {"altered": True}
    if request.params.get("keep"):
        _remember(path, code)
    elif len(entries) >= MANY:
        _make_spare(request, spare, code)
    return {"altered": False}


def _is_altered(code: str) -> bool:
    """Return whether a file of a tree was written after the tree was put into the store."""
    folders, pushed = [code], os.stat(code).st_ctime_ns
    while folders:
        with os.scandir(folders.pop()) as listing:
            for entry in listing:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.stat(follow_symlinks=False).st_mtime_ns > pushed:
                    return True
    return False


def _rename(folder: str, path: str) -> bool:
    try:
        os.rename(folder, path)
    except OSError:
        # Another node on the same disk took it, or made the folder of the run.
        return os.path.isdir(path)
    return True


def _make_spare(request: Request, spare: str, code: str) -> None:
    """Make the folder of the next run with this code in the background, and remove those with other code."""

    def work() -> None:
        aside, parent = f"{spare}.{os.getpid()}", os.path.dirname(spare)
        # The ranks start first.
        time.sleep(LATER)
        try:
            for name in os.listdir(parent):
                if name.startswith(".next-") and not f"{parent}/{name}".startswith(spare):
                    remove_tree(f"{parent}/{name}")
            os.mkdir(aside, 0o700)
            _fill(aside, code, _entries(request, code))
            os.rename(aside, spare)
        except (OSError, Altered, Refused):
            # The next start makes its own.
            if os.path.isdir(aside):
                remove_tree(aside)

    threading.Thread(target=work, daemon=True, name="next work folder").start()


def _entries(request: Request, code: str) -> List[Entry]:
    """Return what was pushed into a tree; without a record, what is there."""
    record = read_record(record_path(request, code))
    if record is not None:
        return record.entries
    if not os.path.isdir(code):
        raise Refused("not-found", f"no {code}")
    kinds = (("l", os.path.islink), ("d", os.path.isdir), ("f", os.path.isfile))
    found = []
    for path, entry in walk(code, "", lambda path, is_dir: False):
        kind = next((kind for kind, fits in kinds if fits(entry.path)), "")
        status = entry.stat(follow_symlinks=False)
        target = os.readlink(entry.path) if kind == "l" else ""
        found += [Entry(path, kind, stat.S_IMODE(status.st_mode) & 0o777, status.st_size, target)] * bool(
            kind
        )
    return found


def _make(path: str, code: str, entries: List[Entry]) -> None:
    """Make a folder that does not exist; of several nodes on one disk, the first one does it."""
    aside = f"{path}.making"
    try:
        os.mkdir(aside, 0o700)
        if os.path.isdir(path):
            return os.rmdir(aside)
    except FileExistsError:
        deadline = time.monotonic() + PATIENCE
        while not os.path.isdir(path):
            if time.monotonic() > deadline or not os.path.isdir(aside):
                # Its maker died.
                aside = f"{path}.{os.getpid()}.making"
                os.mkdir(aside, 0o700)
                break
            time.sleep(PAUSE)
        else:
            return
    try:
        _fill(aside, code, entries)
        os.rename(aside, path)
    except OSError:
        remove_tree(aside)
        if not os.path.isdir(path):
            raise
    except Altered:
        remove_tree(aside)
        raise


def _fill(path: str, code: str, entries: List[Entry]) -> None:
    pushed = os.stat(code).st_ctime_ns
    for entry in entries:
        target = f"{path}/{entry.path}"
        if entry.kind == "d":
            os.mkdir(target, entry.mode | 0o700)
        elif entry.kind == "l":
            os.symlink(entry.content, target)
        else:
            _put(f"{code}/{entry.path}", target, entry, pushed)


def _put(source: str, target: str, entry: Entry, pushed: int) -> None:
    """Link or copy one file; `pushed` is when the tree was put into the store, in nanoseconds."""
    try:
        status = os.lstat(source)
    except FileNotFoundError:
        raise Altered from None
    if status.st_mtime_ns > pushed or status.st_size != entry.size:
        raise Altered
    if entry.path.endswith(LINKED) or status.st_size >= LARGE:
        try:
            return os.link(source, target)
        except OSError as problem:
            # The file system has no links, or the file has as many as it may have.
            if problem.errno not in (errno.EMLINK, errno.EPERM, errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP):
                raise
    copy_file(source, target)
    os.chmod(target, entry.mode)
    # By its time, a file that the run did not change is known.
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


# ---- a folder that runs share


def _memo(path: str) -> str:
    """Return the path of the file that names the tree which was last put into a kept folder."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.code")


def _remember(path: str, code: str) -> None:
    with open(_memo(path) + ".aside", "w", encoding="utf-8") as file:
        file.write(code)
    os.replace(_memo(path) + ".aside", _memo(path))


def _update(request: Request, path: str, code: str, entries: List[Entry]) -> None:
    """Replace the files whose pushed content changed since the last time, and remove those that are pushed no more."""
    before: Dict[str, Entry] = {}
    try:
        with open(_memo(path), encoding="utf-8") as file:
            record = read_record(record_path(request, file.read()))
        before = {entry.path: entry for entry in record.entries} if record else {}
    except OSError:
        # The first time, or the note is gone: every file is replaced.
        before = {}
    pushed = os.stat(code).st_ctime_ns
    for entry in entries:
        target = f"{path}/{entry.path}"
        if before.pop(entry.path, None) == entry and os.path.lexists(target):
            continue
        status = status_of(target)
        if entry.kind == "d" and status is not None and stat.S_ISDIR(status.st_mode):
            continue
        if status is not None:
            remove_tree(target)
        if entry.kind == "d":
            os.mkdir(target, entry.mode | 0o700)
        elif entry.kind == "l":
            os.symlink(entry.content, target)
        else:
            _put(f"{code}/{entry.path}", target, entry, pushed)
    for name in sorted(before, reverse=True):
        try:
            (os.rmdir if before[name].kind == "d" else os.unlink)(f"{path}/{name}")
        except OSError:
            # It holds files of a run, or is gone.
            continue


# ---- the store


def collect_store(request: Request) -> Dict[str, object]:
    """Remove the trees of the store that no run on this node uses; return their names and size.

    With `look`, nothing is removed, and the runs in the folders `without` count as removed.
    """
    root, size, names = os.path.join(request.workdir, "store"), 0, []
    unused = [tree for kind in KINDS for tree in _trees(os.path.join(root, kind))]
    gone = [str(folder) for folder in request.params.get("without") or ()]
    used = _used(request.workdir, unused, gone)
    for path in unused:
        record = record_path(request, path)
        if path in used or _is_recent(path, record, float(request.params.get("recent", RECENT))):
            continue
        size += _size(path)
        names.append(os.path.relpath(path, root))
        if not request.params.get("look"):
            remove_tree(path)
            if os.path.exists(record):
                os.unlink(record)
    return {"names": names, "size": size}


def _trees(folder: str) -> List[str]:
    if not os.path.isdir(folder):
        return []
    return sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")


def _used(workdir: str, trees: List[str], gone: List[str]) -> Set[str]:
    """Return the trees that the records of runs on this node name."""
    used: Set[str] = set()
    for folder, folders, names in os.walk(os.path.join(workdir, "runs")):
        if folder in gone:
            folders.clear()
            continue
        for name in names:
            if name not in ("spec.json", "train.json"):
                continue
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                text = file.read()
            used |= {path for path in trees if os.path.join(*path.split(os.sep)[-3:]) in text}
    return used


def _is_recent(path: str, record: str, seconds: float) -> bool:
    times = [status.st_mtime for status in (status_of(path), status_of(record)) if status is not None]
    return time.time() - max(times, default=0.0) < seconds


def _size(folder: str) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            status = status_of(os.path.join(path, name))
            total += status.st_size if status is not None else 0
    return total
