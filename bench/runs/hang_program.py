"""A program of the drills that knows nothing of clusterctl: it meets in gloo's collectives as a layout does.

train.py LAYOUT STEP RANK WAY     (the rank hangs in a step, or is slow from then on)
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import hang_ways  # type: ignore[import-not-found]
import torch
import torch.distributed as dist


def main() -> None:
    layout, step, guilty, way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dist.init_process_group("gloo")
    os.environ["DRILL_BEGUN"] = "1"
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    own, grads = pairs[rank // 2], torch.ones(8)

    beat = Path(os.environ["CLUSTERCTL_RUN_DIR"]) / "heartbeat" / f"rank-{rank}"
    beat.parent.mkdir(exist_ok=True)

    def pipeline() -> None:
        if rank > 0:
            dist.recv(grads, rank - 1)
        if rank < world - 1:
            dist.send(grads, rank + 1)

    def tensor() -> None:
        for _ in range(3):
            dist.all_reduce(grads, group=own)

    parts = {"data": [], "tensor": [tensor], "pipeline": [pipeline], "both": [tensor, pipeline]}
    for number in range(1, 10_000):
        began = time.monotonic()
        if way == "slow" and rank == guilty and number >= step:
            time.sleep(0.2)
        elif way != "slow" and (number, rank) == (step, guilty):
            hang_ways.WAYS[way]()
        time.sleep(0.01)
        if way == "slow":
            beat.write_text(f"{number} {time.monotonic() - began:.3f}")
        for part in parts.get(layout, ()):
            part()
        if layout == "sharded":
            dist.all_gather([torch.empty(8) for _ in range(world)], grads)
        if layout == "barrier":
            dist.barrier()
        dist.all_reduce(grads)
        if rank == 0 and number < 50:
            print(f"number {number}", flush=True)


main()
