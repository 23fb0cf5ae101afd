"""The value that every reader of a format returns and every writer takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from trainer.checkpoint.manifest import BaseWeights, Origin
from trainer.checkpoint.part import MOMENTS
from trainer.config.lora import LoraConfig
from trainer.config.model import ModelConfig
from trainer.config.train_config import TrainConfig
from trainer.weights.lazy import Lazy


@dataclass(frozen=True)
class Progress:
    """The progress of a training; the defaults mean that only weights are known."""

    step: int = 0
    optimizer_steps: int = 0
    consumed_samples: int = 0
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    tokens: int | None = None
    loss: float | None = None
    eval_loss: float | None = None


@dataclass(frozen=True)
class AdapterContents:
    """Adapters under our logical names, and their base weights."""

    lora: LoraConfig
    tensors: Mapping[str, Tensor]
    base: BaseWeights


@dataclass(frozen=True)
class Contents:
    """A model saved by any program: its config, and its tensors under our logical names."""

    model: ModelConfig
    tensors: Mapping[str, Lazy]
    """The parameters; with state also `exp_avg.NAME` and `exp_avg_sq.NAME`."""
    origin: Origin
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    """The tokenizer, the generation config and other files, by their names in a folder."""
    progress: Progress = Progress()
    config: TrainConfig = field(default_factory=TrainConfig)
    """The config of the training, for our own checkpoints."""
    notes: tuple[str, ...] = ()
    """Notes for the user: settings that the other program does not have."""

    adapters: AdapterContents | None = None
    """The adapters that were added to the tensors, or that are the tensors."""

    @property
    def with_state(self) -> bool:
        return any(name.startswith(MOMENTS) for name in self.tensors)

    @property
    def moments(self) -> tuple[str, ...]:
        """Return the optimizer's averages that the contents have."""
        return MOMENTS if self.with_state else ()

    @property
    def parameters(self) -> dict[str, Lazy]:
        """Return the weights without the optimizer's averages."""
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith(MOMENTS)}
