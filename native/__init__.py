"""Fused ops: functions on tensors, each with several backends that are tested against one plain reference.

    ops = native.choose("cpu")    # or choose("cpu", "reference"), choose("cpu", {"attention": "reference"})
    loss = ops.cross_entropy(logits, targets)
    ops.report()                  # the chosen backends and the reasons, to print once at the start

Importing this package loads neither torch nor the compiled library; `choose` loads them.
"""

from __future__ import annotations

from native.masks import Dropout, Mask
from native.registry import (
    BackendUnavailable,
    BadRequest,
    Choice,
    Chosen,
    NativeError,
    Status,
    check,
    choose,
    survey,
)
from native.update import AdamWStep
from native.vocabulary import VocabularyPart

__all__ = [
    "AdamWStep",
    "BackendUnavailable",
    "BadRequest",
    "Choice",
    "Chosen",
    "Dropout",
    "Mask",
    "NativeError",
    "Status",
    "VocabularyPart",
    "check",
    "choose",
    "survey",
]
