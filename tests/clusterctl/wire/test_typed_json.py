"""JSON that becomes records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from clusterctl.wire import typed_json

VALUES = {"flag": False, "number": 1, "share": 0.5, "text": "a", "nothing": None, "list": [True, {}]}


@dataclass(frozen=True)
class _Record:
    anything: dict[str, Any]
    objects: dict[str, object] | None = None


def test_values_of_any_type_are_kept() -> None:
    record = typed_json.decode(_Record, {"anything": VALUES, "objects": VALUES})
    assert record == _Record(VALUES, VALUES)


def test_a_wrong_value_is_refused_with_its_key() -> None:
    with pytest.raises(typed_json.BadValue, match="objects"):
        typed_json.decode(_Record, {"anything": {}, "objects": 3})
