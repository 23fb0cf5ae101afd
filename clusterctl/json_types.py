"""The type of a JSON object, for the modules that read or write one."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
