"""Refuse token ids outside the vocabulary, with the same message in every layout."""

from __future__ import annotations

from torch import Tensor

from trainer.errors import DataError


def check_token_ids(ids: Tensor, vocab: int) -> None:
    """Raise DataError if any of the ids, which are in CPU memory, is outside [0, vocab).

    Without this check, an id beyond the vocabulary would raise a bare IndexError on one rank, but give an embedding of
    zeros and a wrong loss on tensor parallel ranks.
    """
    if not ids.numel():
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocab:
        raise DataError(
            f"a batch has token id {low if low < 0 else high}, but the model's ids are 0 to {vocab - 1}",
            "check the corpus: clusterctl data verify PREFIX; or raise train.model.vocab",
        )
