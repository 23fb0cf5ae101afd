"""The requests of the launcher about checkpoints on this node: list, verify, protect, complete and remove them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from typing import Any, Dict, Optional

from clusterctl.agent.processes import read_limited
from clusterctl.agent.request import Refused, Request
from clusterctl.wire import saved
from clusterctl.wire.saved import FRESH, IN_USE, OLD, RENEWED, UNFINISHED, Damaged

# Bytes between two reports of progress.
REPORT = 64 << 20
# Entries that a list copies from a manifest, if it has them.
FACTS = (
    "state",
    "loss",
    "eval_loss",
    "tokens",
    "consumed_samples",
    "time",
    "layout",
    "save_seconds",
)


# ---- list


def checkpoints(request: Request) -> Dict[str, Any]:
    """Return the checkpoints in a folder, newest first, as far as this node has their files."""
    return listing(request.path())


def listing(folder: str) -> Dict[str, Any]:
    """Return the checkpoints in a folder, newest first, and the disk that it is on; `missing`: no such folder."""
    if not os.path.isdir(folder):
        return {"path": folder, "missing": True, "latest": "", "checkpoints": [], "disk": disk_of(folder)}
    names = [name for name in os.listdir(folder) if step_of(name) is not None]
    names.sort(key=lambda name: (-(step_of(name) or 0), OLD in name, name))
    latest = ""
    with contextlib.suppress(OSError):
        latest = read_limited(os.path.join(folder, saved.LATEST), 200).decode("utf-8", "replace").strip()
    found = [describe(os.path.join(folder, name)) for name in names]
    return {"path": folder, "missing": False, "latest": latest, "checkpoints": found, "disk": disk_of(folder)}


def step_of(name: str) -> Optional[int]:
    """Return the step of a folder's name such as step-00000100 or step-00000100.old."""
    word, _, rest = name.partition(OLD)
    digits = word[5:] if word.startswith("step-") else ""
    sound = len(digits) >= 8 and digits.isascii() and digits.isdecimal() and (not rest or rest.isdecimal())
    return int(digits) if sound else None


def describe(folder: str) -> Dict[str, Any]:
    """Return the facts of one checkpoint and the names of its files that exist here with the right size."""
    result: Dict[str, Any] = {"name": os.path.basename(folder), "path": folder, "have": [], "faults": []}
    result["in_use"] = is_marked(folder)
    try:
        manifest = saved.read_manifest(folder)
    except Damaged as problem:
        return {**result, "faults": [str(problem)], "step": step_of(result["name"]) or 0, "digest": ""}
    except OSError as problem:
        return {
            **result,
            "faults": [_text(problem, folder)],
            "step": step_of(result["name"]) or 0,
            "digest": "",
        }
    for name, entry in manifest.files.items():
        path = os.path.join(folder, name)
        try:
            size = saved.size_of(path)
            if size == entry.bytes:
                result["have"].append(name)
            else:
                result["faults"].append(f"{path}: damaged: has {size} bytes, the manifest says {entry.bytes}")
        except FileNotFoundError:
            pass
        except (OSError, Damaged) as problem:
            result["faults"].append(_text(problem, path))
    result.update((key, manifest.facts.get(key)) for key in FACTS)
    result["step"] = manifest.step
    result["digest"] = digest_of(folder)
    result["count"] = len(manifest.files)
    result["bytes"] = sum(entry.bytes for entry in manifest.files.values())
    return result


def digest_of(folder: str) -> str:
    """Return the SHA-256 of the manifest, which differs when a step is saved again."""
    content = read_limited(os.path.join(folder, saved.MANIFEST), saved.MOST_MANIFEST)
    return hashlib.sha256(content).hexdigest()


def _text(problem: Exception, path: str) -> str:
    if isinstance(problem, OSError):
        return f"{problem.filename or path}: {problem.strerror or problem}"
    return str(problem)


