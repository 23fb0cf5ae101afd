"""Find half of a surrogate pair in a text: JSON can contain one, and no tokenizer accepts it."""

from __future__ import annotations

import json
import re

_HALF = re.compile("[\ud800-\udfff]")


def half_in(value: object) -> str:
    """Return the error message for half of a surrogate pair anywhere in a value of JSON; "" if it has none."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    found = None if text.isascii() else _HALF.search(text)
    if found is None:
        return ""
    code = ord(found[0])
    # Python's escape for a byte of the command line that is not UTF-8.
    if 0xDC80 <= code <= 0xDCFF:
        return f"byte 0x{code - 0xDC00:02x} is not UTF-8"
    return f"half of a surrogate pair, \\u{code:04x}, without the other half"
