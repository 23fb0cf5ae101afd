"""Read the lengths of a training in the user's units: `700 steps`, `2.5B tokens`, `1%`.

Compute the samples of each step: a constant number, or fewer at first. Only arithmetic.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

UNITS = ("steps", "samples", "tokens", "part")
BYTES = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}
_SIZE = re.compile(r"(?P<number>[0-9]*\.?[0-9]+) ?(?P<unit>[MGT]i?B)", re.IGNORECASE)
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_WRITTEN = re.compile(
    r"(?P<number>[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?) ?(?P<scale>[kMGBT]?) ?(?P<unit>%|[a-z]*)\Z"
)
_EXAMPLE = 'write it as "700 steps", "3k samples", "2.5B tokens" or "1%"'


def amount_text(raw: object) -> str:
    """Return the text of an amount; a bare whole number means steps, one below 1 a part. Raises ValueError."""
    if isinstance(raw, (int, float)) and not isinstance(raw, bool):
        raw = f"{raw:g} part" if 0 < raw < 1 else f"{raw} steps"
    if not isinstance(raw, str):
        raise ValueError(f"is {raw!r}; {_EXAMPLE}")
    if raw:
        amount(raw)
    return raw


def amount(text: str, units: tuple[str, ...] = UNITS, example: str = _EXAMPLE) -> tuple[float, str]:
    """Return number and unit: (2.5e9, "tokens") for `2.5B tokens`, (0.01, "part") for `1%`."""
    found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"is {text!r}; {example}")
    value = float(found["number"]) * _SCALES[found["scale"]]
    unit = found["unit"] or "steps"
    if unit == "%":
        value, unit = value / 100, "part"
    unit = unit if unit == "part" or unit.endswith("s") else unit + "s"
    if unit not in units or not math.isfinite(value):
        raise ValueError(f"is {text!r}; {example}")
    if unit == "part" and value > 1:
        raise ValueError(f"is {text!r}, more than the whole")
    return value, unit


# Units of the length of a training, which cannot be a part of itself.
LENGTHS = ("steps", "samples", "tokens", "epochs")
_LENGTH_EXAMPLE = 'write it as "2.5B tokens", "3M samples" or "2 epochs"'


def length_text(raw: object) -> str:
    """Return the text of a training's length. Raises ValueError."""
    if not isinstance(raw, str):
        raise ValueError(f"is {raw!r}; {_LENGTH_EXAMPLE}")
    if raw and not length_of(raw)[0]:
        raise ValueError(f"is {raw!r}, which is too little")
    return raw


def length_of(text: str) -> tuple[float, str]:
    """Return number and unit of a training's length: (2.0, "epochs") for `2 epochs`. Raises ValueError."""
    return amount(text, LENGTHS, _LENGTH_EXAMPLE)


def gigabytes(raw: object) -> float:
    """Return a size of memory in GB, from `32GB`, `80 GiB` or a number of GB. Raises ValueError."""
    if isinstance(raw, (int, float)) and not isinstance(raw, bool) and math.isfinite(raw):
        return float(raw)
    found = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if found is None:
        raise ValueError(f'is {raw!r}; write it as "32GB", "80 GiB", or a number of GB')
    return float(found["number"]) * BYTES[found["unit"].upper()] / 1e9


def in_samples(text: str, batches: BatchSizes, sequence: int, whole: float) -> float:
    """Return an amount in samples; a part is a part of `whole`."""
    value, unit = amount(text)
    if unit == "steps":
        return batches.consumed(int(value)) + value % 1 * batches.of(int(value) + 1)
    return value * {"samples": 1, "tokens": 1 / sequence, "part": whole}[unit]


@dataclass(frozen=True)
class BatchSizes:
    """`whole` samples per step; with a ramp, from `start` up in rises of `increment`, spread over `samples`.

    The size of a step depends only on the samples consumed before it, as in Megatron, so that a resumed training and
    another layout take the same batches.
    """

    whole: int
    start: int = 0
    """0: no ramp."""
    increment: int = 0
    samples: int = 0

    @property
    def rises(self) -> int:
        return max(0, self.whole - self.start) // self.increment if self.start and self.increment else 0

    def after(self, consumed: int) -> int:
        """Return the samples of the step that begins after `consumed` samples."""
        if not self.rises or consumed >= self.samples:
            return self.whole
        return self.start + consumed * self.rises // self.samples * self.increment

    def of(self, step: int) -> int:
        """Return the samples of step 1, 2, ..."""
        return self.after(self.consumed(step - 1))

    def consumed(self, steps: int) -> int:
        """Return the samples of the first `steps` steps together."""
        taken, consumed = next(
            ((taken, consumed) for taken, consumed in reversed(self._rungs) if taken <= steps), (0, 0)
        )
        return consumed + (steps - taken) * self.after(consumed)

    def in_steps(self, samples: float) -> float:
        """Return in how many steps `samples` samples are consumed."""
        taken, consumed = next(rung for rung in reversed(self._rungs) if rung[1] <= samples)
        return taken + (samples - consumed) / self.after(consumed)

    @property
    def ramp_steps(self) -> int:
        """Return how many steps have fewer samples than the others."""
        return self._rungs[-1][0]

    @cached_property
    def _rungs(self) -> list[tuple[int, int]]:
        """Return where each size begins: steps and samples before it."""
        rungs = [(0, 0)]
        while self.after(rungs[-1][1]) < self.whole:
            taken, consumed = rungs[-1]
            size = self.after(consumed)
            rise = (size - self.start) // self.increment + 1
            # Where the next size may begin.
            end = -(-rise * self.samples // self.rises)
            steps = -(-(end - consumed) // size)
            rungs.append((taken + steps, consumed + steps * size))
        return rungs
