"""Rotary positions: base, rotated part, and scaling beyond the positions of the model's training."""

from __future__ import annotations

from dataclasses import dataclass

from clusterctl.wire.fields import setting

SCALINGS = ("none", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """The angles of rotary positions."""

    base: float = setting(10_000.0, above=1.0)
    """Pair i of a head turns by base^(-2i / size) per position."""
    part: float = setting(1.0, above=0.0)
    """Fraction of each head that is rotated, its first numbers; at most 1."""
    interleaved: bool = setting(False)
    """Rotate neighbours (0, 1), (2, 3), ... instead of a number of the first half with one of the second."""
    scaling: str = setting("none", choices=SCALINGS)
    """linear divides positions by factor; dynamic raises the base for sequences beyond `original`; yarn and llama3
    slow down the slow pairs alone."""
    factor: float = setting(1.0, least=1.0)
    """How much longer sequences may be than `original`."""
    original: int = setting(0, least=0)
    """Positions that the model was trained on before the scaling; 0: the model's `positions`, or its `sequence`."""
    low_freq: float = setting(1.0, above=0.0)
    """With llama3: pairs that turn less often than this over `original` positions are slowed down by `factor`."""
    high_freq: float = setting(4.0, above=0.0)
    """With llama3: pairs that turn more often than this stay as they are."""
    beta_slow: float = setting(1.0, above=0.0)
    """With yarn: pairs that turn less often than this over `original` positions are slowed down by `factor`."""
    beta_fast: float = setting(32.0, above=0.0)
    """With yarn: pairs that turn more often than this stay as they are."""
    truncate: bool = setting(True)
    """With yarn: round the pairs between which frequencies change to whole ones."""
    attention: float = setting(0.0, least=0.0)
    """With yarn: factor of cosines and sines; 0: 0.1 x ln(factor) + 1."""
