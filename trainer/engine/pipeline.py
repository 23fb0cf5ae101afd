"""Run a step's micro-batches on one stage of a pipeline, in the order of 1F1B or interleaved 1F1B.

A stage receives hidden states from the previous stage and gradients from the next one. Nothing else is sent: every
stage reads the same micro-batches, so it has masks and targets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.device import Device, Stopwatch
from trainer.engine.passes import (
    Batch,
    Micro,
    Model,
    mean_loss,
    model_loss,
)
from trainer.engine.rank_state import COMPUTED_IN
from trainer.parallel.group import Group
from trainer.parallel.pipeline import (
    Action,
    Pipeline,
    forward_only,
    one_forward_one_backward,
    source_of,
    target_of,
)

# How many messages a stage may send in one direction before the receiver has taken the first one. With 1, stages with
# several pieces would deadlock.
UNTAKEN = 2


class PipelineRunner:
    """Runs micro-batches through the stages, alternating one forward and one backward pass."""

    def __init__(self, model: Model, device: Device, precision: str, data: Group, pipeline: Pipeline) -> None:
        self.model, self.device, self.precision = model, device, precision
        self.data, self.pipeline = data, pipeline
        self.names = [_names_of(model, piece) for piece in range(len(model.pieces))]
        # The type of hidden states, which is the type of the weights that compute them.
        self.type = COMPUTED_IN[precision]

    def step(
        self, batch: Batch, weights: Sequence[float], own: Stopwatch, before_last: Callable[..., None]
    ) -> Tensor:
        # The stopwatch does not count waiting for other stages.
        own.stop()
        total = torch.zeros((), device=self.device.name)
        line, pieces = self.pipeline, len(self.names)
        actions = one_forward_one_backward(line.stage, line.stages, pieces, len(batch))
        exchange = self._exchange(batch, actions)
        pending: dict[tuple[int, int], _PendingBackward] = {}
        for action in actions:
            received = exchange.take()
            own.resume()
            key = action.piece, action.micro
            if action.forward:
                if received is not None:
                    received.requires_grad_()
                self.model.aux_weight = weights[action.micro]
                output = self._forward(batch[action.micro], action.piece, received)
                if self._closes(action.piece):
                    output = output * weights[action.micro]
                    total += output.detach()
                pending[key] = _PendingBackward(received, output, closes=self._closes(action.piece))
                result: Tensor | None = output.detach()
            else:
                if action.micro == len(batch) - 1:
                    before_last(self.names[action.piece])
                result = pending.pop(key).backward(received)
            own.stop()
            exchange.send(action, result)
            del received, result
        exchange.finish()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        self.model.eval()
        self.model.aux_weight = 0.0
        losses, counts = [], []
        line, pieces = self.pipeline, len(self.names)
        for batch in batches:
            actions = forward_only(line.stages, pieces, len(batch))
            exchange = self._exchange(batch, actions)
            for action in actions:
                output = self._forward(batch[action.micro], action.piece, exchange.take())
                if self._closes(action.piece):
                    losses.append(output)
                exchange.send(action, output)
            exchange.finish()
            counts += [self.model.counted(micro) for micro in batch]
        self.model.train()
        mean = mean_loss(losses, counts, self.model.counts_vary, self.data)
        return self.pipeline.total(mean, self.device)

    def _forward(self, micro: Micro, piece: int, x: Tensor | None) -> Tensor:
        run = self.model if x is None else partial(self.model, x=x, piece=piece)
        return model_loss(run, self.model, micro, self.device, self.precision)

    def _closes(self, piece: int) -> bool:
        return self.model.pieces[piece].last

    def _exchange(self, batch: Batch, actions: Sequence[Action]) -> _Exchange:
        """Return the exchange for these actions; a message has the shape of its micro-batch, which varies for GLM."""
        parallel = self.model.parallel
        shapes = []
        for micro in batch:
            rows, length = self.model.arguments(micro)[0].shape
            own = length // parallel.size if parallel.divides_sequence else length
            shapes.append((rows, own, self.model.config.hidden))
        return _Exchange(self.pipeline, len(self.names), actions, shapes, self.type, self.device)


class _PendingBackward:
    """A micro-batch in a piece between its forward and backward passes; the result itself is not stored."""

    def __init__(self, x: Tensor | None, output: Tensor, closes: bool) -> None:
        self.x = x
        self.gradient: list[Tensor] = []
        self.end = output if closes else _result_stub(output, self.gradient)

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the input, given the gradient of the result; the last piece starts from the loss."""
        if gradient is not None:
            self.gradient.append(gradient)
        # A stage without learned parameters whose input is tokens has no gradient.
        if self.end.requires_grad:
            self.end.backward()
        return None if self.x is None else self.x.grad


class _Exchange:
    """Exchanges a stage's messages with its neighbours while its actions run.

    The message for the next action is received while the current action computes.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        pieces: int,
        actions: Sequence[Action],
        shapes: Sequence[tuple[int, ...]],
        kind: torch.dtype,
        device: Device,
    ) -> None:
        self.pipeline, self.pieces, self.shapes, self.kind, self.device = (
            pipeline,
            pieces,
            shapes,
            kind,
            device,
        )
        self.ahead = deque(actions)
        self.coming: tuple[Tensor, Any] | None = None
        self.sent: tuple[deque[tuple[Tensor, Any]], ...] = (deque(), deque())
        self._receive_next()

    def take(self) -> Tensor | None:
        """Wait for the message that the next action needs and return it; None if it needs none."""
        coming, self.coming = self.coming, None
        if coming is not None:
            coming[1].wait()
        self._receive_next()
        return None if coming is None else coming[0]

    def _receive_next(self) -> None:
        if not self.ahead:
            return
        action = self.ahead.popleft()
        line = self.pipeline
        source = source_of(action, line.stage, line.stages, self.pieces)
        if source is not None:
            buffer = torch.empty(self.shapes[action.micro], dtype=self.kind, device=self.device.name)
            self.coming = buffer, dist.irecv(buffer, line.ranks[source], line.way(action.forward, source))

    def send(self, action: Action, result: Tensor | None) -> None:
        """Send an action's result; wait if too many earlier messages have not been received yet."""
        line = self.pipeline
        target = target_of(action, line.stage, line.stages, self.pieces)
        if target is None:
            return
        assert result is not None
        assert (result.shape, result.dtype) == (self.shapes[action.micro], self.kind), (
            "the receiver expects another shape or type"
        )
        before, tensor = self.sent[action.forward], result.contiguous()
        while len(before) >= UNTAKEN:
            before.popleft()[1].wait()
        before.append((tensor, dist.isend(tensor, line.ranks[target], line.way(action.forward, line.stage))))

    def finish(self) -> None:
        """Wait until all messages have been received."""
        for before in self.sent:
            while before:
                before.popleft()[1].wait()


def _names_of(model: Model, piece: int) -> set[str]:
    """Return the names of the parameters that a piece uses."""
    own = model.pieces[piece]
    blocks = {f"blocks.{layer}" for layer in own.layers}
    return {
        name
        for name, _ in model.named_parameters()
        if (".".join(name.split(".")[:2]) in blocks if name.startswith("blocks.") else own.first or own.last)
    }


def _result_stub(output: Tensor, gradient: list[Tensor]) -> Tensor:
    """Return a scalar whose backward pass starts from the gradient in `gradient`."""
    end: Tensor = _ResultStub.apply(output, gradient)  # type: ignore[no-untyped-call]
    return end


class _ResultStub(torch.autograd.Function):
    """Replaces a result without a reference to it, so that its memory is freed after it is sent."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None
