"""Find where the threads of ranks stand, without ending any.

A trainer writes its stacks on a signal that would end any other program. py-spy shows those of every Python program, if
it is installed on the node and may look at the process. A program that runs Python's faulthandler writes its own when
it is aborted, which is as good an end as any for one that hangs.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from clusterctl.agent.bounded import outputs_of
from clusterctl.agent.processes import group_members, send, stat_of, text_of
from clusterctl.agent.ranks.frames import Frame, frames_in
from clusterctl.agent.records import AttemptFiles

# Limit in seconds for ranks to write their stacks: a tenth of a second on an idle machine.
WRITING = 2.0
# Seconds without growth after which a rank has written all of them.
WRITTEN = 0.1
# Limit in seconds for all py-spy processes of a node together.
PATIENCE = 3.0
# Limit of processes of a rank whose stacks are written: the rank and its data loaders.
MOST = 8
# Bytes kept of the stacks of one process.
LARGEST = 4 << 20
TOOL = "py-spy"
# Why a rank's stack is not known.
NO_TOOL = "py-spy is not installed there"
NOT_PYTHON = "it is no Python program"


class Process:
    """The process of a rank, or of a launcher's worker; its pid is 0 if it has ended."""

    def __init__(self, rank: int, via: int, pid: int, program: str, path: str) -> None:
        """`via`: the rank whose log has the output. `program` and `path` are those that the rank was started with."""
        self.rank, self.via, self.pid, self.program, self.path = rank, via, pid, program, path
        # Whether it is one of a launcher's workers.
        self.worker = False
        self.environ: Dict[str, str] = {}
        self.local_rank: Optional[int] = None
        self.exit_code: Optional[int] = None
        self.signal: Optional[int] = None
        self.frames: List[Frame] = []
        # Why there are none.
        self.unseen = ""

    def as_json(self) -> Dict[str, object]:
        """Return its part of an observation."""
        names = ("rank", "via", "worker", "local_rank", "exit_code", "signal", "unseen")
        frames = [{**frame._asdict(), "text": frame.text()} for frame in self.frames]
        return {**{name: getattr(self, name) for name in names}, "pid": self.pid or None, "frames": frames}


def collect(files: AttemptFiles, processes: Sequence[Process], save: bool = False) -> None:
    """Find where the main thread of each process stands; `save` also writes all stacks to the ends of the logs."""
    living = [process for process in processes if process.pid]
    logs = {
        process.pid: _error_log(process.pid) for process in living if save and _is_trainer(files, process)
    }
    ends = {pid: os.path.getsize(log) for pid, log in logs.items() if log}
    send(logs, signal.SIGUSR1)
    outputs = _spied(files, living, save)
    _await_stacks({str(logs[pid]): end for pid, end in ends.items()})
    for process in living:
        text = outputs.get(process.pid, "")
        process.frames = frames_in(text)
        if not process.frames and process.pid in ends:
            process.frames = frames_in(_text_after(str(logs[process.pid]), ends[process.pid]))
        process.unseen = "" if process.frames else why_unseen(process, text)


def _await_stacks(ends: Dict[str, int]) -> None:
    """Wait until files have grown beyond their earlier ends, and do not grow any more."""
    deadline, before = time.monotonic() + WRITING, ends
    while ends and time.monotonic() < deadline:
        time.sleep(WRITTEN)
        sizes = {path: os.path.getsize(path) for path in ends}
        if sizes == before and all(size > ends[path] for path, size in sizes.items()):
            return
        before = sizes


def why_unseen(process: Process, text: str) -> str:
    """Return why no stack of a process is known, from what py-spy printed."""
    if not is_python(process.pid):
        return NOT_PYTHON
    if tool_of(process) is None:
        return NO_TOOL
    return "py-spy: " + (text.strip().splitlines() or ["no output"])[-1][:200]


def _is_trainer(files: AttemptFiles, process: Process) -> bool:
    """Return True if a process answers SIGUSR1 with its stacks: it has a heartbeat and handles the signal."""
    beats = os.path.exists(os.path.join(files.heartbeats, f"rank-{process.rank}"))
    return beats and catches(process.pid, signal.SIGUSR1)


def _error_log(pid: int) -> Optional[str]:
    """Return the file to which a process writes its errors; None if that is no file."""
    path = f"/proc/{pid}/fd/2"
    try:
        return os.readlink(path) if stat.S_ISREG(os.stat(path).st_mode) else None
    except OSError:
        return None


