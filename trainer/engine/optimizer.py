"""AdamW, the learning rate of each step, and the loss scale of fp16."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import native
from native.masters import join, split
from trainer.config.amounts import BatchSizes, in_samples
from trainer.config.parts import LossScaleConfig, OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def decay_of(parameter: nn.Parameter, config: OptimizerConfig) -> float:
    """Return the weight decay of a parameter: matrices decay, biases and layer norms do not."""
    return config.weight_decay if parameter.dim() >= 2 else 0.0


def adamw(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, fused: bool = True
) -> torch.optim.AdamW:
    """Return torch's AdamW, for engines that need a torch optimizer; `fused`: use the fused kernel if there is one."""
    decays = dict.fromkeys(decay_of(parameter, config) for parameter in parameters.values())
    groups = [
        {"params": [p for p in parameters.values() if decay_of(p, config) == decay], "weight_decay": decay}
        for decay in decays
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


class AdamW:
    """AdamW over named tensors: parameters, or a rank's shares of them.

    It uses no torch.optim object: the first one in a process loads torch's compiler, 1.5 s of every rank's start.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: OptimizerConfig,
        decays: Mapping[str, float],
        ops: native.Choice,
        masters: Mapping[str, Tensor] | None = None,
        host: bool = False,
        remainders: bool = False,
    ) -> None:
        """Start with zero moments. `ops` chooses the AdamW kernel.

        `masters`: the fp32 values of parameters that have another type. Updates use them from now on.

        `host`: moments and masters stay in CPU memory and the CPU updates them. Once per step, gradients are copied to
        the CPU and new weights to the device.

        `remainders`: between steps, the masters of bf16 weights consist of these weights and 16 more bits; see
        native.masters. The results are the same.
        """
        self.host, self.config, self.decays = host, config, decays
        self.ops = native.choose("cpu") if host else ops
        self.parameters = dict(parameters)
        self.masters = dict(masters or {})
        """fp32 copies of the parameters that have another type or are on another device."""
        if host:
            self.masters = {
                name: self.masters.get(name, parameter).detach().to("cpu", copy=True)
                for name, parameter in self.parameters.items()
            }
        self.moments = {
            f"{moment}.{name}": torch.zeros_like(
                parameter, dtype=torch.float32, device="cpu" if host else None
            )
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
        }
        self.divides = remainders
        self.remainders: dict[str, Tensor] = {}
        """For bf16 weights without an entry in `masters`: the bits that extend them to their fp32 values."""
        self.taken = 0

    def join(self) -> None:
        """Store all masters as fp32 tensors in `masters`, to save or load them, until the next step."""
        for name in list(self.remainders):
            square, parameter = self.moments[f"exp_avg_sq.{name}"], self.parameters[name]
            self.masters[name] = join(parameter.data, self.remainders.pop(name), square)

    def divide(self) -> None:
        """Store the masters of bf16 weights as remainders, if this optimizer uses remainders."""
        if not self.divides:
            return
        for name in [name for name in self.masters if self.parameters[name].dtype == torch.bfloat16]:
            parameter, square = self.parameters[name].data, self.moments[f"exp_avg_sq.{name}"]
            self.remainders[name] = torch.empty_like(parameter, dtype=torch.int16)
            split(self.masters.pop(name), parameter, self.remainders[name], square)

    @torch.no_grad()
    def step(
        self, rate: float, gradients: Mapping[str, Tensor] | None = None, factor: float | Tensor = 1.0
    ) -> None:
        """Update the parameters by the gradients times `factor`.

        `gradients` are those of all parameters, in any type; by default the `grad` of each parameter. Afterwards their
        values are undefined.
        """
        if gradients is None:
            grads = {name: parameter.grad for name, parameter in self.parameters.items()}
            gradients = {name: gradient for name, gradient in grads.items() if gradient is not None}
        self.divide()
        names = list(self.parameters)
        lower = [self.parameters[name] if name in self.masters and not self.host else None for name in names]
        update = native.AdamWStep(
            held=[self.masters.get(name, self.parameters[name].data) for name in names],
            gradients=[gradients[name].cpu() if self.host else gradients[name] for name in names],
            averages=[self.moments[f"exp_avg.{name}"] for name in names],
            squares=[self.moments[f"exp_avg_sq.{name}"] for name in names],
            lowered=lower,
            decays=[self.decays[name] for name in names],
            step=self.taken + 1,
            rate=rate,
            betas=self.config.betas,
            eps=self.config.eps,
            factor=factor,
            remainders=[self.remainders.get(name) for name in names],
        )
        self.ops.adamw(update)
        self.taken += 1
        for name in names if self.host else ():
            self.parameters[name].copy_(self.masters[name])


ONE = BatchSizes(1)


def bounds(
    config: OptimizerConfig, steps: int, batches: BatchSizes = ONE, sequence: int = 1
) -> tuple[float, float]:
    """Return how many samples the warm-up and the whole schedule have; a sample has `sequence` tokens."""
    whole = float(batches.consumed(steps))
    length = in_samples(config.decay, batches, sequence, whole) if config.decay else whole
    if config.warmup:
        return in_samples(config.warmup, batches, sequence, length), length
    return float(batches.consumed(config.warmup_steps)), length


def learning_rate(
    config: OptimizerConfig, step: int, steps: int, batches: BatchSizes = ONE, sequence: int = 1
) -> float:
    """Return the rate of a step, counted from 1: it rises linearly during the warm-up, then falls to min_lr and stays.

    It depends on the samples consumed, so it changes more slowly while batches are small. The step's own samples count:
    Megatron uses this rate for the next step, because it counts only the samples before a step. Megatron's first
    warm-up step therefore has rate 0, and none of its steps has min_lr before the schedule ends.
    """
    warmup, length = bounds(config, steps, batches, sequence)
    done = batches.consumed(step)
    if done <= warmup:
        return config.lr * (done / warmup)
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        falls = max(1.0, config.wsd_decay * length)
        left = min(1.0, max(0.0, (length - done) / falls))
    else:
        share = min(1.0, (done - warmup) / max(1, length - warmup))
        if config.schedule == "exponential":
            return float(config.lr * (config.min_lr / config.lr) ** share)
        power = config.power if config.schedule == "polynomial" else 1.0
        falls_straight = config.schedule in ("linear", "polynomial")
        left = (1.0 - share) ** power if falls_straight else 0.5 * (1.0 + math.cos(math.pi * share))
    return config.min_lr + (config.lr - config.min_lr) * left


GROWTH = 2.0


class LossScale:
    """The factor that fp16 multiplies the loss by, so that small gradients do not become 0.

    It follows Megatron's rules: the first `hysteresis - 1` overflows do not change it, and each further one halves it.
    After `window` steps in a row without an overflow it doubles, and the count of overflows starts again.
    """

    def __init__(self, config: LossScaleConfig | None) -> None:
        """Without a config the scale is always 1, for precisions other than fp16."""
        self.config = config
        self.value = config.initial if config else 1.0
        # Steps without an overflow since the last overflow or the last doubling.
        self.clean = 0
        # The scale halves after this many further overflows.
        self.patience = config.hysteresis if config else 0

    @property
    def can_fall(self) -> bool:
        """Return whether the scale can be lowered; if so, an overflow is not a failure."""
        return self.config is not None and self.config.dynamic and self.value > self.config.least

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step."""
        if self.config is None or not self.config.dynamic:
            return
        if not overflow:
            self.clean += 1
            if self.clean >= self.config.window:
                self.clean, self.patience = 0, self.config.hysteresis
                self.value *= GROWTH
            return
        self.clean = 0
        self.patience -= 1
        if self.patience <= 0:
            self.value = max(self.value / GROWTH, self.config.least)

    def state(self) -> dict[str, float]:
        """Return the values to save in a checkpoint; {} without a loss scale."""
        if self.config is None:
            return {}
        return {"value": self.value, "clean": self.clean, "patience": self.patience}

    def load(self, state: Mapping[str, float]) -> None:
        """Restore the values of a checkpoint; a fixed scale is not changed."""
        if self.config is not None and self.config.dynamic and state:
            self.value = float(state["value"])
            self.clean, self.patience = int(state["clean"]), int(state["patience"])
