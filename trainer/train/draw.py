"""Draw the initial weights of a new training, after it is known that no checkpoint has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.checkpoint.part import MOMENTS, Part
from trainer.config.train_config import TrainConfig
from trainer.engine.torch_engine import Engine
from trainer.model.adapter import MARK, drawn_adapter
from trainer.model.layers import drawn_matrix, residual_deviation

# Tensors with a row per token.
TABLES = ("tokens.weight", "output.weight")


def draw(config: TrainConfig, engine: Engine) -> None:
    """Give the engine the initial weights that `train.init` does not have. A collective of all ranks."""
    found: set[str] = set()

    @torch.no_grad()
    def fill(parts: Sequence[Part]) -> None:
        whole: dict[str, Tensor] = {}
        # Draw all parts of a tensor together, so that it is drawn once and only one tensor is in memory.
        for part in sorted(parts, key=lambda part: part.key):
            if not _is_drawn(part, config):
                continue
            if part.key not in whole:
                whole = {part.key: _drawn(part, config)}
            part.tensor.copy_(whole[part.key][tuple(slice(start, stop) for start, stop in part.box)])
            found.add(part.key)

    engine.load_parts(fill, 0)
    fill(engine.fixed_parts())
    engine.replicate(found)


def _is_drawn(part: Part, config: TrainConfig) -> bool:
    """Return whether a part is drawn: not if it is a bias, a norm or the B of an adapter, or if a source has it."""
    if len(part.shape) < 2 or part.key.startswith(MOMENTS) or (MARK in part.key and part.key.endswith(".b")):
        return False
    lacks = MARK in part.key or part.key.startswith("classifier.")
    return not config.init.source or lacks or (config.init.extend_vocabulary and part.key in TABLES)


def _drawn(part: Part, config: TrainConfig) -> Tensor:
    if MARK in part.key:
        return drawn_adapter(part.key, part.shape, config.seed)
    model = config.model
    return drawn_matrix(part.key, part.shape, model.init_std, residual_deviation(model), config.seed)
