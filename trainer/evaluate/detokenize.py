"""Undo the tokenisation of WikiText, as Megatron and lm-eval both do before they score it."""

from __future__ import annotations

import re

# In this order. The second pattern is theirs: its slashes keep it from matching anything in WikiText, and a repaired
# one would give other numbers.
_REPLACEMENTS: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    (r"/' [0-9]/", "/'[0-9]/"),
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    (r" : ", ": "),
    (r" ; ", "; "),
    (r" \. ", ". "),
    (r" ! ", "! "),
    (r" \? ", "? "),
    (r" , ", ", "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (r" ° ", "°"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)
_COMPILED = tuple((re.compile(pattern), text) for pattern, text in _REPLACEMENTS)


def wikitext(text: str) -> str:
    """Return running text for text of the WikiText corpora."""
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    return text