def disk_of(path: str) -> Dict[str, int]:
    """Return the free and total bytes of the disk that a path is, or would be, on."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    status = os.statvfs(path)
    return {"free": status.f_bavail * status.f_frsize, "total": status.f_blocks * status.f_frsize}


# ---- verify


def verify_checkpoint(request: Request) -> Dict[str, Any]:
    """Compare the files of a checkpoint that are on this node with their hashes; report progress in bytes."""
    reported = [0]

    def report(done: int) -> None:
        reported[0] += done
        if reported[0] >= REPORT:
            request.send(b"", bytes=reported[0])
            reported[0] = 0
        if request.cancelled.is_set():
            raise Refused("cancelled", "the verification was cancelled")

    result = verify(request.path(), report)
    request.send(b"", bytes=reported[0])
    return result


def verify(folder: str, report: Any) -> Dict[str, Any]:
    """Return for each file here its fault ("" if it is valid) and the damaged tensor."""
    result: Dict[str, Any] = {"path": folder, "files": {}, "faults": [], "digest": ""}
    try:
        manifest = saved.read_manifest(folder)
        result["digest"] = digest_of(folder)
        saved.check_cover(manifest)
    except (Damaged, OSError) as problem:
        tensor = problem.tensor if isinstance(problem, Damaged) else ""
        result["faults"].append({"fault": _text(problem, folder), "tensor": tensor, "file": saved.MANIFEST})
        return result
    for name in manifest.files:
        if not os.path.lexists(os.path.join(folder, name)):
            continue
        result["files"][name] = {"fault": "", "tensor": ""}
        try:
            saved.verify_file(folder, manifest, name, report)
        except (Damaged, OSError) as problem:
            tensor = problem.tensor if isinstance(problem, Damaged) else ""
            result["files"][name] = {"fault": _text(problem, os.path.join(folder, name)), "tensor": tensor}
    return result


# ---- protect, remove


def is_marked(folder: str) -> bool:
    """Return whether a pull, a copy or a reader protects a checkpoint now."""
    now = time.time()
    try:
        names = [name for name in os.listdir(folder) if name.startswith(IN_USE)]
    except OSError:
        return False
    for name in names:
        with contextlib.suppress(OSError):
            if now - os.stat(os.path.join(folder, name)).st_mtime < FRESH:
                return True
    return False


def hold_checkpoint(request: Request) -> Dict[str, Any]:
    """Protect checkpoints from being removed until the request is cancelled or the launcher is gone."""
    paths = [str(path) for path in request.need("paths", list)]
    token = f"{os.getpid()}-{request.id}-{os.urandom(4).hex()}"
    with contextlib.ExitStack() as held:
        for path in paths:
            held.enter_context(protected(path, token))
        request.send(b"", held=True)
        while not request.cancelled.wait(RENEWED):
            for path in paths:
                with contextlib.suppress(OSError):
                    os.utime(os.path.join(path, IN_USE + token))
    return {}


@contextlib.contextmanager
def protected(folder: str, token: str) -> Any:
    """Keep a checkpoint from being removed: by a file for other nodes, and by a lock for this one."""
    mark = os.path.join(folder, IN_USE + token)
    try:
        handle = os.open(os.path.join(folder, saved.MANIFEST), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as problem:
        raise Refused("not-found", _text(problem, folder)) from None
    try:
        # Some network disks have no locks; the file alone protects there.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        _mark(mark)
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            os.unlink(mark)


def _mark(path: str) -> None:
    """Make the file that protects a checkpoint; raise Refused if the checkpoint is gone."""
    try:
        with open(path, "w", encoding="utf-8"):
            pass
    except FileNotFoundError:
        raise Refused("not-found", f"{os.path.dirname(path)} was removed just now") from None
    except OSError:
        # A folder that this user may only read cannot be removed by this user either.
        return


def remove_checkpoint(request: Request) -> Dict[str, Any]:
    """Remove a step's folder unless it is in use; with `check` only report whether it is."""
    path = request.path()
    return remove(path, str(request.params.get("digest") or ""), check=bool(request.params.get("check")))


def remove(folder: str, digest: str, check: bool) -> Dict[str, Any]:
    """Return the bytes that were removed, or would be, and why a folder stays: it is in use, or was saved again."""
    if step_of(os.path.basename(folder)) is None or os.path.islink(folder):
        raise Refused("usage", f"{folder} is not the folder of a checkpoint")
    if not os.path.isdir(folder):
        return {"bytes": 0, "kept": ""}
    if is_marked(folder):
        return {"bytes": 0, "kept": "it is being read or copied"}
    handle = None
    with contextlib.suppress(OSError):
        handle = os.open(os.path.join(folder, saved.MANIFEST), os.O_RDONLY | os.O_CLOEXEC)
    try:
        if handle is not None:
            _lock_alone(handle)
            if digest and digest_of(folder) != digest:
                return {"bytes": 0, "kept": "it was saved again"}
        size = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
        if not check:
            _remove(folder)
    except BlockingIOError:
        return {"bytes": 0, "kept": "it is being read or copied"}
    finally:
        if handle is not None:
            os.close(handle)
    return {"bytes": size, "kept": ""}


