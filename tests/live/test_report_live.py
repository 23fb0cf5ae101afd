"""What the last words of a failed run are, for faults that the kernel deals in."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.conftest import Shell

pytestmark = pytest.mark.live
# Version 1; in version 2 a group with processes may limit none below.
MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 60 MB, where they can be made and the kernel's log can be read."""
    group = MEMORY / f"clusterctl-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("60000000")
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    group.rmdir()


def last_words(shell: Shell, code: str) -> tuple[str, str]:
    """The last message, and all of it."""
    done = shell("launch", "--no-code", "--", "python3", "-c", code)
    assert done.returncode == 5, done.stderr
    return done.stderr.rpartition("error: root cause: ")[2], done.stderr


def test_a_rank_that_the_kernel_killed_for_memory_is_named_so(shell: Shell, small_cgroup: Path) -> None:
    code = f"""
import os, time
if os.environ["RANK"] == "1":
    open("{small_cgroup}/cgroup.procs", "w").write(str(os.getpid()))
    hold = [bytearray(5_000_000) for _ in range(100)]
time.sleep(600)
"""
    cause, words = last_words(shell, code)
    assert "rank 1 on node1 (device 1) was killed by the kernel: the memory limit of its container" in cause
    assert "kernel: Memory cgroup out of memory: Killed process" in words
    assert "3 other ranks ended as a consequence: stopped" in words


def test_the_rank_that_failed_stands_before_the_one_that_lost_it(shell: Shell) -> None:
    code = """
import os, socket, time
rank, rendezvous = os.environ["RANK"], os.environ["CLUSTERCTL_RUN_ID"]
if rank == "0":  # hears of it through a real connection, as a collective does
    server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    peer = server.accept()[0]
    while peer.recv(100):
        pass
    raise ConnectionResetError("Connection closed by peer")
if rank == "3":
    while True:
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            break
        except OSError:
            time.sleep(0.05)
    import ctypes
    ctypes.string_at(0)
time.sleep(600)
"""
    cause, words = last_words(shell, code)
    assert cause.startswith("rank 3 on node2 (device 1) ended by a segmentation fault (SIGSEGV)")
    assert "3 other ranks ended as a consequence: " in words
