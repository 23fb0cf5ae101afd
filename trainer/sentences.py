"""A document cut into sentences, each a unit of its own in the index; nothing of the text is lost but the gaps."""

from __future__ import annotations

import re

# An end: a full stop and its like, closing quotes and brackets, then a gap. Chinese and Japanese need no gap.
END = re.compile(r"[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”’」』）》]*\s*|\n\s*\n\s*")
LAST_WORD = re.compile(r"(?<![\w.])((?:[^\W\d_]\.)*[^\W\d_]*)\.[\"'”’»)\]]*\s*$")
BEGINS_LOW = re.compile(r"[^\w]*[a-zà-öø-ÿа-яα-ω]")
ABBREVIATIONS = {
    "mr", "mrs", "ms", "dr", "prof", "rev", "hon", "st", "sr", "jr", "gen", "col", "capt", "lt", "sgt", "maj",
    "gov", "sen", "rep", "pres", "vs", "etc", "e.g", "i.e", "cf", "al", "fig", "figs", "eq", "no", "nos", "vol",
    "vols", "pp", "p", "ch", "sec", "ed", "eds", "trans", "approx", "ca", "c", "inc", "ltd", "co", "corp", "mt",
    "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "dept", "univ", "est",
    "viz", "ibid", "op", "cit", "z.b", "d.h", "u.a", "bzw", "nr", "m", "mme", "mlle", "sra", "dra",
}  # fmt: skip


def sentences(text: str) -> list[str]:
    """The sentences of a text, without the white space between them."""
    found, begin = [], 0
    for end in END.finditer(text):
        if _goes_on(text, begin, end):
            continue
        found.append(text[begin : end.end()].strip())
        begin = end.end()
    found.append(text[begin:].strip())
    return [one for one in found if one]


def _goes_on(text: str, begin: int, end: re.Match[str]) -> bool:
    """Whether a full stop ends an abbreviation or an initial, or a small letter follows it."""
    mark = end[0]
    if "\n\n" in mark.replace("\r", "") or mark[0] in "。！？":
        return False
    if BEGINS_LOW.match(text, end.end(), end.end() + 3):
        return True
    word = LAST_WORD.search(text, max(begin, end.start() - 24), end.end()) if mark[0] == "." else None
    if word is None:
        return False
    short = word[1].lower()
    return (
        short in ABBREVIATIONS
        or (len(short) == 1 and word[1].isupper())
        or bool(re.fullmatch(r"(?:\w\.)+\w", short))
    )
