"""Format numbers for people, and escape untrusted text for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

# The smallest number that three digits show in the next unit: 999.5 is `1`, not `1e+03`.
_NEXT = 0.9995


def count(number: float) -> str:
    """Return a number in short form: `1.23M` for 1234567."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size * _NEXT:
            return f"{number / size:.3g}{letter}"
    return f"{number:.4g}"


def size(number: float) -> str:
    """Return a number of bytes in short form: `1.4 GB`."""
    for unit, letter in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit * _NEXT:
            return f"{number / unit:.3g} {letter}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """Return seconds as `42s`, `3m05s`, `2h10m` or `159d14h`."""
    if seconds < 0 or math.isinf(seconds) or math.isnan(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 3 * 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun: `1 node`, `2 nodes`."""
    return f"{number} {noun}" + ("" if number == 1 else ending)


def epochs(number: float) -> str:
    """Return a number of epochs: `1 epoch`, `0.25 epochs`, `120 epochs`."""
    text = f"{number:.0f}" if number >= 99.5 else f"{number:.2g}"
    return f"{text} epoch" + ("" if text == "1" else "s")


def short_time(seconds: float) -> str:
    """Return seconds as `duration` does, but with three digits below ten seconds: `1.02 s`, `35 ms`."""
    if not 0 <= seconds < 9.995:
        return duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1000:.3g} ms"


def rank_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 4 to 7` or `ranks 1, 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def device_text(devices: Sequence[int]) -> str:
    """Return device ids in short form: `[0,8)`, or `0,2,5`."""
    ids = list(devices)
    if ids and ids == list(range(ids[0], ids[0] + len(ids))):
        return f"[{ids[0]},{ids[-1] + 1})"
    return ",".join(map(str, ids)) or "none"


# Control characters (C0 except tab, DEL, C1), bidirectional controls and invisible characters: all of them can forge
# or erase what a user reads. Callers split lines first. Lone surrogates stand for bytes that are not UTF-8.
UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb]"
)


def escape_controls(text: str) -> str:
    r"""Return the text with control and invisible characters written as `\x1b` and the like."""
    return UNSAFE.sub(_escaped, text)


def escape_in_json(text: str) -> str:
    """Return JSON text with control and invisible characters escaped, so that it is safe on a terminal."""
    return UNSAFE.sub(_escaped_in_json, text)


def _escaped_in_json(match: re.Match[str]) -> str:
    character = match.group()
    # Control characters below 0x7f in JSON text are its own line breaks.
    return character if character < "\x7f" else f"\\u{ord(character):04x}"


def _escaped(match: re.Match[str]) -> str:
    number = ord(match.group())
    if 0xDC80 <= number <= 0xDCFF:
        # A byte that was decoded with surrogateescape.
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
