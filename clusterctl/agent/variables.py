"""The environment of what is started on a node: the login's, what a setup changes in it, and the launcher's variables.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os

# Importing typing takes 10 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Optional


def raw(text: str) -> bytes:
    """Return the bytes of a text from the launcher, independent of the node's locale."""
    return text.encode("utf-8", "surrogateescape")


def environment(extra: Dict[str, Any], change: Optional[Dict[str, Any]] = None) -> Dict[bytes, bytes]:
    """Return the login's environment without the variables of SSH, changed by a setup, with `extra` added."""
    inherited = {name: value for name, value in os.environb.items() if not name.startswith(b"SSH_")}
    if change:
        inherited.update({raw(name): raw(value) for name, value in change["set"].items()})
        for name in change["unset"]:
            inherited.pop(raw(name), None)
    inherited.update({raw(str(name)): raw(str(value)) for name, value in extra.items()})
    return inherited
