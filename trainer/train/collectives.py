"""Record how many collectives this rank has begun since its last step, so that the launcher finds the rank that a hung
group waits for.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from clusterctl.wire.metrics import Ended, StepDone
from trainer.parallel.group import Groups
from trainer.train.events import Event, StepBegan

# Seconds between two looks at the numbers, in a thread: a collective that never ends keeps the loop from writing.
LOOK = 1.0


class Counting(Protocol):
    """One of torch's process groups: torch counts its collectives, and offers the number under this name alone."""

    def _get_sequence_number_for_group(self) -> int: ...


class Collectives:
    """A file per rank: the last finished step, and by group the collectives begun since. Torch counts them itself.

    During an evaluation or a checkpoint nothing is counted: there, single ranks exchange messages.
    """

    def __init__(
        self,
        path: Path,
        groups: Mapping[str, Counting],
        step: int,
        pauses: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """`groups`: torch's process groups by their ranks; `pauses` tells what follows a step before the next one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._groups, self._step, self._pauses = groups, step, pauses
        self._before, self._counts = self._numbers(), True
        self._closed = threading.Event()
        self._width = 0
        threading.Thread(target=self._write_again, daemon=True, name="collectives").start()

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._step, self._before, self._counts = event.step, self._numbers(), not self._pauses(event.step)
        elif isinstance(event, StepBegan) and not self._counts:
            self._before, self._counts = self._numbers(), True
        elif isinstance(event, Ended):
            self._closed.set()

    def _numbers(self) -> dict[str, int]:
        """Return the numbers of the groups that count; torch's groups of some devices do not."""
        found = {}
        for name, group in self._groups.items():
            with suppress(RuntimeError):
                found[name] = group._get_sequence_number_for_group()
        return found

    def write(self) -> None:
        """Write the present numbers."""
        now, before = self._numbers(), self._before
        counts = (
            {name: now[name] - before[name] for name in now.keys() & before.keys()} if self._counts else {}
        )
        text = json.dumps({"step": self._step, "groups": counts})
        # One short write; blanks cover what a longer one has left.
        self._width = max(self._width, len(text))
        os.pwrite(self._handle, text.ljust(self._width).encode(), 0)

    def _write_again(self) -> None:
        while not self._closed.wait(LOOK):
            self.write()


def groups_of(groups: Groups) -> dict[str, Counting]:
    """Return by its ranks, separated by commas, each process group of this rank whose members all take part in every
    exchange.
    """
    if groups.everyone.world == 1:
        return {}
    pipeline = groups.pipeline
    several = (groups.data.handle, groups.tensor.group, groups.context.group, pipeline.group, pipeline.ends)
    found = [dist.group.WORLD, *(handle for handle in several if handle is not None)]
    return {",".join(map(str, dist.get_process_group_ranks(handle))): handle for handle in found}
