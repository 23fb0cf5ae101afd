"""Describe which keys and values one new token of each text sees, where they lie in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PAGE = 16
"""Positions of a page."""


@dataclass(frozen=True)
class Reach:
    """The pages of some texts, and the positions in them that the new token of each text sees."""

    tables: Tensor
    """(texts, pages) in int32: the pages of each text, in order; what is behind its last one is any page."""
    first: Tensor
    """(texts,) in int32: the first position that a token sees."""
    last: Tensor
    """(texts,) in int32: the position behind the last one that it sees."""
    lengths: tuple[int, ...]
    """The numbers of `last`, in the node's memory."""
    from_start: bool = True
    """Whether every token sees its text from the first position on."""
