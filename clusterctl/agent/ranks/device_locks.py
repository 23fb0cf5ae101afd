"""Lock the devices of an attempt so that runs of other users on the same node see that they are in use.

A lock is a file in a folder that every user of the node can write to, one for each device file. It is held as long as
the supervisor lives. A device without a device file, as on a CPU or in a sandbox, is not locked. Users in containers
with such folders of their own do not see each other's locks.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import fcntl
import os
import stat

from clusterctl.agent import lean

# Importing typing takes 10 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping, Sequence

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
                descriptor = _open(path)
            except OSError as problem:
                self.note = f"device {device} is not locked against other users: {path}: {problem.strerror}"
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                taken.append(f"device {device} is in use by {_holder(descriptor)}")
                os.close(descriptor)
                continue
            self._held.append(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, lean.dumps(self._owner).encode(), 0)
        if taken:
            self.release()
        return taken

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
    """
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            pass
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        # Whatever the umask is.
        os.fchmod(descriptor, 0o666)
        return descriptor


def _holder(descriptor: int) -> str:
    """Return the holder that a lock file names; any user can have written it."""
    try:
        owner = lean.loads(os.pread(descriptor, LONGEST, 0))
    except (OSError, ValueError, RecursionError):
        return "another run"
    if not isinstance(owner, dict):
        return "another run"
    return f"{str(owner.get('run'))[:80]} of user {str(owner.get('user'))[:20]}"
