"""Text from elsewhere, made harmless for a terminal."""

from __future__ import annotations

import re

# C0 but tab, DEL, C1, and what turns the direction of text or hides in it: all can forge or erase what a
# user reads. Line breaks are a matter of the caller, who splits lines first; lone surrogates stand for bytes
# that were no UTF-8.
UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb]"
)


def escape_controls(text: str) -> str:
    r"""`\x1b` for an escape character and the like; everything that only looks like itself stays."""
    return UNSAFE.sub(_escaped, text)


def escape_in_json(text: str) -> str:
    """JSON that any reader takes and no terminal obeys: what is no visible character is escaped in its strings."""
    return UNSAFE.sub(_escaped_in_json, text)


def _escaped_in_json(match: re.Match[str]) -> str:
    character = match.group()
    return character if character < "\x7f" else f"\\u{ord(character):04x}"  # below are only JSON's own line breaks


def _escaped(match: re.Match[str]) -> str:
    number = ord(match.group())
    if 0xDC80 <= number <= 0xDCFF:
        return f"\\x{number - 0xDC00:02x}"  # a byte kept by surrogateescape
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
