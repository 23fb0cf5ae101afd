"""Load paramiko without invoke, which it imports and clusterctl does not need."""

from __future__ import annotations

import sys
import threading

_TURN = threading.Lock()


def load_paramiko() -> None:
    """Load paramiko; while it loads, `import invoke` finds nothing, as where invoke is not installed.

    paramiko needs invoke only for `Match exec` in configuration files, which clusterctl lets OpenSSH read. With invoke,
    and the asyncio, ssl and unittest that it loads, `exec` on one node takes 40 of 240 ms more. fabric loads invoke.
    """
    with _TURN:
        if "paramiko" not in sys.modules and "invoke" not in sys.modules:
            # Python's import system defines None: such a module is not found.
            sys.modules["invoke"] = None  # type: ignore[assignment]
            try:
                import paramiko
            finally:
                del sys.modules["invoke"]
        import paramiko  # noqa: F401
