"""The sizes of a router of experts, from which parameters and plans follow. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.attention import WIDE


@dataclass(frozen=True)
class TopK:
    """A matrix scores all experts for each token, which goes to those of the highest scores."""

    hidden: int
    experts: int
    chosen: int
    """Experts per token."""
    biases: int = 0
    """The biases of each expert."""

    @property
    def parameters(self) -> int:
        """Return the parameters, which every tensor parallel rank has whole; 0 without experts."""
        return (self.hidden + self.biases) * self.experts

    def kept(self, tokens: int) -> int:
        """Return the bytes kept for the backward pass: all probabilities, and weights and places of the choices."""
        return tokens * (WIDE * self.experts + 34 * self.chosen)
