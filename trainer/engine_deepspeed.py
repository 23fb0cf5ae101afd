"""DeepSpeed as an engine: ZeRO 0 and 1. The only module that knows it.

Three of its habits are turned off: it compiles a communication op on every CPU node when it starts (needs
ninja and a compiler there), compiles its own AdamW for 41 s, and logs dozens of lines a rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer import env
from trainer.config import TrainConfig
from trainer.device import Device
from trainer.engine import StepResult, TrainState
from trainer.errors import InputError
from trainer.gradients import norm_of
from trainer.group import Groups
from trainer.holding import Arriving, load_parameters, shapes_of
from trainer.logical import cuts_of, own_of, whole_of
from trainer.optim import MOMENTS, adamw
from trainer.passes import Batch, Model, mean_loss, model_loss, tokens_of


def _import_deepspeed(device: Device) -> Any:
    env.preset("DS_ACCELERATOR", device.kind)
    env.preset(env.LOCAL_RANK, "0")  # a rank alone has none, and DeepSpeed insists
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
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _settings(config: TrainConfig, accumulation: int) -> dict[str, Any]:
    return {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optimizer.clip,
        "zero_optimization": {"stage": config.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**12,
    }


class _Places:
    """The tensor and data parallel groups under the names that DeepSpeed asks for."""

    def __init__(self, groups: Groups) -> None:
        self._data, self._tensor = groups.data, groups.tensor

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size

    def get_model_parallel_group(self) -> Any:
        return self._tensor.group

    def get_data_parallel_rank(self) -> int:
        return self._data.rank

    def get_data_parallel_world_size(self) -> int:
        return self._data.world

    def get_data_parallel_group(self) -> Any:
        return self._data.handle


class DeepSpeedEngine:
    """DeepSpeed in fp32; bf16 is autocast around the model, so that both engines mean the same by it."""

    def __init__(self, model: Model, config: TrainConfig, groups: Groups, device: Device) -> None:
        self.model, self.config, self.groups, self.device = model, config, groups, device
        self.data, self.parallel = groups.data, model.parallel
        self.cuts = cuts_of(model)
        self.shapes: Mapping[str, tuple[int, ...]] = shapes_of(model)
        deepspeed = _import_deepspeed(device)
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        for name, parameter in self.parameters.items():
            parameter.model_parallel = self.cuts[name].dim is not None  # type: ignore[attr-defined]
        accumulation = (config.global_batch or 0) // (config.micro_batch * self.data.world)
        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=model,
            optimizer=adamw(self.parameters, config.optimizer),
            config=_settings(config, accumulation),
            dist_init_required=False,
            mpu=_Places(groups) if self.parallel.size > 1 else None,
        )
        self.adamw: torch.optim.Optimizer = self.zero.optimizer if config.zero else self.zero

    def step(self, batch: Batch, rate: float, seed: int) -> StepResult:
        torch.manual_seed(seed)
        total, own = torch.zeros((), device=self.device.name), self.device.stopwatch()
        for micro in batch:
            loss = model_loss(self.engine, self.model, micro, self.device, self.config.precision)
            if micro is batch[-1]:
                own.stop()  # the last backward pass waits for the other ranks
            self.engine.backward(loss)
            total += loss.detach() / len(batch)
            if micro is not batch[-1]:
                self.engine.step()
        for settings in self.adamw.param_groups:
            settings["lr"] = rate
        norm = None if self.config.zero else self._norm()
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm() if norm is None else norm)
        tokens = tokens_of(batch, self.data.world, self.config.model.sequence)
        mean = self.data.total(float(total.item())) / self.data.world
        return StepResult(mean, norm, tokens, own_seconds=own.seconds())

    def _norm(self) -> float:
        """Without ZeRO, DeepSpeed keeps no norm in fp32; the gradients are already averaged here."""
        gradients = {name: one.grad for name, one in self.parameters.items() if one.grad is not None}
        return float(norm_of(gradients, self.cuts, self.parallel).item())

    def evaluate(self, batches: Iterable[Batch]) -> float:
        return mean_loss(self.model, batches, self.device, self.config.precision, self.data)

    def any(self, flag: bool) -> bool:
        return self.groups.everyone.any(flag)

    def state(self) -> TrainState:
        moments, taken = self._partitioned_state() if self.config.zero else self._whole_state()
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        weights = whole_of(weights, self.cuts, self.parallel)
        return TrainState(weights, whole_of(moments, self.cuts, self.parallel), taken)

    def load(self, model: Arriving, optimizer: Arriving, optimizer_steps: int) -> None:
        load_parameters(self.model, model)
        like = {f"{moment}.{name}": one for name, one in self.parameters.items() for moment in MOMENTS}
        moments = {
            key: own_of(key, whole, like[key], self.cuts, self.parallel) for key, whole in optimizer
        }
        if self.config.zero:
            self.zero.refresh_fp32_params()
            self._load_partitions(moments, optimizer_steps)
        elif optimizer_steps:
            for name, parameter in self.parameters.items():
                self.adamw.state[parameter] = self._adam_state(
                    {moment: moments[f"{moment}.{name}"] for moment in MOMENTS}, optimizer_steps
                )

    def _whole_state(self) -> tuple[dict[str, Tensor], int]:
        moments, taken = {}, 0
        for name, parameter in self.parameters.items():
            own = self.adamw.state.get(parameter, {})
            taken = int(own["step"].item()) if own else 0
            for moment in MOMENTS:
                moments[f"{moment}.{name}"] = own[moment] if own else torch.zeros_like(parameter)
        return moments, taken

    def _partitioned_state(self) -> tuple[dict[str, Tensor], int]:
        """Put together what stage 1 cut: a group's parameters in a row, padded, one equal slice a rank."""
        moments, taken = {}, 0
        for group_index, partition in enumerate(self.zero.single_partition_of_fp32_groups):
            own = self.adamw.state.get(partition, {})
            taken = int(own["step"].item()) if own else 0
            for moment in MOMENTS:
                flat = self.data.gather_flat(own[moment] if own else torch.zeros_like(partition))
                start = 0
                for name, parameter in self._in_group(group_index):
                    end = start + parameter.numel()
                    moments[f"{moment}.{name}"] = flat[start:end].view_as(parameter)
                    start = end
        return moments, taken

    def _load_partitions(self, moments: dict[str, Tensor], taken: int) -> None:
        for group_index, partition in enumerate(self.zero.single_partition_of_fp32_groups):
            if not taken:
                continue
            begin = partition.numel() * self.data.rank
            slices = {}
            for moment in MOMENTS:
                parts = [moments[f"{moment}.{name}"].flatten() for name, _ in self._in_group(group_index)]
                whole = torch.cat([*parts, parts[0].new_zeros(partition.numel() * self.data.world)])
                slices[moment] = whole[begin : begin + partition.numel()]
            self.adamw.state[partition] = self._adam_state(slices, taken)

    def _in_group(self, group_index: int) -> list[tuple[str, Tensor]]:
        names = {parameter: name for name, parameter in self.parameters.items()}
        return [
            (names[parameter], parameter) for parameter in self.zero.round_robin_bit16_groups[group_index]
        ]

    def _adam_state(self, moments: dict[str, Tensor], taken: int) -> dict[str, Tensor]:
        step = torch.tensor(float(taken), dtype=torch.float32, device=self.device.name)
        return {
            "step": step,
            **{moment: tensor.clone().to(self.device.name) for moment, tensor in moments.items()},
        }
