"""The disk that DeepSpeed's offload to NVMe takes on a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.wire.train_summary import Hardware
from trainer.config.attention import WIDE
from trainer.config.deepspeed import parts_on_disk, settings_of
from trainer.config.layout import Layout
from trainer.plan.memory import learned_sizes, sizes_of

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

# Bytes of a number in files: the optimizer has masters, two moments and gradients, all in fp32 in every precision.
ON_DISK = {"offload_optimizer": 4 * WIDE, "offload_param": WIDE}


def offload_disk(config: TrainConfig, layout: Layout, hardware: Hardware) -> int:
    """Return the bytes on the disk of a node with all its ranks, at most: rows of less than 1 MiB stay in memory."""
    parts = parts_on_disk(settings_of(config.deepspeed))
    if not parts:
        return 0
    whole = sizes_of(config, layout, 0)
    numbers = {"offload_optimizer": learned_sizes(config, layout, whole).all, "offload_param": whole.all}
    rank = sum(ON_DISK[part] * -(-numbers[part] // layout.data) for part in parts)
    return rank * min(layout.world, hardware.devices_per_node or layout.world)
