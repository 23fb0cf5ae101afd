"""What every reader of a format returns, and every writer takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from trainer.checkpoint.manifest import BaseWeights, Origin
from trainer.checkpoint.part import MOMENTS
from trainer.config.lora import LoraConfig
from trainer.config.model import ModelConfig
from trainer.config.train_config import TrainConfig
from trainer.weights.lazy import Lazy

Report = Callable[[int, int], None]
"""Called with the bytes that are done and with the bytes of all."""


@dataclass(frozen=True)
class Progress:
    """How far a training was; the defaults for weights alone."""

    step: int = 0
    optimizer_steps: int = 0
    consumed_samples: int = 0
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    tokens: int | None = None
    loss: float | None = None
    eval_loss: float | None = None


@dataclass(frozen=True)
class AdapterContents:
    """Adapters under our logical names, and the weights that they belong to."""

    lora: LoraConfig
    tensors: Mapping[str, Tensor]
    base: BaseWeights


@dataclass(frozen=True)
class Contents:
    """A model, whatever program saved it: its config and its tensors under our logical names."""

    model: ModelConfig
    tensors: Mapping[str, Lazy]
    """Parameters, and with state `exp_avg.NAME` and `exp_avg_sq.NAME`."""
    origin: Origin
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    """Tokenizer, generation config and the like, by their names in a folder."""
    progress: Progress = Progress()
    config: TrainConfig = field(default_factory=TrainConfig)
    """Of our own checkpoints, the config of the training."""
    notes: tuple[str, ...] = ()
    """What a user should know: settings that the other side does not have."""

    adapters: AdapterContents | None = None
    """Adapters that were added to the tensors, or that are the tensors themselves."""

    @property
    def with_state(self) -> bool:
        return any(name.startswith(MOMENTS) for name in self.tensors)

    @property
    def parameters(self) -> dict[str, Lazy]:
        """Return the weights without the optimizer's averages."""
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith(MOMENTS)}


@dataclass(frozen=True)
class ImportRequest:
    """What the user asked of an import."""

    state: bool = False
    heads: int = 0
    """Attention heads, where the source does not record them; 0: not given."""
    vocab: int = 0
    """Tokens without the padding of the table, where the source does not record them; 0: not given."""
    base: str = ""
    """Where the weights of adapters are."""


@dataclass(frozen=True)
class ExportRequest:
    """What the user asked of an export."""

    state: bool = False
    dtype: str = "fp32"
    tensor: int = 1
    """Parts of each matrix, where a format divides them into files."""
    pipeline: int = 1
    """Stages, where a format divides layers into files."""
    base: str = ""
    """Where the weights of adapters are, if they have moved."""
