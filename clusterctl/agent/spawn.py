"""Start a program without the module `subprocess`: importing that takes 9 ms of the node's CPU.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

# The C half: the module around it imports enum.
import _signal as signal  # type: ignore[import-not-found]
import errno
import os
from io import FileIO

# Importing typing takes 10 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Union

    Child = Union["Process", "subprocess.Popen[bytes]"]

# The exit codes that shells use for a program that does not exist or cannot be started.
NOT_FOUND, NOT_RUNNABLE = 127, 126
# Python ignores these signals; a program that it starts must not.
RESTORED = tuple(getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name))
# The exit code of a process whose exit status another process took.
UNKNOWN = 255


def raw(text: str) -> bytes:
    """Return the bytes of a text from the launcher, independent of the node's locale."""
    return text.encode("utf-8", "surrogateescape")


def environment(extra: Dict[str, Any], change: Optional[Dict[str, Any]] = None) -> Dict[bytes, bytes]:
    """Return the login's environment without the variables of SSH, changed by a setup, with `extra` added."""
    inherited = {name: value for name, value in os.environb.items() if not name.startswith(b"SSH_")}
    if change:
        inherited.update({raw(name): raw(value) for name, value in change["set"].items()})
        for name in change["unset"]:
            inherited.pop(raw(name), None)
    inherited.update({raw(str(name)): raw(str(value)) for name, value in extra.items()})
    return inherited


class Process:
    """A child process; its attributes have the names and meanings of those of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: Optional[int] = None
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        self.stdout: Optional[FileIO] = None
        self.stderr: Optional[FileIO] = None

    def poll(self) -> Optional[int]:
        """Return the exit code if the process has ended."""
        return self._take(os.WNOHANG)

    def wait(self) -> Optional[int]:
        """Return the exit code once the process has ended."""
        return self._take(0)

    def kill(self) -> None:
        """Send SIGKILL if the process has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _take(self, options: int) -> Optional[int]:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:
                pid, status = self.pid, UNKNOWN << 8
            if pid == self.pid:
                self.returncode = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return self.returncode


def command(argv: List[str]) -> List[bytes]:
    """Return argv as the kernel takes it.

    `~/` at the start of the program's name (not of arguments) is the login's home.
    """
    program = os.path.expanduser(argv[0]) if argv[0].startswith("~/") else argv[0]
    return [raw(entry) for entry in [program, *argv[1:]]]


def start(
    argv: List[bytes], env: Mapping[bytes, bytes], out: int, err: int, stdin: Optional[int] = None
) -> Child:
    """Start a program in a session of its own and in the present folder; raise OSError if that fails.

    `out`, `err` and `stdin` are open files. Without `stdin`, the program reads an empty file.
    """
    if not hasattr(os, "posix_spawn"):
        return _start_slowly(argv, env, out, err, stdin)
    files: "List[tuple[int, ...]]" = [(os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, err, 2)]
    problem: Optional[OSError] = None
    with open(os.devnull, "rb", buffering=0) as nothing:
        files.append((os.POSIX_SPAWN_DUP2, nothing.fileno() if stdin is None else stdin, 0))
        for path in candidates(argv[0], env):
            try:
                return Process(
                    os.posix_spawn(path, argv, env, file_actions=files, setsid=True, setsigdef=RESTORED)
                )
            except NotImplementedError:
                # An older C library has no flag for a new session.
                return _start_slowly(argv, env, out, err, stdin)
            except OSError as found:
                problem = found
    raise problem or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(argv[0]))


def start_with_pipes(argv: List[bytes], env: Mapping[bytes, bytes]) -> Child:
    """Start a program as `start` does; its output is read from `stdout` and `stderr` of what is returned."""
    (out, out_there), (err, err_there) = os.pipe(), os.pipe()
    try:
        process = start(argv, env, out_there, err_there)
    except (OSError, ValueError):
        os.close(out)
        os.close(err)
        raise
    finally:
        os.close(out_there)
        os.close(err_there)
    process.stdout, process.stderr = FileIO(out), FileIO(err)
    return process


def candidates(program: bytes, env: Mapping[bytes, bytes]) -> Iterator[bytes]:
    """Yield where a program may be: a name without a slash is looked up in the PATH that it will have."""
    if b"/" in program:
        yield program
        return
    for folder in env.get(b"PATH", os.fsencode(os.defpath)).split(b":"):
        path = os.path.join(folder or b".", program)
        if os.path.exists(path):
            yield path


def _start_slowly(
    argv: Sequence[bytes], env: Mapping[bytes, bytes], out: int, err: int, stdin: Optional[int]
) -> Child:
    import subprocess

    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=out,
        stderr=err,
        env=env,
        start_new_session=True,
    )
