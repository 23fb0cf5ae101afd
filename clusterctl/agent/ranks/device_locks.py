"""Lock the devices of an attempt so that runs of other users on the same node see that they are in use.

A lock is a file in a folder that every user of the node can write to, one for each device file. It is held as long as
the supervisor lives. A device without a device file, as on a CPU or in a sandbox, is not locked. Users in containers
with such folders of their own do not see each other's locks.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from typing import Any, Dict, List, Mapping, Sequence

from clusterctl.agent import compact_json
from clusterctl.agent.processes import text_of

# The first that exists with the sticky bit and is writable by all is used: the same one for all users.
FOLDERS = ("/run/lock", "/dev/shm", "/tmp")
DEVICE_FILES = {"npu": "/dev/davinci{}", "cuda": "/dev/nvidia{}"}
SHARED_FOLDER = 0o1777
# Limit of bytes of a lock file, which names its holder.
LONGEST = 4096


class DeviceLocks:
    """The locks of one attempt; the kernel releases them when this process ends."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        folders: Sequence[str] = FOLDERS,
        device_files: Mapping[str, str] = DEVICE_FILES,
    ) -> None:
        pattern = device_files.get(str(spec.get("kind")))
        self._paths: Dict[int, str] = {}
        self._held: List[int] = []
        self._owner = {"run": str(spec.get("run_id")), "user": os.geteuid(), "pid": os.getpid()}
        self.note = ""
        """Why the devices could not be locked; empty if they were, or if none needs a lock."""
        devices = [] if pattern is None or spec.get("share_devices") else list(spec.get("devices") or ())
        present = {device: pattern.format(device) for device in devices if pattern is not None}
        present = {device: path for device, path in present.items() if os.path.exists(path)}
        folder = next((path for path in folders if _is_shared(path)), None)
        if present and folder is None:
            self.note = f"devices are not locked against other users: none of {', '.join(folders)} is shared"
        elif folder is not None:
            self._paths = {device: os.path.join(folder, _name(path)) for device, path in present.items()}

    def take(self) -> List[str]:
        """Lock every device; return in words which ones another run holds. Then none is locked."""
        taken = []
        for device, path in sorted(self._paths.items()):
            try:
                holder = self._lock(path)
            except OSError as problem:
                self.note = f"device {device} is not locked against other users: {path}: {problem.strerror}"
                continue
            if holder:
                taken.append(f"device {device} is in use by {holder}")
        if taken:
            self.release()
        return taken

    def _lock(self, path: str) -> str:
        """Lock a file and write this run into it; return in words which other process holds it, or ""."""
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, compact_json.dumps(self._owner).encode(), 0)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            return holder
        except OSError:
            os.close(descriptor)
            raise
        self._held.append(descriptor)
        return ""

    def release(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held = []


def _is_shared(folder: str) -> bool:
    try:
        return stat.S_IMODE(os.stat(folder).st_mode) & SHARED_FOLDER == SHARED_FOLDER
    except OSError:
        return False


def _name(device_file: str) -> str:
    """Return the name of a device's lock file, by its device number: two names of one device are one lock."""
    result = os.stat(device_file)
    if stat.S_ISCHR(result.st_mode) or stat.S_ISBLK(result.st_mode):
        return f"clusterctl-device-{os.major(result.st_rdev)}-{os.minor(result.st_rdev)}.lock"
    return f"clusterctl-device-{result.st_dev}-{result.st_ino}.lock"


def _open(path: str) -> int:
    """Open a lock file, or create it so that all users can write to it.

    An existing file is opened without O_CREAT, which the kernel may refuse for another user's file in such a folder.
    Raise an OSError if another user has laid something else there: a pipe, or another name of a file of this user.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            pass
        else:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                return descriptor
            os.close(descriptor)
            raise OSError(errno.EINVAL, f"not a plain file with one name; user {status.st_uid} owns it")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        # Whatever the umask is.
        os.fchmod(descriptor, 0o666)
        return descriptor


def _holder(descriptor: int) -> str:
    """Return in words who holds a lock. The kernel names the process; any user can have written the file."""
    status = os.fstat(descriptor)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    locks = (line.split() for line in text_of("/proc/locks").splitlines())
    pid = next((words[4] for words in locks if words[1:2] + words[5:6] == ["FLOCK", place]), "")
    users = [line.split() for line in text_of(f"/proc/{pid}/status").splitlines() if line.startswith("Uid:")]
    if not users:
        return "another run"
    user = users[0][2]
    try:
        owner = json.loads(os.pread(descriptor, LONGEST, 0))
    except (OSError, ValueError, RecursionError):
        owner = None
    if isinstance(owner, dict) and (str(owner.get("user")), str(owner.get("pid"))) == (user, pid):
        return f"{str(owner.get('run'))[:80]} of user {user}"
    return f"process {pid} of user {user}"
