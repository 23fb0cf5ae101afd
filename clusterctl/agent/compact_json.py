"""JSON without spaces, as frames, records and manifests have it: their hashes depend on every byte.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import json

_encode = json.JSONEncoder(separators=(",", ":")).encode


def dumps(value: object) -> str:
    """Return a value as JSON in ASCII."""
    return _encode(value)
