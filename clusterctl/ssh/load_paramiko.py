"""paramiko, loaded without what we do not use of it."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from types import ModuleType

_TURN = threading.Lock()
METADATA = "importlib.metadata"


def load_paramiko() -> None:
    """Load paramiko, which loads invoke (and with it asyncio, ssl and a yaml reader: half of its 85 ms) only
    for `Match exec` in configuration files. Those we let OpenSSH read. Fabric still loads invoke for itself.

    To learn its own version it loads importlib.metadata, and with that a mail reader: 10 ms, for a version that
    the name of a folder next to it contains.
    """
    with _TURN:
        if "paramiko" in sys.modules or "invoke" in sys.modules:
            import paramiko

            return
        # "there is none", to whoever imports it.
        sys.modules["invoke"] = None  # type: ignore[assignment]
        stands_in = METADATA not in sys.modules
        if stands_in:
            sys.modules[METADATA] = _Metadata(METADATA)
        try:
            import paramiko  # noqa: F401
        finally:
            del sys.modules["invoke"]
            if stands_in:
                del sys.modules[METADATA]


class _Metadata(ModuleType):
    """In importlib.metadata's place for one question."""

    def version(self, name: str) -> str:
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            for entry in os.listdir(os.path.dirname(folder)):
                if entry.startswith(f"{name}-") and entry.endswith(".dist-info"):
                    return entry[len(name) + 1 : -len(".dist-info")]
        del sys.modules[METADATA]
        from importlib.metadata import version

        try:
            return version(name)
        finally:
            sys.modules[METADATA] = self
