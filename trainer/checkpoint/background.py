"""Save while training continues: a low-priority thread writes a copy of this rank's parts, whose memory is reused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clusterctl.wire.metrics import Saved
from trainer.checkpoint.part import Part
from trainer.checkpoint.write import lower_priority
from trainer.errors import TrainerError

NICE = 10
# Alignment of tensors of any type.
_ALIGNED = 64


class Staging:
    """CPU memory for a copy of a rank's parts, which every save reuses."""

    def __init__(self, device: str) -> None:
        self._pinned = device != "cpu" and torch.cuda.is_available()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts with copies of their tensors, which later steps do not change."""
        sizes = [
            -(-part.tensor.numel() * part.tensor.element_size() // _ALIGNED) * _ALIGNED for part in parts
        ]
        if sum(sizes) > len(self._memory):
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._pinned)
        places = self._memory[: sum(sizes)].split(sizes)
        copies = [_view(place, part.tensor) for place, part in zip(places, parts, strict=True)]
        for copy, part in zip(copies, parts, strict=True):
            copy.copy_(part.tensor.detach(), non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize()
        return [replace(part, tensor=copy) for part, copy in zip(parts, copies, strict=True)]


def _view(place: Tensor, like: Tensor) -> Tensor:
    size = like.numel() * like.element_size()
    return place[:size].view(like.dtype).view(like.shape)


class BackgroundSave:
    """One save in a thread; `done` holds its result or its failure."""

    def __init__(self, step: int, work: Callable[[], Saved]) -> None:
        self.step = step
        self._result: Saved | None = None
        self._failure: TrainerError | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True, name="save checkpoint")
        self._thread.start()

    def _run(self, work: Callable[[], Saved]) -> None:
        lower_priority(NICE)
        try:
            self._result = work()
        except TrainerError as error:
            self._failure = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Saved:
        """Wait for the end of the save and return its result; raise its failure."""
        while self._thread.is_alive():
            # Wait in short intervals, so that signals are handled in between.
            self._thread.join(0.2)
        if self._failure is not None:
            raise self._failure
        assert self._result is not None, "a save ends with a result or a failure"
        return self._result
