"""The DeepSpeed engine: ZeRO 0 to 3, pipelines, offload, and the trainer's tensor and sequence parallel groups.

It avoids three defaults of DeepSpeed: compiling a communication op at the start on every CPU node (which needs ninja
and a compiler on the node), compiling its own AdamW for 41 s, and logging dozens of lines per rank.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterctl.wire.contract import LOCAL_RANK
from trainer import env
from trainer.checkpoint.part import Part
from trainer.config.deepspeed import parts_on_disk, settings_of, uses_disk
from trainer.config.layout import accumulation
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.engine.deepspeed_passes import DeepSpeedRunner, PipelineRunner, SingleStageRunner
from trainer.engine.deepspeed_shards import Moments, Shares
from trainer.engine.nvme_folders import RunFolders, folders
from trainer.engine.optimizer import MOMENTS, LossScale, adamw
from trainer.engine.parts import Place
from trainer.engine.passes import Batch, Model, loss_weights, tokens_of
from trainer.engine.rank_state import clip_factor, norm_of, saves_copy
from trainer.engine.rows_on_disk import RowsOnDisk
from trainer.engine.torch_engine import StepResult
from trainer.errors import InputError
from trainer.model.adapter import AdaptedColumns, AdaptedRows
from trainer.model.cuts import cuts_of, learned, shapes_of
from trainer.parallel.group import Groups


class DeepSpeedEngine:
    """Trains with DeepSpeed in fp32; with bf16 and fp16 the model casts its fp32 weights by autocast."""

    def __init__(
        self,
        model: Model,
        config: TrainConfig,
        groups: Groups,
        device: Device,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        run: str = "",
    ) -> None:
        """`shapes`: the shapes of the whole model's parameters; needed on a rank with one stage of a pipeline.

        `run`: the name of the folder in which DeepSpeed keeps files.
        """
        self.config, self.groups, self.device = config, groups, device
        self.data, self.parallel, self.pipeline = groups.data, groups.tensor, groups.pipeline
        self.model, self.cuts, self.shapes = model, cuts_of(model), shapes or shapes_of(model, model.parallel)
        self.run = run
        self.folders: RunFolders | None = None
        self.loss_scale = LossScale(config.loss_scale if config.precision == "fp16" else None)
        everything = dict(model.named_parameters())
        self.parameters: Mapping[str, nn.Parameter] = learned(everything)
        self.fixed = {name: each for name, each in everything.items() if name not in self.parameters}
        for name, parameter in everything.items():
            parameter.model_parallel = self.cuts[name].dim is not None  # type: ignore[attr-defined]
            if name in self.parameters and self.cuts[name].partial and self.parallel.divides_sequence:
                # This hook runs before DeepSpeed uses the gradient.
                parameter.register_hook(self._sum_of_parts)
        self.deepspeed = import_deepspeed(device)
        if config.zero == 3:
            self._register_external()
        self.runner: DeepSpeedRunner
        if self.pipeline.stages > 1:
            self.runner = PipelineRunner(self.deepspeed, model, device, config.precision, groups)
        else:
            self.runner = SingleStageRunner(model, device, config.precision, groups.data)
        self.engine, self.zero, self.adamw = self._initialize()
        self.shares = Shares(self.zero, config.zero, self.parameters, self.data)
        self.moments = Moments(self.adamw, self.shares.rows)
        self.disk = (
            RowsOnDisk(self.zero, self.adamw, self.shares.rows) if uses_disk(config.deepspeed) else None
        )
        self.norm = 0.0

    def _register_external(self) -> None:
        """Register the parameters that a module uses without owning them, so that DeepSpeed gathers them for it."""
        register = self.deepspeed.zero.register_external_parameter
        # The loss also uses the table, outside of the table's own forward pass.
        register(self.model, self.model.head.weight)
        for module in self.model.modules():
            if isinstance(module, (AdaptedColumns, AdaptedRows)):
                for parameter in module.adapter.parameters():
                    register(module, parameter)

    def _initialize(self) -> tuple[Any, Any, torch.optim.Optimizer]:
        """Return DeepSpeed's engine, its optimizer, and the torch optimizer that it wraps."""
        config = self.config
        micros = accumulation(config.global_batch or 0, config.micro_batch, self.data.world)
        numbers = sum(each.numel() for each in (*self.parameters.values(), *self.fixed.values()))
        own = adamw(self.parameters, config.optimizer, fused=self.device.kind in ("cpu", "cuda"))
        options = settings(config, micros, numbers, self.device, self.run)
        if uses_disk(config.deepspeed):
            require_libaio()
            given = settings_of(config.deepspeed)
            self.folders = RunFolders(given, self.run, self.groups.everyone.rank)
        groups = ParallelGroups(self.groups) if self.parallel.size > 1 and self.pipeline.stages == 1 else None
        # Divide the model before it is moved, so that no device needs memory for all of it.
        if config.zero == 3:
            how_divided = {
                "data_parallel_group": self.data.handle,
                "mpu": groups,
                "config_dict_or_path": options,
            }
            # Without a type this becomes fp32; if the type were fp32, saved weights would be bf16 on a CPU.
            self.deepspeed.zero.Init(self.runner.module, **how_divided)
        engine, zero, _, _ = self.deepspeed.initialize(
            model=self.runner.module,
            optimizer=own,
            config=options,
            dist_init_required=False,
            mpu=groups,
        )
        if not config.zero:
            own.register_step_pre_hook(self._before_update)
        return engine, zero, zero.optimizer if config.zero else own

    def _sum_of_parts(self, gradient: Tensor) -> Tensor:
        """Return the sum of the gradients that each tensor parallel rank computed from its part of the sequence."""
        return self.parallel.sum(gradient.clone(memory_format=torch.contiguous_format))

    def _before_update(self, *_: object) -> None:
        """Compute the norm; unscale and clip the gradients, or drop them if they are not finite.

        Without ZeRO, DeepSpeed computes no norm over all parts of the model, and applies gradients that are not finite.
        """
        scale = self.loss_scale.value
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        counted = {name: gradient for name, gradient in gradients.items() if self.pipeline.counts(name)}
        self.norm = float(norm_of(counted, self.cuts, self.parallel, self.pipeline, self.data).item()) / scale
        if not self.norm < float("inf"):
            for parameter in self.parameters.values():
                # Without gradients the update changes nothing.
                parameter.grad = None
        elif (factor := clip_factor(self.norm, self.config.optimizer.clip) / scale) != 1:
            for gradient in gradients.values():
                gradient.mul_(factor)

    def step(
        self, batch: Batch, rate: float, seed: int, meanwhile: Callable[[], None] | None = None
    ) -> StepResult:
        torch.manual_seed(seed)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        scale, weights = self.loss_scale.value, loss_weights(self.model, batch, self.data)
        if self.config.zero:
            # DeepSpeed's optimizers multiply the loss by this factor, and divide the norm and the gradients by it.
            self.zero.loss_scale = scale
        own = self.device.stopwatch()
        loss = self.runner.step(self.engine, batch, weights, own, 1.0 if self.config.zero else scale)
        if self.config.zero:
            self.norm = float(self.engine.get_global_grad_norm())
        # This is also False for NaN.
        finite = self.norm < float("inf")
        calibrating = not finite and self.loss_scale.can_fall
        self.loss_scale.update(overflow=not finite)
        return StepResult(
            loss,
            self.norm,
            tokens_of(batch, self.data.world, self.config.model.sequence, self.model.joins_samples),
            skipped=not finite,
            own_seconds=own.seconds(),
            loss_scale=scale if self.config.precision == "fp16" else None,
            calibrating=calibrating,
        )

    def evaluate(self, batches: Iterable[Batch]) -> float:
        return self.runner.evaluate(self.engine, batches)

    def finish(self) -> None:
        """Log the count, time and rate of each exchange if the settings ask for it; remove this rank's files."""
        if settings_of(self.config.deepspeed).get("comms_logger", {}).get("enabled"):
            self.deepspeed.comm.log_summary()
        if self.folders is not None:
            self.folders.remove()

    def any(self, flag: bool) -> bool:
        return self.groups.everyone.any(flag)

    @property
    def optimizer_steps(self) -> int:
        return self.moments.taken

    def parts(self) -> list[Part]:
        return self._parts(*self._weights_and_moments())

    def _weights_and_moments(self) -> tuple[Sequence[Tensor], Mapping[str, Sequence[Tensor]]]:
        """Return this rank's rows of weights and of each moment; rows on disk are copied to memory."""
        if self.disk is not None:
            return self.disk.read()
        return self.shares.rows, {moment: self.moments.of(moment) for moment in MOMENTS}

    def _parts(self, rows: Sequence[Tensor], averages: Mapping[str, Sequence[Tensor]]) -> list[Part]:
        found = list[Part]()
        for index, (name, parameter) in enumerate(self.parameters.items()):
            place = Place(self.shares.shapes[name], self.cuts[name], self.parallel)
            divided = self.config.zero > 0 or index % self.data.world == self.data.rank
            owned = divided and saves_copy(name, self.cuts[name], self.parallel, self.pipeline)
            start, own = self.shares.own(name, rows)
            found += place.flat(name, start, own, owned)
            for moment in MOMENTS:
                start, own = self.shares.own(name, averages[moment])
                found += place.flat(f"{moment}.{name}", start, own, owned)
            if self.config.zero in (1, 2):
                found += place.part(name, parameter.detach(), owned=False)
        return found

    def fixed_parts(self) -> list[Part]:
        found = list[Part]()
        for name, parameter in self.fixed.items():
            if self.config.zero < 3:
                place = Place(parameter.shape, self.cuts[name], self.parallel)
                found += place.part(name, parameter.detach(), owned=False)
                continue
            # Each rank has an equal part of the flattened parameter; the last parts may be short or empty.
            shard: Tensor = parameter.ds_tensor.detach().view(-1)  # type: ignore[attr-defined]
            start, whole = shard.numel() * self.data.rank, int(parameter.ds_numel)  # type: ignore[attr-defined]
            place = Place(parameter.ds_shape, self.cuts[name], self.parallel)  # type: ignore[attr-defined]
            found += place.flat(name, min(start, whole), shard[: max(0, whole - start)], owned=False)
        return found

    def replicate(self, names: Collection[str]) -> None:
        if not self.config.zero:
            everything = {**self.parameters, **self.fixed}
            self.data.broadcast(everything[name].data for name in sorted(names))

    @torch.no_grad()
    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        if self.disk is not None:
            weights, averages = self.disk.read()
            fill(self._parts(weights, averages))
            self.disk.write(weights, averages, optimizer_steps)
            return
        if optimizer_steps:
            self.moments.begin(optimizer_steps)
        fill(self.parts())
        if self.config.zero == 3:
            for name, parameter in self.parameters.items():
                _, own = self.shares.own(name, self.shares.rows)
                parameter.ds_tensor.data.view(-1)[: own.numel()].copy_(own)  # type: ignore[attr-defined]


