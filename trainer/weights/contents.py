"""What every reader of a format returns, and every writer takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.part import MOMENTS
from trainer.config.lora import LoraConfig
from trainer.config.model import ModelConfig
from trainer.weights.lazy import Lazy

Report = Callable[[int, int], None]
"""Is told the bytes that are done, and the bytes of all."""


@dataclass(frozen=True)
class Progress:
    """How far a training was; of weights alone, nothing."""

    step: int = 0
    optimizer_steps: int = 0
    consumed_samples: int = 0
    loss_scale: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AdapterContents:
    """Adapters under our logical names, and the weights that they belong to."""

    lora: LoraConfig
    tensors: Mapping[str, Tensor]
    base: Mapping[str, str]
    """Where the weights are (`source`), and their `fingerprint`."""


@dataclass(frozen=True)
class Contents:
    """A model, whatever program saved it: its config and its tensors under our logical names."""

    model: ModelConfig
    tensors: Mapping[str, Lazy]
    """Parameters, and with state `exp_avg.NAME` and `exp_avg_sq.NAME`."""
    origin: Mapping[str, Any]
    """The format and the folder it was read from, and what the format records of the training."""
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    """Tokenizer, generation config and the like, by their names in a folder."""
    progress: Progress = Progress()
    config: Mapping[str, Any] = field(default_factory=dict)
    """Of our own checkpoints, the whole config of the training."""
    notes: tuple[str, ...] = ()
    """What a user should know: settings that the other side does not have."""

    adapters: AdapterContents | None = None
    """Those that the tensors contain, or those that the tensors are."""

    @property
    def with_state(self) -> bool:
        return any(name.startswith(MOMENTS) for name in self.tensors)

    @property
    def parameters(self) -> dict[str, Lazy]:
        """Return the weights without the optimizer's averages."""
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith(MOMENTS)}


@dataclass(frozen=True)
class NamedState:
    """The tensors of one tensor parallel rank by another program's names: weights, and averages by the same names."""

    weights: Mapping[str, Lazy]
    moments: Mapping[str, Mapping[str, Lazy]] = field(default_factory=dict)
    """`exp_avg` and `exp_avg_sq`, or nothing."""


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
