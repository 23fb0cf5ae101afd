"""Report once where a backend hands an op to the reference."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def report_fallback(op: str, backend: str, reason: str) -> None:
    """Warn that the reference computes `op`, once for each reason; a rank's warnings are in its log."""
    message = f"native {op}: the reference computes this, because backend {backend!r} {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)
