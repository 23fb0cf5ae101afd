"""Load paramiko without two modules that it imports and clusterctl does not need."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from types import ModuleType

_TURN = threading.Lock()
METADATA = "importlib.metadata"


def load_paramiko() -> None:
    """Load paramiko, but neither invoke nor importlib.metadata.

    paramiko needs invoke (which loads asyncio, ssl and a YAML reader: half of its 85 ms) only for `Match exec` in
    configuration files, and clusterctl lets OpenSSH read these. Fabric still loads invoke itself. paramiko needs
    importlib.metadata (which loads an email parser: 10 ms) only for its own version, which is also in the name of a
    folder next to it.
    """
    with _TURN:
        if "paramiko" in sys.modules or "invoke" in sys.modules:
            import paramiko

            return
        # None makes `import invoke` raise ImportError.
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
    """Replaces importlib.metadata while paramiko is loaded; has only `version`."""

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
