"""Read the output of a program within a limit of time and size.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from typing import Dict, Tuple

# Bytes per read from a pipe.
PIECE = 1 << 16


def outputs_of(process: "subprocess.Popen[bytes]", seconds: float, limit: int) -> "Tuple[bytes, bytes, bool]":
    """Return the first `limit` bytes of stdout and of stderr, and whether the program ended in time.

    Further output is read and dropped. A program that did not end in time still runs: the caller ends it.
    """
    out = process.stdout.fileno() if process.stdout else -1
    err = process.stderr.fileno() if process.stderr else -1
    buffers: Dict[int, bytearray] = {out: bytearray(), err: bytearray()}
    waiting, deadline = [number for number in buffers if number >= 0], time.monotonic() + seconds
    while waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        for descriptor in select.select(waiting, [], [], left)[0]:
            data = os.read(descriptor, PIECE)
            if not data:
                waiting.remove(descriptor)
            buffers[descriptor] += data[: max(0, limit - len(buffers[descriptor]))]
    ended = not waiting and _has_ended(process, deadline)
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()
    return bytes(buffers[out]), bytes(buffers[err]), ended


def _has_ended(process: "subprocess.Popen[bytes]", deadline: float) -> bool:
    """Return whether a program that has closed its output exits until `deadline`."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
