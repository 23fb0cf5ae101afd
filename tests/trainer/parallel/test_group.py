"""Ranks may come late: what a node prepares before they meet runs against no collective's timeout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]

RANK = """
import sys, time
from datetime import timedelta
from trainer.parallel import group
from trainer.device import Device
from trainer.env import Env

rank, port = int(sys.argv[1]), int(sys.argv[2])
group.PATIENCE = timedelta(seconds=2)
if rank == 2:
    sys.stdin.read()  # still at its index
joined = group.Group.join(Env(rank, rank, 3, 3, "127.0.0.1", port), Device("cpu"))
print(joined.total(rank + 1), flush=True)
group.leave(joined, 0)
"""


def test_a_rank_that_comes_later_than_any_collective_may_take_is_waited_for() -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    try:
        # Four times what a collective may take, most of it after torch was loaded.
        ranks[0].wait(8)
        raise AssertionError("a rank gave up")
    except subprocess.TimeoutExpired:
        pass
    try:
        outputs = [rank.communicate("go on")[0] for rank in reversed(ranks)]
    finally:
        for rank in ranks:
            rank.kill()
    assert outputs == ["6.0\n"] * 3
