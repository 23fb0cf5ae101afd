"""Where a step that is not finite goes wrong: a second pass over the same batch, with every layer watched."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.layout import Layout
from trainer.engine.torch_engine import StepResult
from trainer.parallel.group import Group

# (0 weights | 1 forward | 2 backward, depth in the order of that pass, layers seen before, words, rank)
Finding = tuple[int, int, int, str, int]
_BLOCK = re.compile(r"\bblocks\.(\d+)\b")


class NonFiniteHooks:
    """Hooks on every layer of a model, for the time of a `with`; `first` is the first that is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.first: tuple[int, int, str] | None = None
        self._seen = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> NonFiniteHooks:
        for name, parameter in self.model.named_parameters():
            if not _finite(parameter.detach()):
                self._note(0, f"the weight {name} is not finite")
            self._hooks.append(parameter.register_hook(self._gradient(f"the gradient of {name}")))
        for name, module in self.model.named_modules():
            self._hooks.append(module.register_forward_hook(self._output(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, phase: int, words: str) -> None:
        self._seen += 1
        if self.first is None:
            self.first = (phase, self._seen, words)

    def _output(self, name: str) -> Callable[..., None]:
        told = f"the output of {name}" if name else "the loss"

        def hook(module: nn.Module, _: Any, output: Any) -> None:
            for tensor in output if isinstance(output, (tuple, list)) else (output,):
                if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                    continue
                self._seen += 1
                if not _finite(tensor.detach()):
                    self._note(1, f"{told} is not finite")
                elif tensor.requires_grad and module.training:
                    tensor.register_hook(self._gradient(f"the gradient of {told}"))

        return hook

    def _gradient(self, told: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._seen += 1
            if not _finite(gradient):
                self._note(2, f"{told} is not finite")

        return hook


def _finite(tensor: Tensor) -> bool:
    # Of a weight that is divided, this rank's part.
    own = getattr(tensor, "_local_tensor", tensor)
    return bool(torch.isfinite(own).all().item())


def _depth(words: str) -> int:
    """How far from the model's beginning a layer is; a stage of a pipeline may have some of several depths."""
    block = _BLOCK.search(words)
    if block:
        return int(block[1]) + 1
    return 0 if "tokens" in words or "positions" in words else 1 << 20


class NonFiniteSearch:
    """Repeats a step of all ranks and says where it first went wrong, and on which of them."""

    def __init__(self, model: nn.Module, group: Group, layout: Layout) -> None:
        self.model, self.group, self.layout = model, group, layout

    def __call__(self, again: Callable[[], StepResult]) -> tuple[StepResult, str]:
        """What the repeated step gave, and words for people; the same on every rank."""
        with NonFiniteHooks(self.model) as watch:
            result = again()
        findings = [finding for finding in self.group.gather(self._finding(watch)) if finding is not None]
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            return result, "the same batch was finite when it was computed again: suspect the device's memory"
        if not findings:
            return result, "every layer is finite on every rank: the sum over the ranks is too large"
        first = min(findings)
        return result, first[3] + self._where(first[4])

    def _finding(self, watch: NonFiniteHooks) -> Finding | None:
        if watch.first is None:
            return None
        phase, seen, words = watch.first
        depth = _depth(words)
        return phase, depth if phase < 2 else -depth, seen, words, self.group.rank

    def _where(self, rank: int) -> str:
        """` on rank 3 (pipeline 1, tensor 1)`: what tells it from others; nothing of a rank alone."""
        if self.group.world == 1:
            return ""
        sizes = {"pipeline": self.layout.pipeline, "data": self.layout.data, "tensor": self.layout.tensor}
        places = zip(sizes.items(), self.layout.place(rank), strict=True)
        told = ", ".join(f"{name} {place}" for (name, size), place in places if size > 1)
        return f" on rank {rank} ({told})"
