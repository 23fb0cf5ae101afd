"""A step's passes on a stage of a pipeline: micro-batches come from the stage before, and gradients from the next.

Every stage reads the same micro-batches, so that masks and targets are there; only the hidden state travels.
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

# Results of one kind that a stage may have sent without knowing that they were taken; with one, stages with several
# pieces would wait for each other in a circle.
UNTAKEN = 2


class PipelineRunner:
    """Micro-batches through the stages, one forward and one backward in turn."""

    def __init__(self, model: Model, device: Device, precision: str, data: Group, pipeline: Pipeline) -> None:
        self.model, self.device, self.precision = model, device, precision
        self.data, self.pipeline = data, pipeline
        self.names = [_names_of(model, piece) for piece in range(len(model.pieces))]
        # Of the hidden state, as of the weights that make it.
        self.type = COMPUTED_IN[precision]

    def step(
        self, batch: Batch, weights: Sequence[float], own: Stopwatch, before_last: Callable[..., None]
    ) -> Tensor:
        # Waiting for other stages is no part of it.
        own.stop()
        total = torch.zeros((), device=self.device.name)
        line, pieces = self.pipeline, len(self.names)
        actions = one_forward_one_backward(line.stage, line.stages, pieces, len(batch))
        mail = self._mail(batch, actions)
        open_passes: dict[tuple[int, int], _Open] = {}
        for action in actions:
            arrived = mail.take()
            own.go_on()
            place = action.piece, action.micro
            if action.forward:
                if arrived is not None:
                    arrived.requires_grad_()
                made = self._forward(batch[action.micro], action.piece, arrived)
                if self._closes(action.piece):
                    made = made * weights[action.micro]
                    total += made.detach()
                open_passes[place] = _Open(arrived, made, closes=self._closes(action.piece))
                result: Tensor | None = made.detach()
            else:
                if action.micro == len(batch) - 1:
                    before_last(self.names[action.piece])
                result = open_passes.pop(place).backward(arrived)
            own.stop()
            mail.send(action, result)
            del arrived, result
        mail.finish()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        self.model.eval()
        losses, counts = [], []
        line, pieces = self.pipeline, len(self.names)
        for batch in batches:
            actions = forward_only(line.stages, pieces, len(batch))
            mail = self._mail(batch, actions)
            for action in actions:
                made = self._forward(batch[action.micro], action.piece, mail.take())
                if self._closes(action.piece):
                    losses.append(made)
                mail.send(action, made)
            mail.finish()
            counts += [self.model.counted(micro) for micro in batch]
        self.model.train()
        mean = mean_loss(losses, counts, self.model.counts_vary, self.data)
        return self.pipeline.total(mean, self.device)

    def _forward(self, micro: Micro, piece: int, x: Tensor | None) -> Tensor:
        run = self.model if x is None else partial(self.model, x=x, piece=piece)
        return model_loss(run, self.model, micro, self.device, self.precision)

    def _closes(self, piece: int) -> bool:
        return self.model.pieces[piece].last

    def _mail(self, batch: Batch, actions: Sequence[Action]) -> _Mail:
        """What comes for these actions has the shape of its micro-batch, which for GLM may be another each time."""
        parallel = self.model.parallel
        shapes = []
        for micro in batch:
            rows, length = self.model.arguments(micro)[0].shape
            own = length // parallel.size if parallel.divides_sequence else length
            shapes.append((rows, own, self.model.config.hidden))
        return _Mail(self.pipeline, len(self.names), actions, shapes, self.type, self.device)


class _Open:
    """A micro-batch's way through a piece, between its forward and its backward pass; the result itself is let go."""

    def __init__(self, x: Tensor | None, made: Tensor, closes: bool) -> None:
        self.x = x
        self.gradient: list[Tensor] = []
        self.end = made if closes else _ended(made, self.gradient)

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """From the gradient of the result, or of the loss, to that of what came in."""
        if gradient is not None:
            self.gradient.append(gradient)
        self.end.backward()
        return None if self.x is None else self.x.grad


class _Mail:
    """What a stage sends to its neighbours and takes from them in one run through its actions.

    What the next action takes is asked for while the one before it computes.
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
        self._ask()

    def take(self) -> Tensor | None:
        """What the next action needs, once it is there."""
        coming, self.coming = self.coming, None
        if coming is not None:
            coming[1].wait()
        self._ask()
        return None if coming is None else coming[0]

    def _ask(self) -> None:
        if not self.ahead:
            return
        action = self.ahead.popleft()
        line = self.pipeline
        source = source_of(action, line.stage, line.stages, self.pieces)
        if source is not None:
            there = torch.empty(self.shapes[action.micro], dtype=self.kind, device=self.device.name)
            self.coming = there, dist.irecv(there, line.ranks[source], line.way(action.forward, source))

    def send(self, action: Action, result: Tensor | None) -> None:
        """Bring an action's result on its way; waits where too many before it have not been taken."""
        line = self.pipeline
        target = target_of(action, line.stage, line.stages, self.pieces)
        if target is None:
            return
        assert result is not None
        assert (result.shape, result.dtype) == (self.shapes[action.micro], self.kind), (
            "what the receiver expects"
        )
        before, tensor = self.sent[action.forward], result.contiguous()
        while len(before) >= UNTAKEN:
            before.popleft()[1].wait()
        before.append((tensor, dist.isend(tensor, line.ranks[target], line.way(action.forward, line.stage))))

    def finish(self) -> None:
        """Until everything sent was taken."""
        for before in self.sent:
            while before:
                before.popleft()[1].wait()


def _names_of(model: Model, piece: int) -> set[str]:
    """The parameters that a piece uses."""
    own = model.pieces[piece]
    blocks = {f"blocks.{layer}" for layer in own.layers}
    return {
        name
        for name, _ in model.named_parameters()
        if (".".join(name.split(".")[:2]) in blocks if name.startswith("blocks.") else own.first or own.last)
    }


def _ended(made: Tensor, gradient: list[Tensor]) -> Tensor:
    """Where a backward pass begins with the gradient that is in the list by then."""
    end: Tensor = _End.apply(made, gradient)  # type: ignore[no-untyped-call]
    return end


class _End(torch.autograd.Function):
    """Stands for a result without holding it: once it is sent, its memory is free."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return made.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None
