"""What fp16 multiplies the loss by, so that small gradients are not lost: fixed, or as high as overflows allow."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.config_parts import LossScaleConfig

GROWTH = 2.0


class LossScale:
    """Halved after overflows, doubled after a window of clean steps, in Megatron's order of things.

    `hysteresis` overflows are let pass before it halves; they are let pass anew only after a whole clean window.
    """

    def __init__(self, config: LossScaleConfig | None) -> None:
        """Without a config the scale is 1 and stays: the other precisions need none."""
        self.config = config
        self.value = config.initial if config else 1.0
        self.clean = 0  # steps since the last overflow or growth
        self.patience = config.hysteresis if config else 0

    @property
    def moves(self) -> bool:
        return self.config is not None and self.config.dynamic

    @property
    def can_fall(self) -> bool:
        """Whether an overflow is a matter of the scale: then it is no failure of the training."""
        return self.config is not None and self.config.dynamic and self.value > self.config.least

    def update(self, overflow: bool) -> None:
        """After each step."""
        if self.config is None or not self.config.dynamic:
            return
        if not overflow:
            self.clean += 1
            if self.clean >= self.config.window:
                self.clean, self.patience = 0, self.config.hysteresis
                self.value *= GROWTH
            return
        self.clean = 0
        self.patience -= 1
        if self.patience <= 0:
            self.value = max(self.value / GROWTH, self.config.least)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; nothing where the scale is no part of the training."""
        if self.config is None:
            return {}
        return {"value": self.value, "clean": self.clean, "patience": self.patience}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from what a checkpoint kept; a fixed scale is as the config says."""
        if self.moves and state:
            self.value = float(state["value"])
            self.clean, self.patience = int(state["clean"]), int(state["patience"])
