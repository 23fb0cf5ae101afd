"""Compute the cost of checkpoints: bytes on disk, memory for the copies of background saves, and time."""

from __future__ import annotations

from clusterctl.wire.train_summary import CheckpointCost, Hardware
from trainer.config.layout import Layout
from trainer.config.train_config import TrainConfig
from trainer.errors import Fault
from trainer.plan.memory import learned_parameters, learned_sizes, sizes_of

# Assumed GB/s: of a node's disk and hashing together, and of a copy within a node's memory.
DISK_GBYTES = 0.4
COPY_GBYTES = 2.0
# Bytes per parameter: the fp32 weight; the weight and two moments.
WEIGHT, STATE = 4, 12
# A rank with more bytes saves in the background; the same limit as in trainer.checkpoint.checkpointer.
SMALL = 64 << 20


def checkpoint_cost(
    config: TrainConfig, layout: Layout, hardware: Hardware, step_seconds: float = 0.0
) -> CheckpointCost:
    """Return the cost of a checkpoint of this training; `step_seconds`: the time of a step, 0 if unknown."""
    width = STATE if config.save.state == "all" else WEIGHT
    rank = width * max(_numbers_of_a_rank(config, layout, stage) for stage in range(layout.pipeline))
    whole = width * learned_parameters(config)
    ranks = min(layout.world, hardware.devices_per_node or layout.world)
    node = min(whole, rank * ranks)
    background = {"always": True, "never": False}.get(config.save.background, rank > SMALL)
    seconds = node / (DISK_GBYTES * 1e9)
    stall = node / (COPY_GBYTES * 1e9) if background else seconds
    count, shared, copies = _kept(config), bool(config.save.dir), config.save.copies
    between = config.save.every * step_seconds
    return CheckpointCost(
        bytes=whole,
        kept=count,
        node_bytes=node,
        staging_bytes=node if background else 0,
        seconds=seconds,
        stall_seconds=stall,
        stall_share=stall / (stall + between) if between else 0.0,
        copies=copies,
        shared=shared,
        disk_bytes=count * (whole if shared else min(whole, copies * node)),
        disk_gbytes=DISK_GBYTES,
    )


def disk_faults(config: TrainConfig, cost: CheckpointCost) -> list[Fault]:
    """Return a fault if the checkpoints do not fit the disk that the config or the inventory describes."""
    room = int(config.hardware.disk * 1e9)
    if not room or cost.disk_bytes <= room:
        return []
    disk = "the shared disk" if cost.shared else "each node"
    each = cost.disk_bytes // cost.kept
    counted = f"{cost.kept} checkpoints of {size_text(each)}, the one in progress included"
    problem = f"{counted}, need {size_text(cost.disk_bytes)} on {disk}, which has {size_text(room)}"
    fitting = room // each
    remedy = (
        f"keep at most {fitting - 1}" if fitting > 1 else "save: {state: weights}, more nodes or another disk"
    )
    return [Fault("train.save.keep", problem, remedy)]


def size_text(number: int) -> str:
    """Return a number of bytes in TB, GB or MB."""
    for unit, letter in ((1e12, "TB"), (1e9, "GB")):
        if number >= unit * 0.9995:  # three digits would show less as 1e+03 of the unit below
            return f"{number / unit:.3g} {letter}"
    return f"{number / 1e6:.3g} MB"


def _numbers_of_a_rank(config: TrainConfig, layout: Layout, stage: int) -> int:
    """Return how many parameters are saved by the rank of a stage that saves most."""
    sizes = learned_sizes(config, layout, sizes_of(config, layout, stage))
    share = -(-sizes.all // layout.data)
    if config.zero >= 2 or (config.engine == "deepspeed" and config.zero):
        return share
    # Each parameter is saved whole, by one of the ranks.
    return max(share, sizes.table)


def _kept(config: TrainConfig) -> int:
    keep, steps = config.save.keep, config.steps
    saves = steps // config.save.every + 1 if config.save.every else 1
    forever = steps // keep.every if keep.every else 0
    return min(saves, keep.last + 1 + keep.best + forever)
