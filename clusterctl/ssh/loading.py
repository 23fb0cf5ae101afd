"""paramiko, loaded without invoke."""

from __future__ import annotations

import sys
import threading

_TURN = threading.Lock()


def load_paramiko() -> None:
    """Load paramiko, which loads invoke (and with it asyncio, ssl and a yaml reader: half of its 85 ms) only
    for `Match exec` in configuration files. Those we let OpenSSH read. Fabric still loads invoke for itself.
    """
    with _TURN:
        if "paramiko" in sys.modules or "invoke" in sys.modules:
            import paramiko

            return
        sys.modules["invoke"] = None  # type: ignore[assignment]  # "there is none", to whoever imports it
        try:
            import paramiko  # noqa: F401
        finally:
            del sys.modules["invoke"]
