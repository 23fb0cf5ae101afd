"""Refuse token ids that the model does not have, with one message in every layout."""

from __future__ import annotations

from torch import Tensor

from trainer.errors import DataError


def check_token_ids(ids: Tensor, vocab: int) -> None:
    """Raise DataError if any of the ids, which lie in the node's memory, is outside [0, vocab).

    Without it an id beyond the vocabulary would be a bare IndexError on one rank, an embedding of zeros on tensor
    parallel ranks, and a loss without its target.
    """
    if not ids.numel():
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocab:
        raise DataError(
            f"a batch has token id {low if low < 0 else high}, and the model has the ids 0 to {vocab - 1}",
            "check the corpus: clusterctl data verify PREFIX; or raise train.model.vocab",
        )
