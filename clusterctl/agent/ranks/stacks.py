"""Write the stacks of a rank's threads to the end of its log before it is ended.

A trainer writes its own on a signal that would end any other program. py-spy shows those of every Python program, if
it is installed on the node.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

from clusterctl.agent.bounded import outputs_of
from clusterctl.agent.processes import group_members, send, text_of

# Importing typing takes 10 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Sequence, Tuple

# Seconds that a rank's threads take to write their stacks.
WRITING = 0.5
# Limit in seconds for all py-spy processes of a node together.
PATIENCE = 5.0
# Limit of processes of a rank whose stacks are written: the rank and its data loaders.
MOST = 8
# Bytes kept of the stacks of one process.
LARGEST = 4 << 20
TOOL = "py-spy"


def save(ranks: Sequence[Tuple[Dict[str, Any], int, str]], beating: Sequence[int]) -> None:
    """Write the stacks of each living rank (its spec, its pid, the path of its log) to the end of its log."""
    groups = [group for spec, group, _ in ranks if spec["rank"] in beating]
    own = [pid for pid in group_members(groups) if catches(pid, signal.SIGUSR1)]
    send(own, signal.SIGUSR1)
    if own:
        time.sleep(WRITING)
    request = [
        (log, pid, process) for spec, group, log in ranks for pid, process in _asked(tool_of(spec), group)
    ]
    deadline = time.monotonic() + PATIENCE
    for log, pid, process in request:
        _write(log, pid, _output_of(process, deadline))


def catches(pid: int, number: int) -> bool:
    """Return True if a process handles a signal: a program with a heartbeat of its own may not."""
    rows = [
        line.split() for line in text_of(f"/proc/{pid}/status").splitlines() if line.startswith("SigCgt:")
    ]
    return bool(rows and int(rows[0][1], 16) >> (number - 1) & 1)


def tool_of(spec: Dict[str, Any]) -> Optional[str]:
    """Return the py-spy next to the rank's own Python, or on its path; None if the node has none."""
    program = os.path.expanduser(str(spec["argv"][0]))
    candidate = os.path.join(os.path.dirname(program), TOOL)
    if os.path.isabs(program) and os.access(candidate, os.X_OK):
        return candidate
    return shutil.which(TOOL, path=(spec.get("env") or {}).get("PATH") or os.environ.get("PATH"))


def _asked(tool: Optional[str], group: int) -> "List[Tuple[int, subprocess.Popen[bytes]]]":
    """Return a running py-spy for each Python process of a rank; it stops none of them, since one may hang."""
    if tool is None:
        return []
    pythons = sorted(pid for pid in group_members([group]) if _is_python(pid))[:MOST]
    result: "List[Tuple[int, subprocess.Popen[bytes]]]" = []
    for pid in pythons:
        argv = [tool, "dump", "--nonblocking", "--pid", str(pid)]
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError:
            return result
        result.append((pid, process))
    return result


def _is_python(pid: int) -> bool:
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
    """Append the stacks in one piece, so that they stay together although the rank writes too."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"clusterctl: where process {pid} stands, by py-spy:\n".encode() + output)
    finally:
        os.close(fd)
