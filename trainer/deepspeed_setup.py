"""How DeepSpeed is imported and set up here; with its pipeline's module the only one that imports it.

Three of its habits are turned off: it compiles a communication op on every CPU node when it starts (needs
ninja and a compiler there), compiles its own AdamW for 41 s, and logs dozens of lines a rank.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch.distributed as dist

from trainer import env
from trainer.config import TrainConfig
from trainer.device import Device
from trainer.errors import InputError
from trainer.group import Groups

# Gradients (and with ZeRO 3 weights) travel in pieces of at most so many numbers. DeepSpeed's own 5e8 are a buffer
# of 2 GB on every device, whatever the model.
BUCKET = 1 << 25
# With ZeRO 3, parameters of fewer numbers stay whole: to fetch them costs more than they do.
SMALL = 100_000


def import_deepspeed(device: Device) -> Any:
    """The library, quiet, without anything to compile, and on torch's process group."""
    env.preset("DS_ACCELERATOR", device.kind)
    if device.kind == "cpu":
        env.preset(env.LOCAL_RANK, "0")  # a rank alone has none, and DeepSpeed insists
    else:
        env.replace(env.LOCAL_RANK, str(device.index))  # which it takes for the device's number
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger
    except ImportError as error:
        raise InputError(
            f"train.engine is deepspeed, but it cannot be imported: {error}",
            "pip install deepspeed, or use engine: torch",
        ) from error
    logger.setLevel(logging.ERROR)
    # Collectives that torch 2.13 renamed, and DeepSpeed calls by their old names: a line for many a call.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(device.collectives, dist_init_required=False)  # on the group that there is
    return deepspeed


def settings(config: TrainConfig, accumulation: int, numbers: int, device: Device) -> dict[str, Any]:
    """DeepSpeed's config; `numbers`: that this rank's part of the model has."""
    bucket = max(1, min(BUCKET, numbers))
    zero: dict[str, Any] = {
        "stage": config.zero,
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_param_persistence_threshold": min(SMALL, numbers // 100),
    }
    if config.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.kind != "cpu"}
    return {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optimizer.clip if config.zero else 0.0,  # without ZeRO the engine clips by itself
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**12,
        # Its pipeline would divide what stages send along any dimension, also where a sequence is divided already.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }


class Places:
    """The tensor and data parallel groups under the names that DeepSpeed asks for.

    None is torch's name for all ranks, but to DeepSpeed there is no such group then, and a norm is not summed.
    """

    def __init__(self, groups: Groups) -> None:
        self._data, self._tensor = groups.data, groups.tensor

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size

    def get_model_parallel_group(self) -> Any:
        return self._tensor.group or dist.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return self._data.rank

    def get_data_parallel_world_size(self) -> int:
        return self._data.world

    def get_data_parallel_group(self) -> Any:
        return self._data.handle or dist.group.WORLD
