"""Find the first bad layer of a non-finite step: run the step again with hooks on every layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.layout import Layout
from trainer.engine.passes import Model
from trainer.engine.torch_engine import StepResult
from trainer.parallel.group import Group

# (0 weights | 1 forward | 2 backward, depth in the order of that pass, tensors checked before, description, rank)
Finding = tuple[int, int, int, str, int]
_BLOCK = re.compile(r"\bblocks\.(\d+)\b")


class NonFiniteHooks:
    """Hooks on every layer of a model, as a context manager; `first` describes the first non-finite tensor."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.first: tuple[int, int, str] | None = None
        self._checked = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> NonFiniteHooks:
        self.model.observed = True
        for name, parameter in self.model.named_parameters():
            if not _finite(parameter.detach()):
                self._note(0, f"the weight {name} is not finite")
            self._hooks.append(parameter.register_hook(self._gradient(f"the gradient of {name}")))
        for name, module in self.model.named_modules():
            self._hooks.append(module.register_forward_hook(self._output(name)))
        return self

    def __exit__(self, *_: object) -> None:
        self.model.observed = False
        for hook in self._hooks:
            hook.remove()

    def _note(self, phase: int, text: str) -> None:
        self._checked += 1
        if self.first is None:
            self.first = (phase, self._checked, text)

    def _output(self, name: str) -> Callable[..., None]:
        subject = f"the output of {name}" if name else "the loss"

        def hook(module: nn.Module, _: Any, output: Any) -> None:
            for tensor in output if isinstance(output, (tuple, list)) else (output,):
                if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                    continue
                self._checked += 1
                if not _finite(tensor.detach()):
                    self._note(1, f"{subject} is not finite")
                elif tensor.requires_grad and module.training:
                    tensor.register_hook(self._gradient(f"the gradient of {subject}"))

        return hook

    def _gradient(self, subject: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._checked += 1
            if not _finite(gradient):
                self._note(2, f"{subject} is not finite")

        return hook


def _finite(tensor: Tensor) -> bool:
    # For a divided weight, this rank's part.
    own = getattr(tensor, "_local_tensor", tensor)
    return bool(torch.isfinite(own).all().item())


def _depth(text: str) -> int:
    """Return a layer's distance from the beginning of the model, to compare findings of different stages."""
    block = _BLOCK.search(text)
    if block:
        return int(block[1]) + 1
    return 0 if "tokens" in text or "positions" in text else 1 << 20


class NonFiniteSearch:
    """Repeats a step on all ranks and finds the first non-finite tensor and its rank."""

    def __init__(self, model: Model, group: Group, layout: Layout) -> None:
        self.model, self.group, self.layout = model, group, layout

    def __call__(self, again: Callable[[], StepResult]) -> tuple[StepResult, str]:
        """Return the repeated step's result and a description of the cause, the same on every rank."""
        with NonFiniteHooks(self.model) as hooks:
            result = again()
        findings = [finding for finding in self.group.gather(self._finding(hooks)) if finding is not None]
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            return result, "the same batch was finite when it was computed again: suspect the device's memory"
        if not findings:
            return result, "every layer is finite on every rank: the sum over the ranks is too large"
        first = min(findings)
        return result, first[3] + self._where(first[4])

    def _finding(self, hooks: NonFiniteHooks) -> Finding | None:
        if hooks.first is None:
            return None
        phase, checked, text = hooks.first
        depth = _depth(text)
        return phase, depth if phase < 2 else -depth, checked, text, self.group.rank

    def _where(self, rank: int) -> str:
        """Return a text such as ` on rank 3 (pipeline 1, tensor 1)`; empty for a single rank."""
        if self.group.world == 1:
            return ""
        sizes = {"pipeline": self.layout.pipeline, "data": self.layout.data, "tensor": self.layout.tensor}
        places = zip(sizes.items(), self.layout.place(rank), strict=True)
        coordinates = ", ".join(f"{name} {coordinate}" for (name, size), coordinate in places if size > 1)
        return f" on rank {rank} ({coordinates})"
