"""What of a sample counts and what sees what, by its end-of-document tokens: as Megatron-core makes them.

All three take the inputs of a batch, (batch, sequence), and answer for the same shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]


def loss_mask(inputs: Tokens, eod: int) -> NDArray[np.float32]:
    """0 where the input is an end of document: what follows it is another document's first token."""
    mask: NDArray[np.float32] = (inputs != eod).astype(np.float32)
    return mask


def positions(inputs: Tokens, eod: int) -> NDArray[np.int64]:
    """Positions that begin at 0 anew after each end of document."""
    at = np.arange(inputs.shape[-1], dtype=np.int64)
    after_end = np.zeros(inputs.shape, np.int64)
    after_end[..., 1:] = np.where(inputs[..., :-1] == eod, at[1:], 0)
    return at - np.maximum.accumulate(after_end, axis=-1)


def documents(inputs: Tokens, eod: int) -> NDArray[np.int64]:
    """The number of the document, within the sample, that each token belongs to."""
    number = np.zeros(inputs.shape, np.int64)
    number[..., 1:] = np.cumsum(inputs[..., :-1] == eod, axis=-1)
    return number


def hidden(inputs: Tokens, eod: int) -> NDArray[np.bool_]:
    """(batch, 1, sequence, sequence), True where a row's token must not see a column's: later, or elsewhere."""
    number = documents(inputs, eod)[..., None, :]
    length = inputs.shape[-1]
    later = np.triu(np.ones((length, length), np.bool_), 1)
    elsewhere: NDArray[np.bool_] = number[..., :, None] != number[..., None, :]
    return elsewhere | later
