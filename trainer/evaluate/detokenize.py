"""Undo the tokenisation of WikiText, as Megatron and lm-eval do before scoring."""

from __future__ import annotations

import re

# Apply in this order. The second pattern is the same as theirs: because of its slashes it matches nothing in WikiText,
# and a corrected pattern would give other results.
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
    """Return a text of the WikiText corpora as normal running text."""
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    return text