def _lock_alone(handle: int) -> None:
    """Lock an open manifest; raise BlockingIOError if a reader has a lock. Some network disks have no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return


def _remove(folder: str) -> None:
    import shutil

    # Rename the folder first: a reader must not choose a folder that is half removed.
    gone = os.path.join(os.path.dirname(folder), f"{UNFINISHED}{os.path.basename(folder)}-removed")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


# ---- copies from other nodes


def complete_checkpoint(request: Request) -> Dict[str, Any]:
    """Move files that were copied to the folder `source` into the checkpoint `path`; remove `source`.

    `digest` is that of the manifest which the files belong to. A checkpoint that this node lacks is made of them; a
    damaged manifest is replaced.
    """
    source, path = request.path("source"), request.path()
    try:
        return {"files": complete(source, path, request.need("digest", str))}
    finally:
        import shutil

        shutil.rmtree(source, ignore_errors=True)


def complete(source: str, folder: str, digest: str) -> int:
    """Return how many files were moved; raise Refused if one does not match the manifest."""
    new = not os.path.lexists(folder)
    sound = not new and _has_manifest(folder)
    own = folder if sound else source
    try:
        if digest_of(own) != digest:
            raise Refused("changed", f"{folder} was saved again meanwhile")
        manifest = saved.read_manifest(own)
        names = [name for name in os.listdir(source) if name in manifest.files]
        for name in names:
            _check_copy(os.path.join(source, name), manifest.files[name])
        for name in () if new else names if sound else (*names, saved.MANIFEST):
            os.replace(os.path.join(source, name), os.path.join(folder, name))
    except (OSError, Damaged) as problem:
        raise Refused("damaged", _text(problem, source)) from None
    if new:
        _sync(os.path.join(source, saved.MANIFEST))
        _sync(source)
        os.rename(source, folder)
        _sync(os.path.dirname(folder))
    else:
        _sync(folder)
    return len(names)


def _has_manifest(folder: str) -> bool:
    """Return whether a checkpoint's manifest can be read."""
    try:
        saved.read_manifest(folder)
    except (OSError, Damaged):
        return False
    return True


def _check_copy(path: str, entry: saved.SavedFile) -> None:
    """Raise Damaged unless a copied file has the size and the header that the manifest records; sync it to the disk.

    The copy was verified when it arrived; the header tells whether it is the file of this save.
    """
    if saved.size_of(path) != entry.bytes:
        raise Damaged(f"{path}: does not have the size that the manifest says")
    if path.endswith(saved.PARTS) and entry.holds is not None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            saved.read_header(handle, path, entry.sha256)
        finally:
            os.close(handle)
    _sync(path)


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- shared disks

SHARED_MARK = ".shared-"


def probe_shared(request: Request) -> Dict[str, Any]:
    """Write, look for, or remove a file in a folder, so that other nodes can tell whether they share it.

    `fault` says why the folder cannot be used; `seen` whether the file of `token` is there.
    """
    folder, action = request.path(), request.need("action", str)
    mark = os.path.join(folder, f"{SHARED_MARK}{request.need('token', str)}")
    try:
        if not os.path.isdir(folder):
            return {"seen": False, "fault": f"{folder}: no such folder"}
        saved.check_above(folder)
        saved.check_access(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            return {"seen": False, "fault": f"{folder}: this user may not write to it"}
        if action == "write":
            with open(mark, "x", encoding="utf-8"):
                pass
        elif action == "remove":
            os.unlink(mark)
        # A network disk may show a new file some seconds later; listing the folder refreshes it.
        return {"seen": os.path.basename(mark) in os.listdir(folder), "fault": ""}
    except (OSError, Damaged) as problem:
        return {"seen": False, "fault": _text(problem, folder)}
