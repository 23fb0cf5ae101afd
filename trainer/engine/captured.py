"""Run each micro-batch as one captured graph of the device: the host starts a pass with a few calls, not thousands.

A graph repeats exactly the captured work on the same memory. So its inputs are fixed tensors that are filled before
each replay, and nothing in it may read a value on the host. What a step sums over ranks is not captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.device import Device, Graph
from trainer.engine.passes import Micro, Model, SingleStageRunner, moved
from trainer.engine.rank_state import Arrived, GradientBuffer, Mode
from trainer.model.dropout import drawn
from trainer.parallel.group import Group

# Batch ramps and curricula have several shapes; each graph of another shape takes memory and seconds.
MOST = 8
Kind = tuple[Mode, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Captured:
    """A captured pass, its inputs and its results."""

    graph: Graph
    inputs: Sequence[Tensor]
    weight: Tensor
    seeds: Tensor
    """Of each dropout, in the order of the pass."""
    loss: Tensor
    arrived: Arrived

    def replay(self, micro: Micro, weight: float, device: Device) -> None:
        """Run the pass for another micro-batch."""
        for own, part in zip(self.inputs, moved(micro, device), strict=True):
            own.copy_(part, non_blocking=True)
        self.weight.fill_(weight)
        if len(self.seeds):
            self.seeds.copy_(device.pinned(drawn(len(self.seeds))), non_blocking=True)
        self.graph.replay()


class CapturedRunner(SingleStageRunner):
    """Runs the first micro-batch of each kind op by op, captures the second, and replays it from then on.

    A kind is what the pass does with its gradients, and the shapes of the micro-batch. If the device cannot capture a
    pass, all run op by op, or in compiled blocks.
    """

    def __init__(
        self,
        model: Model,
        device: Device,
        precision: str,
        data: Group,
        gradients: GradientBuffer,
        weights_arrived: Callable[[], None],
        compiles: bool = False,
    ) -> None:
        """`weights_arrived` waits for weights from other ranks; hooks of modules, which wait too, are not replayed.

        `compiles`: whether blocks are compiled if the device cannot capture a pass.
        """
        super().__init__(model, device, precision, data)
        self.compiles = compiles
        self.gradients, self.weights_arrived = gradients, weights_arrived
        self.pool = device.graph_pool()
        self.fault = ""
        # The captured pass of each kind; before it, how many seeds the pass takes.
        self.kinds: dict[Kind, Captured | int] = {}

    def run(self, micro: Micro, weight: float) -> Tensor:
        kind = self.gradients.mode, tuple(tuple(part.shape) for part in micro)
        known = self.kinds.get(kind)
        # Hooks of modules run in Python.
        if self.fault or self.model.observed or (known is None and len(self.kinds) == MOST):
            return super().run(micro, weight)
        if known is None:
            self.model.seeds.restart()
            loss = super().run(micro, weight)
            self.kinds[kind] = self.model.seeds.taken
            return loss
        self.model.check_ids(micro)
        self.weights_arrived()
        if isinstance(known, int):
            captured = self._captured(micro, known)
            if captured is None:
                return super().run(micro, weight)
            known = self.kinds[kind] = captured
        known.replay(micro, weight, self.device)
        self.gradients.replayed(known.arrived)
        return known.loss

    def _captured(self, micro: Micro, seeds: int) -> Captured | None:
        """Return the captured pass; None, after a warning, if the device cannot capture it."""
        name = self.device.name
        inputs = [torch.zeros_like(part, device=name) for part in micro]
        weight = torch.ones((), device=name)
        rows = torch.zeros(seeds, 2, dtype=torch.int64, device=name)
        graph = self.device.graph(self.pool)
        self.model.seeds.restart(rows)
        try:
            with self.gradients.recording() as arrived, graph.capture():
                loss = self.both_passes(inputs, weight)
        except (RuntimeError, NotImplementedError) as error:
            self.fault = (str(error) or type(error).__name__).splitlines()[0]
            self.kinds.clear()
            self.device.restart_generator()
            how = "in compiled blocks" if self.compiles else "op by op"
            message = f"training steps run {how}, not as a captured graph: {self.fault}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            if self.compiles:
                from trainer.engine.compiled import CompiledBlocks

                CompiledBlocks(self.model)
            return None
        finally:
            self.model.seeds.restart()
        return Captured(graph, inputs, weight, rows, loss, arrived)
