"""The ways in which a rank of the drills hangs; copied to the nodes, next to the program that calls them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable

FOREVER = 3600
# Of the kernel: attaches a filter to a socket; and a filter that drops every packet.
ATTACH_FILTER = 26
DROP = struct.pack("HBBI", 6, 0, 0, 0)


def hang_loader() -> None:
    select.select([], [], [], FOREVER)


def hang_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_loop() -> None:
    while True:
        sum(range(1000))


def hang_order() -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.ones(1), 0)


def hang_shape() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1 << 16))


def hang_link() -> None:
    """Lose every packet that arrives, also acknowledgements: the next collective gets no answer."""
    code = ctypes.create_string_buffer(DROP)
    program = struct.pack("HL", 1, ctypes.addressof(code))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as link:
                if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername():
                    link.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, program)


def hang_evaluation() -> None:
    total = 0.0
    while True:
        total += sum(number * 0.5 for number in range(10_000))


def hang_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, bytes(1 << 20))
    os.close(reading)


def hang_gc() -> None:
    class Slow:
        def __del__(self) -> None:
            select.select([], [], [], FOREVER)

    first, second = Slow(), Slow()
    first.other, second.other = second, first  # type: ignore[attr-defined]
    del first, second
    gc.collect()


def hang_disk() -> None:
    # No one writes into it: a read that the file system never answers.
    path = os.path.join(tempfile.mkdtemp(), "fifo")
    os.mkfifo(path)
    with open(path, "rb") as file:
        file.read()


def hang_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_gil() -> None:
    ctypes.PyDLL(None).sleep(FOREVER)


def hang_exit() -> None:
    os._exit(0)


def hang_child() -> None:
    with contextlib.suppress(OSError):
        subprocess.run(["sleep", str(FOREVER)], check=False)


WAYS: dict[str, Callable[[], None]] = {
    name.removeprefix("hang_"): way for name, way in list(globals().items()) if name.startswith("hang_")
}
