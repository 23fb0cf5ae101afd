"""Create a model whose matrices get their memory later, in parts and on the device where they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class Unallocated(TorchFunctionMode):
    """In this context `torch.zeros` with two or more dimensions, a matrix of a model, allocates nothing."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        named = kwargs or {}
        shape = args[0] if args and not isinstance(args[0], int) else args
        if function is torch.zeros and len(shape) > 1:
            named = {**named, "device": "meta"}
        return function(*args, **named)


def allocate(module: nn.Module, device: str) -> None:
    """Replace the parameters of `module` that have no memory with zeros on `device`."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.is_meta:
                zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
                setattr(owner, name, nn.Parameter(zeros, parameter.requires_grad))
