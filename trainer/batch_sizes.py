"""Samples of each step: as many in all of them, or fewer at first. Arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class BatchSizes:
    """`whole` samples a step; with a ramp from `start` up by `increment`, the rises spread over `samples`.

    A step's size follows from the samples consumed before it and from nothing else, as Megatron's does, so that a
    resumed training and one of another layout take the same batches.
    """

    whole: int
    start: int = 0
    """0 has no ramp."""
    increment: int = 0
    samples: int = 0

    @property
    def rises(self) -> int:
        return max(0, self.whole - self.start) // self.increment if self.start and self.increment else 0

    def after(self, consumed: int) -> int:
        """Samples of the step that begins when so many are consumed."""
        if not self.rises or consumed >= self.samples:
            return self.whole
        return self.start + consumed * self.rises // self.samples * self.increment

    def of(self, step: int) -> int:
        """Samples of step 1, 2, ..."""
        return self.after(self.consumed(step - 1))

    def consumed(self, steps: int) -> int:
        """Samples of the first so many steps together."""
        taken, consumed = next(
            ((taken, consumed) for taken, consumed in reversed(self._rungs) if taken <= steps), (0, 0)
        )
        return consumed + (steps - taken) * self.after(consumed)

    def in_steps(self, samples: float) -> float:
        """In how many steps so many samples are consumed."""
        taken, consumed = next(rung for rung in reversed(self._rungs) if rung[1] <= samples)
        return taken + (samples - consumed) / self.after(consumed)

    @property
    def ramp_steps(self) -> int:
        """Steps that have fewer samples than the others."""
        return self._rungs[-1][0]

    @cached_property
    def _rungs(self) -> list[tuple[int, int]]:
        """Where each size begins: steps taken and samples consumed by then."""
        rungs = [(0, 0)]
        while self.after(rungs[-1][1]) < self.whole:
            taken, consumed = rungs[-1]
            size = self.after(consumed)
            rise = (size - self.start) // self.increment + 1
            end = -(-rise * self.samples // self.rises)  # where the next size may begin
            steps = -(-(end - consumed) // size)
            rungs.append((taken + steps, consumed + steps * size))
        return rungs
