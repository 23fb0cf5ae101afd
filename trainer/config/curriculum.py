"""Short samples first: the length of the samples of each step, as DeepSpeed's curriculum of sequence length sets it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from clusterctl.wire.fields import setting
from trainer.config.model import ModelConfig
from trainer.config.parts import ParallelConfig
from trainer.errors import Fault


@dataclass(frozen=True)
class CurriculumConfig:
    """Samples that are cut to a length which grows up to model.sequence."""

    start: int = setting(0, least=0)
    """Tokens per sample at first; 0: samples always have model.sequence tokens."""
    steps: int = setting(0, least=0)
    """Steps until samples have the full length."""
    schedule: str = setting("linear", choices=("linear", "root"))
    """linear grows by the same amount in every step; root grows fast at first. DeepSpeed: fixed_linear, fixed_root."""
    root: float = setting(2.0, least=1.0)
    """With root: which one; 2 is the square root."""
    multiple: int = setting(8, least=1)
    """Lengths are multiples of this number: kernels are fastest with multiples of 8, or 64 on an NPU."""

    def length(self, step: int, whole: int) -> int:
        """Return the tokens per sample of a step, counted from 1; `whole` is model.sequence."""
        if not self.start or step >= self.steps:
            return whole
        share: float = (step / self.steps) ** (1.0 / (self.root if self.schedule == "root" else 1.0))
        length = math.floor(share * (whole - self.start) + self.start)
        return min(length - length % self.multiple, whole)


def curriculum_faults(
    own: CurriculumConfig, model: ModelConfig, parallel: ParallelConfig, task: str
) -> Iterator[Fault]:
    """Yield the faults of a curriculum."""
    key, sequence = "train.curriculum", model.sequence
    if own == CurriculumConfig():
        return
    if not own.start or not own.steps:
        missing = "start" if not own.start else "steps"
        yield Fault(f"{key}.{missing}", "missing", "as in {start: 64, steps: 1000}")
        return
    if own.root != CurriculumConfig().root and own.schedule != "root":
        yield Fault(f"{key}.root", f"goes with schedule root, and schedule is {own.schedule}", "leave it out")
    if own.start > sequence:
        yield Fault(
            f"{key}.start", f"is {own.start}, and samples have {sequence} tokens", f"use {sequence} or less"
        )
    for name, value in (("start", own.start), ("multiple", sequence)):
        if value % own.multiple:
            problem = f"{value} tokens are not a multiple of {own.multiple}"
            yield Fault(f"{key}.{name}", problem, "change it, or curriculum.multiple")
    parts = parallel.context * (parallel.tensor if parallel.sequence else 1)
    if own.multiple % parts:
        problem = f"{own.multiple} tokens are not divisible by {parts} ranks"
        yield Fault(f"{key}.multiple", problem, f"use a multiple of {parts}")
    if model.kind == "glm":
        yield Fault(key, "GLM's samples are not cut: windows has their lengths", "leave it out")
    if task:
        yield Fault(key, "examples of a task are not cut", "leave it out")
