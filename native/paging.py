"""Describe which keys and values one new token of each text attends to, and where they are in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PAGE = 16
"""The positions of a page."""


@dataclass(frozen=True)
class Reach:
    """The pages of some texts, and the positions in them that each text's new token attends to."""

    tables: Tensor
    """(texts, pages) in int32: the pages of each text, in order; entries after its last page may be any page."""
    first: Tensor
    """(texts,) in int32: the first position that a token attends to."""
    last: Tensor
    """(texts,) in int32: the position after the last one that a token attends to."""
    lengths: tuple[int, ...]
    """The numbers of `last`, in CPU memory."""
    from_start: bool = True
    """Whether every token attends to its text from the first position on."""
