"""Let code that makes its tensors on a CPU make them on another device, with the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from native.masks import Mask

DRAWS = (torch.rand, torch.randn, torch.randint, torch.randperm)


class DrawnOnCpu(TorchFunctionMode):
    """Draws the numbers of a CPU's generator there, and moves them to the device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in DRAWS and given.get("generator") is not None and given.get("device") is None:
            return func(*args, **{**given, "device": "cpu"}).to(self.device)
        return func(*args, **given)


@contextlib.contextmanager
def tensors_on(device: str) -> Iterator[None]:
    """Make new tensors on `device`, unless code asks for another one."""
    with torch.device(device), DrawnOnCpu(device):
        yield


def moved(arguments: Mapping[str, object], device: str) -> dict[str, object]:
    """Return the arguments of an op with their tensors on `device`; masks that were made for the CPU are dropped."""
    return {name: _moved(value, device) for name, value in arguments.items()}


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {
        field.name: _moved(getattr(value, field.name), device) for field in fields(value) if field.init
    }
    return replace(value, **{**changed, "made": {}} if isinstance(value, Mask) else changed)
