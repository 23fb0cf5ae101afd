"""Parameter groups, and AdamW whose state may be divided among the ranks.

The learning rate of every step. Arithmetic alone.

What fp16 multiplies the loss by, so that small gradients are not lost: fixed, or as high as overflows allow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

import native
from trainer.config.amounts import BatchSizes, in_samples
from trainer.config.parts import LossScaleConfig, OptimizerConfig
from trainer.parallel.group import Group

MOMENTS = ("exp_avg", "exp_avg_sq")


def decay_of(parameter: nn.Parameter, config: OptimizerConfig) -> float:
    """Matrices decay; biases and layer norms do not."""
    return config.weight_decay if parameter.dim() >= 2 else 0.0


def adamw(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, fused: bool = True
) -> torch.optim.AdamW:
    """torch's own object, for engines that want one; fused, where a device has it, it runs at the speed of memory."""
    decays = dict.fromkeys(decay_of(parameter, config) for parameter in parameters.values())
    groups = [
        {"params": [p for p in parameters.values() if decay_of(p, config) == decay], "weight_decay": decay}
        for decay in decays
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def owners(parameters: Mapping[str, nn.Parameter], world: int) -> dict[str, int]:
    """The rank that updates each parameter: largest first, each to the rank with the least so far.

    Whole parameters keep the state's names and shapes, so a checkpoint loads on any number of ranks; the
    price is that one rank holds the whole token table.
    """
    load = [0] * world
    owner = {}
    for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
        owner[name] = load.index(min(load))
        load[owner[name]] += parameters[name].numel()
    return owner


class ShardedAdamW:
    """AdamW over named parameters. With `zero` 1 each rank updates those it owns and sends them around.

    It has no torch.optim object: the first one of a process loads torch's compiler, 1.5 s of every rank's start.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        group: Group,
        zero: int,
        ops: native.Choice | None = None,
        host: bool = False,
    ) -> None:
        """`ops`: whose AdamW is used, by default the best for the device.

        With `host`, moments and masters are kept in the node's memory and updated by its processors: the device
        has weights and gradients alone, and these cross to the node and those come back once a step.
        """
        self.host = host
        self.ops = native.choose("cpu") if host else ops or native.choose(group.device.kind)
        self.parameters = dict(parameters)
        self.config = config
        self.group = group
        self.owner = owners(self.parameters, group.world) if zero >= 1 and group.world > 1 else None
        self.mine = {name: parameter for name, parameter in self.parameters.items() if self._is_mine(name)}
        self.moments = {
            f"{moment}.{name}": torch.zeros_like(parameter, device="cpu" if host else None)
            for name, parameter in self.mine.items()
            for moment in MOMENTS
        }
        self.masters: dict[str, Tensor] = {}
        """In fp32, of the parameters in another type, or in another place, that this rank updates."""
        if host:
            self.masters = {name: one.detach().to("cpu", copy=True) for name, one in self.mine.items()}
        self.taken = 0

    def _is_mine(self, name: str) -> bool:
        return self.owner is None or self.owner[name] == self.group.rank

    def lower(self, names: Collection[str], dtype: torch.dtype) -> None:
        """From now on these parameters are of `dtype`; what they were is kept as masters, and updated."""
        for name in names:
            parameter = self.parameters[name]
            if name in self.mine:
                self.masters.setdefault(name, parameter.data)
            parameter.data = parameter.data.to(dtype)

    @torch.no_grad()
    def step(self, rate: float, gradients: Mapping[str, Tensor] | None = None, factor: float = 1.0) -> None:
        """Update from the gradients times `factor`; every rank has all new values afterwards.

        `gradients`: of all parameters, in any type; by default what autograd left, and spent in any case.
        """
        if gradients is None:
            gradients = {name: one.grad for name, one in self.mine.items() if one.grad is not None}
        names = list(self.mine)
        lower = [self.mine[name] if name in self.masters and not self.host else None for name in names]
        update = native.AdamWStep(
            held=[self.masters.get(name, self.mine[name]) for name in names],
            gradients=[gradients[name].cpu() if self.host else gradients[name] for name in names],
            averages=[self.moments[f"exp_avg.{name}"] for name in names],
            squares=[self.moments[f"exp_avg_sq.{name}"] for name in names],
            lowered=lower,
            decays=[decay_of(self.mine[name], self.config) for name in names],
            step=self.taken + 1,
            rate=rate,
            betas=self.config.betas,
            eps=self.config.eps,
            factor=factor,
        )
        self.ops.adamw(update)
        self.taken += 1
        for name in names if self.host else ():
            self.mine[name].copy_(self.masters[name])
        if self.owner is not None:
            self._exchange(self.owner)

    def _exchange(self, owner: Mapping[str, int]) -> None:
        """Every rank sends its parameters in one piece a type: 50 small ones would cost 0.3 ms each on gloo."""
        for rank in range(self.group.world):
            owned = [parameter for name, parameter in self.parameters.items() if owner[name] == rank]
            for dtype in dict.fromkeys(parameter.dtype for parameter in owned):
                self._send([parameter for parameter in owned if parameter.dtype == dtype], rank)

    def _send(self, parameters: Sequence[nn.Parameter], rank: int) -> None:
        flat = torch.cat([parameter.flatten() for parameter in parameters])
        self.group.broadcast([flat], rank)
        if rank != self.group.rank:
            parts = flat.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))

    def weights(self) -> dict[str, Tensor]:
        """In fp32, whole on rank 0; elsewhere parts of it may be stale."""
        found = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype == torch.float32:
                found[name] = parameter.detach()
            else:
                found[name] = self._brought(name, self.masters.get(name))
        return found

    def state(self) -> tuple[dict[str, Tensor], int]:
        """`exp_avg.<name>` and `exp_avg_sq.<name>`, whole on rank 0 (not elsewhere), and the steps taken."""
        keys = [(f"{moment}.{name}", name) for name in self.parameters for moment in MOMENTS]
        return {key: self._brought(name, self.moments.get(key)) for key, name in keys}, self.taken

    def _brought(self, name: str, own: Tensor | None) -> Tensor:
        """What the owner of a parameter has, on rank 0; `own`: where this rank is the owner."""
        like = self.parameters[name]
        if self.owner is None and own is not None:
            return own
        tensor = torch.zeros_like(like, dtype=torch.float32, requires_grad=False)
        if own is not None:
            tensor = own.to(like.device)
        if self.owner is not None:
            self.group.bring_to_zero(tensor, self.owner[name])
        return tensor.cpu() if self.host else tensor

    @torch.no_grad()
    def take(self, key: str, part: Tensor) -> None:
        """A weight, or a moment (`exp_avg.<name>`), of this rank's part of the model; nothing if another updates it."""
        if key in self.parameters:
            self.parameters[key].copy_(part)
        own = self.masters.get(key, self.moments.get(key))
        if own is not None:
            own.copy_(part)


ONE = BatchSizes(1)


def bounds(
    config: OptimizerConfig, steps: int, batches: BatchSizes = ONE, sequence: int = 1
) -> tuple[float, float]:
    """Samples of the warm-up, and of the whole schedule; a sample has `sequence` tokens."""
    whole = float(batches.consumed(steps))
    length = in_samples(config.decay, batches, sequence, whole) if config.decay else whole
    if config.warmup:
        return in_samples(config.warmup, batches, sequence, length), length
    return float(batches.consumed(config.warmup_steps)), length


def learning_rate(
    config: OptimizerConfig, step: int, steps: int, batches: BatchSizes = ONE, sequence: int = 1
) -> float:
    """Return the rate of a step, counted from 1: a linear rise over the warm-up, then down to min_lr, where it stays.

    It follows the samples consumed, so that it moves more slowly while batches are small. The step's own samples
    count: this is the rate that Megatron gives the next step. Megatron counts the samples before the step alone, so
    its first step of a warm-up has rate 0, and no step has min_lr until the schedule is over.
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
        left = 1.0 - share if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return config.min_lr + (config.lr - config.min_lr) * left


GROWTH = 2.0


class LossScale:
    """Halved after overflows, doubled after a window of clean steps, in Megatron's order of things.

    `hysteresis` overflows are let pass before it halves; they are let pass anew only after a whole clean window.
    """

    def __init__(self, config: LossScaleConfig | None) -> None:
        """Without a config the scale is 1 and stays: the other precisions need none."""
        self.config = config
        self.value = config.initial if config else 1.0
        # Steps since the last overflow or growth.
        self.clean = 0
        self.patience = config.hysteresis if config else 0

    @property
    def moves(self) -> bool:
        return self.config is not None and self.config.dynamic

    @property
    def can_fall(self) -> bool:
        """Whether an overflow is a matter of the scale: then it is no failure of the training."""
        return self.config is not None and self.config.dynamic and self.value > self.config.least

    def update(self, overflow: bool) -> None:
        """After each step."""
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
        """What a checkpoint keeps; nothing where the scale is no part of the training."""
        if self.config is None:
            return {}
        return {"value": self.value, "clean": self.clean, "patience": self.patience}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from what a checkpoint kept; a fixed scale is as the config says."""
        if self.moves and state:
            self.value = float(state["value"])
            self.clean, self.patience = int(state["clean"]), int(state["patience"])