def _text_after(path: str, offset: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(LARGEST).decode("utf-8", "replace")
    except OSError:
        return ""


def catches(pid: int, number: int) -> bool:
    """Return True if a process handles a signal: a program with a heartbeat of its own may not."""
    rows = [
        line.split() for line in text_of(f"/proc/{pid}/status").splitlines() if line.startswith("SigCgt:")
    ]
    return bool(rows and int(rows[0][1], 16) >> (number - 1) & 1)


def abort(files: AttemptFiles, processes: Iterable[Process]) -> None:
    """End the processes that write their stacks when they are aborted, and that SIGTERM would end immediately too.

    What a worker wrote into a file of its own is copied to the log of its launcher, which is ended right after.
    """
    found = [process for process in processes if process.pid]
    chosen = [
        each for each in found if catches(each.pid, signal.SIGABRT) and not catches(each.pid, signal.SIGTERM)
    ]
    own = [(each, _error_log(each.pid)) for each in chosen if each.worker]
    ends = [(each, log, os.path.getsize(log)) for each, log in own if log]
    for each in chosen:
        _without_core(each.pid)
    send([each.pid for each in chosen], signal.SIGABRT)
    deadline = time.monotonic() + WRITING
    while any(stat_of(each.pid)[:1] not in ([], ["Z"], ["X"]) for each in chosen):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for each, log, end in ends:
        lines = _text_after(log, end).splitlines()
        text = "".join(f"[rank{each.rank}]:{line}\n" for line in lines)
        _append(files.log(each.via, "err"), text.encode("utf-8", "replace"))


def _without_core(pid: int) -> None:
    """Let a process leave no core file."""
    import resource

    try:
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    except OSError:
        # It has ended, or this login may not.
        return


def tool_of(process: Process) -> Optional[str]:
    """Return the py-spy next to the rank's own Python, or on its path; None if the node has none."""
    started = text_of(f"/proc/{process.pid}/cmdline").partition("\0")[0]
    for program in (os.path.expanduser(process.program), started):
        candidate = os.path.join(os.path.dirname(program), TOOL)
        if os.path.isabs(program) and os.access(candidate, os.X_OK):
            return candidate
    return shutil.which(TOOL, path=process.path)


def _spied(files: AttemptFiles, living: Sequence[Process], save: bool) -> Dict[int, str]:
    """Return by pid what py-spy printed about each rank; it stops none of them, since one may hang.

    `save` also asks for the other processes of each rank, and writes all to the logs.
    """
    running: "Dict[int, Tuple[Process, subprocess.Popen[bytes]]]" = {}
    for process in living:
        tool = tool_of(process)
        group = int((stat_of(process.pid)[2:3] or ["0"])[0])
        others = sorted(group_members([group]) - {process.pid}) if save and group else []
        for pid in [process.pid, *others][:MOST] if tool else ():
            started = _started(str(tool), pid) if pid not in running and is_python(pid) else None
            if started is not None:
                running[pid] = process, started
    deadline = time.monotonic() + PATIENCE
    result: Dict[int, str] = {}
    for pid, (process, started) in running.items():
        output = _output_of(started, deadline)
        if save:
            _write(files.log(process.via, "err"), pid, output)
        result[pid] = output.decode("utf-8", "replace")
    return result


def _started(tool: str, pid: int) -> "Optional[subprocess.Popen[bytes]]":
    """Return a running py-spy; None if it cannot be started."""
    argv = [tool, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        return subprocess.Popen(
            argv, stdin=quiet, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError:
        return None


def is_python(pid: int) -> bool:
    """Return True by what a process maps: a program that embeds Python counts, a shell that starts one does not."""
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return "python" in name or "libpython" in text_of(f"/proc/{pid}/maps")


def _output_of(process: "subprocess.Popen[bytes]", deadline: float) -> bytes:
    """Return what py-spy printed until `deadline`."""
    out, _, ended = outputs_of(process, max(deadline - time.monotonic(), 0.1), LARGEST)
    if ended:
        return out
    process.kill()
    return out + b"py-spy did not end in time\n"


def _write(log: str, pid: int, output: bytes) -> None:
    _append(log, f"clusterctl: where process {pid} stands, by py-spy:\n".encode() + output)


def _append(log: str, output: bytes) -> None:
    """Append in one piece, so that it stays together although the rank writes too."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, output)
    finally:
        os.close(fd)
