"""What the loop asks of an engine, and torch's own: data parallel, optimizer state whole or divided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config import TrainConfig
from trainer.device import Device
from trainer.gpt import GPT, logical, padded
from trainer.group import Group
from trainer.optim import ShardedAdamW

# Gradients travel in pieces of this size while the backward pass goes on (DDP's own default).
BUCKET_BYTES = 25 << 20

Batch = Sequence[Tensor]  # one rank's micro-batches, each (micro_batch, sequence + 1) token ids


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: `loss` is the mean over the global batch, `tokens` counts all ranks.

    `skipped`: the gradient was not finite and nothing was updated. `own_seconds`: what this rank took for its own
    part, before it waited for others; of ranks in step it alone tells the slow one.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False
    own_seconds: float = 0.0


@dataclass(frozen=True)
class TrainState:
    """All that training changes, whole, under logical names and without padding; on rank 0's device."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    optimizer_steps: int


class Engine(Protocol):
    """Moves a model forward. All methods are for all ranks together."""

    parameters: Mapping[str, nn.Parameter]

    def step(self, batch: Batch, rate: float, seed: int) -> StepResult:
        """One optimizer step over this rank's part of a global batch; `seed` fixes dropout."""

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over all ranks' parts, without dropout; NaN where there are none."""

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""

    def state(self) -> TrainState:
        """Whole on rank 0; elsewhere parts of it may be stale."""

    def load(self, state: TrainState) -> None:
        """Take a whole state; every rank gives the same."""


def model_loss(model: nn.Module, tokens: Tensor, device: Device, precision: str) -> Tensor:
    """Mean loss of one micro-batch: each token is predicted from those before it."""
    tokens = tokens.to(device.name, non_blocking=True)
    with device.autocast(precision):
        loss: Tensor = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return loss


@torch.no_grad()
def mean_loss(
    model: nn.Module, batches: Iterable[Batch], device: Device, precision: str, group: Group
) -> float:
    """The evaluation that both engines share."""
    model.eval()
    losses = [model_loss(model, micro, device, precision) for batch in batches for micro in batch]
    model.train()
    if not losses:
        return float("nan")
    return group.total(float(torch.stack(losses).double().mean().item())) / group.world


class GradientBuffer:
    """All gradients as views of one fp32 buffer, summed over the ranks by pieces during the backward pass.

    Why not DDP: it regroups its pieces after the first step, and gloo adds an element's parts in an order
    that depends on its place in a piece. With three ranks or more a resumed run would then differ from an
    uninterrupted one in the last bits. Here the places never change.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self.group = group
        ordered = list(reversed(parameters))  # about the order in which the backward pass finishes them
        self.flat = ordered[0].new_zeros(sum(parameter.numel() for parameter in ordered))
        self.pieces: list[Tensor] = []
        self.waiting: list[int] = []  # gradients still to come, a piece
        self.sizes: list[int] = []
        self.next_piece = 0
        self.summing = False
        self.work: list[Any] = []
        self._lay_out(ordered)

    def _lay_out(self, ordered: Sequence[nn.Parameter]) -> None:
        start = end = count = 0
        for i, parameter in enumerate(ordered):
            parameter.grad = self.flat[end : end + parameter.numel()].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._hook(len(self.pieces)))
            end, count = end + parameter.numel(), count + 1
            if (end - start) * self.flat.element_size() >= BUCKET_BYTES or i == len(ordered) - 1:
                self.pieces.append(self.flat[start:end])
                self.sizes.append(count)
                start, count = end, 0

    def _hook(self, piece: int) -> Any:
        def arrived(_: Tensor) -> None:
            if self.summing:
                self.waiting[piece] -= 1
                self._send_ready()

        return arrived

    def _send_ready(self) -> None:
        """Send finished pieces in their order, which is then the same on every rank."""
        while self.next_piece < len(self.pieces) and self.waiting[self.next_piece] == 0:
            self.work.append(dist.all_reduce(self.pieces[self.next_piece], async_op=True))
            self.next_piece += 1

    def clear(self) -> None:
        self.flat.zero_()

    def sum_on_next_backward(self) -> None:
        """The next backward pass is the step's last: send each piece as it becomes complete."""
        self.summing = self.group.world > 1
        self.waiting, self.next_piece = list(self.sizes), 0

    def wait(self) -> None:
        """Until every piece is summed."""
        for work in self.work:
            work.wait()
        self.work.clear()
        self.summing = False

    def clip(self, limit: float) -> float:
        """The global norm; gradients above `limit` (if not 0) are scaled down to it."""
        norm = float(torch.linalg.vector_norm(self.flat).item())
        if 0 < limit < norm < float("inf"):
            self.flat.mul_(limit / (norm + 1e-6))
        return norm


class TorchEngine:
    """Data parallel with torch alone; runs wherever torch has collectives."""

    def __init__(self, model: GPT, config: TrainConfig, group: Group, device: Device) -> None:
        self.model, self.config, self.group, self.device = model, config, group, device
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        group.broadcast(parameter.data for parameter in self.parameters.values())
        self.gradients = GradientBuffer(list(self.parameters.values()), group)
        self.optimizer = ShardedAdamW(self.parameters, config.optimizer, group, config.zero)

    def step(self, batch: Batch, rate: float, seed: int) -> StepResult:
        torch.manual_seed(seed)
        self.gradients.clear()
        share = 1.0 / (len(batch) * self.group.world)
        total, own = torch.zeros((), device=self.device.name), self.device.stopwatch()
        for i, micro in enumerate(batch):
            if i == len(batch) - 1:
                self.gradients.sum_on_next_backward()
            loss = model_loss(self.model, micro, self.device, self.config.precision) * share
            loss.backward()
            total += loss.detach()
        own.stop()
        self.gradients.wait()
        norm = self.gradients.clip(self.config.optimizer.clip)
        finite = norm < float("inf")  # False for NaN too
        if finite:
            self.optimizer.step(rate)
        tokens = sum(micro.shape[0] * (micro.shape[1] - 1) for micro in batch) * self.group.world
        mean = self.group.total(float(total.item()))
        return StepResult(mean, norm, tokens, skipped=not finite, own_seconds=own.seconds())

    def evaluate(self, batches: Iterable[Batch]) -> float:
        return mean_loss(self.model, batches, self.device, self.config.precision, self.group)

    def any(self, flag: bool) -> bool:
        return self.group.any(flag)

    def state(self) -> TrainState:
        moments, taken = self.optimizer.state()
        return logical_state(self.config, self.parameters, moments, taken)

    def load(self, state: TrainState) -> None:
        load_parameters(self.config, self.parameters, state.model)
        self.optimizer.load(padded_moments(self.config, state.optimizer), state.optimizer_steps)


def logical_state(
    config: TrainConfig, parameters: Mapping[str, nn.Parameter], moments: Mapping[str, Tensor], taken: int
) -> TrainState:
    """A state without the padding of the vocabulary."""
    model = {name: logical(config.model, name, parameter.detach()) for name, parameter in parameters.items()}
    optimizer = {key: logical(config.model, key.split(".", 1)[1], tensor) for key, tensor in moments.items()}
    return TrainState(model, optimizer, taken)


@torch.no_grad()
def load_parameters(
    config: TrainConfig, parameters: Mapping[str, nn.Parameter], model: Mapping[str, Tensor]
) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(padded(config.model, name, model[name]))


def padded_moments(config: TrainConfig, optimizer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: padded(config.model, key.split(".", 1)[1], tensor) for key, tensor in optimizer.items()}