# Gradients (with ZeRO 3 also weights) are exchanged in pieces of at most this many numbers. With DeepSpeed's default of
# 5e8 every device needs a buffer of 2 GB, even for a small model.
BUCKET = 1 << 25
# With ZeRO 3, smaller parameters are not divided: gathering them costs more than the saved memory is worth.
SMALL = 100_000


def import_deepspeed(device: Device) -> Any:
    """Import DeepSpeed without log lines or compilation, on torch's process group; return the module."""
    env.preset("DS_ACCELERATOR", device.kind)
    if device.kind == "cpu":
        # A process without a launcher has no local rank, and DeepSpeed requires one.
        env.preset(LOCAL_RANK, "0")
    else:
        # DeepSpeed uses the local rank as the number of the device.
        env.replace(LOCAL_RANK, str(device.index))
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger
    except ImportError as error:
        raise InputError(
            f"train.engine is deepspeed, but it cannot be imported: {error}",
            "install deepspeed into the Python of this rank, or use engine: torch",
        ) from error
    logger.setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch 2.13 deprecated, which would warn at many calls.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Use the existing process group.
    deepspeed.init_distributed(device.collectives, dist_init_required=False)
    return deepspeed


def require_libaio() -> None:
    """Raise an InputError if DeepSpeed cannot compile its library for reading and writing files."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise InputError(
            "offload to nvme: DeepSpeed needs libaio to compile its asynchronous file access, and it is missing",
            "apt-get install libaio-dev on each node, or offload to device: cpu",
        )


def settings(
    config: TrainConfig, accumulation: int, numbers: int, device: Device, run: str
) -> dict[str, object]:
    """Return DeepSpeed's config; `numbers` is the number of parameters in this rank's part of the model."""
    bucket = max(1, min(BUCKET, numbers))
    zero: dict[str, object] = {
        "stage": config.zero,
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_param_persistence_threshold": min(SMALL, numbers // 100),
    }
    if config.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.kind != "cpu"}
    given = settings_of(config.deepspeed)
    zero |= {**given.get("zero_optimization", {}), **folders(given, run), "stage": config.zero}
    if "offload_param" in parts_on_disk(given):
        # DeepSpeed 0.19.8 prefetches a weight twice where a forward pass turns into a backward pass, and fails.
        zero["stage3_prefetch_bucket_size"] = 0
    return {
        **given,
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": accumulation,
        # Without ZeRO this module clips the gradients itself.
        "gradient_clipping": config.optimizer.clip if config.zero else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**12,
        # Do not divide messages between stages further: the sequence may already be divided.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }


class ParallelGroups:
    """The tensor and data parallel groups under the names that DeepSpeed uses.

    A group of all ranks is passed as torch's WORLD and not as None: with None, DeepSpeed does not sum norms over it.
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
