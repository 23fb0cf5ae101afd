"""Report once if a backend leaves an op to the reference."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def report_fallback(op: str, backend: str, reason: str) -> None:
    """Warn once per reason that the reference computes `op`; a rank's warnings are in its log."""
    message = f"native {op}: the reference computes this, because backend {backend!r} {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)
