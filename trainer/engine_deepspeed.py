"""DeepSpeed as an engine: ZeRO 0 to 3, tensor and sequence parallel groups of our own, offload of the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import TrainConfig
from trainer.deepspeed_held import Moments, Shares
from trainer.deepspeed_setup import Places, import_deepspeed, settings
from trainer.device import Device
from trainer.engine import StepResult, TrainState
from trainer.gradients import norm_of
from trainer.group import Groups
from trainer.holding import Arriving, load_parameters, shapes_of
from trainer.layout import accumulation
from trainer.logical import cuts_of, own_of, parameter_of, whole_of
from trainer.optim import MOMENTS, adamw
from trainer.passes import Batch, Micro, Model, model_loss, tokens_of


class Loss(nn.Module):
    """What DeepSpeed calls: a micro-batch's loss in the precision asked for.

    An autocast around DeepSpeed's own call is turned off by it, without a word at this log level. Its bf16 mode is no
    choice: it would cast layer norms too, whose gradients torch then sums in bf16.
    """

    def __init__(self, model: Model, device: Device, precision: str) -> None:
        super().__init__()
        self.model, self.device, self.precision = model, device, precision

    def forward(self, *arguments: Tensor) -> Tensor:
        with self.device.autocast(self.precision):
            loss: Tensor = self.model(*arguments)
        return loss


class DeepSpeedEngine:
    """DeepSpeed in fp32; bf16 is autocast within the model."""

    def __init__(self, model: Model, config: TrainConfig, groups: Groups, device: Device) -> None:
        self.model, self.config, self.groups, self.device = model, config, groups, device
        self.data, self.parallel = groups.data, model.parallel
        self.cuts = cuts_of(model)
        self.shapes: Mapping[str, tuple[int, ...]] = shapes_of(model)
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        for name, parameter in self.parameters.items():
            parameter.model_parallel = self.cuts[name].dim is not None  # type: ignore[attr-defined]
            if self.cuts[name].partial and self.parallel.divides_sequence:
                parameter.register_hook(self._sum_of_parts)  # before DeepSpeed sees the gradient
        self.deepspeed = import_deepspeed(device)
        self.engine, self.zero, self.adamw = self._initialize()
        self.shares = Shares(self.zero, config.zero, self.parameters, self.data)
        self.moments = Moments(self.adamw, self.shares.rows)
        self.norm = 0.0

    def _initialize(self) -> tuple[Any, Any, torch.optim.Optimizer]:
        """DeepSpeed's engine, its optimizer, and torch's within."""
        config, parameters = self.config, self.parameters.values()
        micros = accumulation(config.global_batch or 0, config.micro_batch, self.data.world)
        numbers = sum(parameter.numel() for parameter in parameters)
        own = adamw(self.parameters, config.optimizer)
        module = Loss(self.model, self.device, config.precision)
        if config.zero == 3:
            # The table is used by the loss too, outside of its own module's pass.
            self.deepspeed.zero.register_external_parameter(self.model, self.model.tokens.weight)
        engine, zero, _, _ = self.deepspeed.initialize(
            model=module,
            optimizer=own,
            config=settings(config, micros, numbers, self.device),
            dist_init_required=False,
            mpu=Places(self.groups) if self.parallel.size > 1 else None,
        )
        if not config.zero:
            own.register_step_pre_hook(self._before_update)
        return engine, zero, zero.optimizer if config.zero else own

    def _sum_of_parts(self, gradient: Tensor) -> Tensor:
        """With sequence parallel: over what each tensor parallel rank has of its part of the sequence alone."""
        return self.parallel.sum(gradient.clone(memory_format=torch.contiguous_format))

    def _before_update(self, *_: object) -> None:
        """Without ZeRO, DeepSpeed knows no norm over all parts of the model, and takes a step that is not finite."""
        gradients = {name: one.grad for name, one in self.parameters.items() if one.grad is not None}
        self.norm = float(norm_of(gradients, self.cuts, self.parallel).item())
        limit = self.config.optimizer.clip
        if not self.norm < float("inf"):
            for parameter in self.parameters.values():
                parameter.grad = None  # an update without gradients changes nothing
        elif 0 < limit < self.norm:
            for gradient in gradients.values():
                gradient.mul_(limit / (self.norm + 1e-6))

    def step(self, batch: Batch, rate: float, seed: int) -> StepResult:
        torch.manual_seed(seed)
        total, own = torch.zeros((), device=self.device.name), self.device.stopwatch()
        for settings_ in self.adamw.param_groups:
            settings_["lr"] = rate
        for micro in batch:
            loss = self._loss(micro)
            if micro is batch[-1]:
                own.stop()  # the last backward pass waits for the other ranks
            self.engine.backward(loss)
            total += loss.detach() / len(batch)
            self.engine.step()
        if self.config.zero:
            self.norm = float(self.engine.get_global_grad_norm())
        tokens = tokens_of(batch, self.data.world, self.config.model.sequence)
        mean = self.data.total(float(total.item())) / self.data.world
        skipped = not self.norm < float("inf")
        return StepResult(mean, self.norm, tokens, skipped, own_seconds=own.seconds())

    def _loss(self, micro: Micro) -> Tensor:
        return model_loss(self.engine, self.model, micro, self.device, "fp32")

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        self.engine.eval()
        losses = [self._loss(micro) for batch in batches for micro in batch]
        self.engine.train()
        if not losses:
            return float("nan")
        return self.data.total(float(torch.stack(losses).double().mean().item())) / self.data.world

    def any(self, flag: bool) -> bool:
        return self.groups.everyone.any(flag)

    def state(self) -> TrainState:
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        averages = {moment: self.moments.of(moment) for moment in MOMENTS}
        for name, parameter in self.parameters.items():
            weight = self.shares.collect(name, self.shares.rows) if self.config.zero == 3 else parameter.detach()
            self._keep(weights, name, weight)
            for moment in MOMENTS:
                self._keep(moments, f"{moment}.{name}", self.shares.collect(name, averages[moment]))
        return TrainState(weights, moments, self.moments.taken)

    def _keep(self, state: dict[str, Tensor], key: str, own: Tensor | None) -> None:
        """Whole on rank 0; what is put together of tensor parallel parts is so on the device, one at a time."""
        if own is not None and self.data.rank == 0:
            state.update(whole_of({key: own.to(self.device.name)}, self.cuts, self.parallel))

    def load(self, model: Arriving, optimizer: Arriving, optimizer_steps: int) -> None:
        if self.config.zero == 3:
            self._load_divided(model)
        else:
            load_parameters(self.model, model)
        if self.config.zero:
            self.zero.refresh_fp32_params()
        if optimizer_steps:
            self.moments.begin(optimizer_steps)
        averages = {moment: self.moments.of(moment) for moment in MOMENTS}
        for key, whole in optimizer:
            name = parameter_of(key, self.cuts)
            part = self._own(key, whole, self.shares.shapes[name])
            self.shares.put(name, part, averages[key.removesuffix(f".{name}")])

    @torch.no_grad()
    def _load_divided(self, arriving: Arriving) -> None:
        """Each parameter is whole for as long as it takes to change it."""
        for name, whole in arriving:
            parameter = self.parameters[name]
            with self.deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.copy_(self._own(name, whole, parameter.shape))

    def _own(self, key: str, whole: Tensor, shape: torch.Size) -> Tensor:
        like = torch.empty(shape, device="meta")
        return own_of(key, whole, like, self.cuts, self.parallel)
