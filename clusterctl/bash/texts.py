"""Texts of a script with parts that are known only when it runs, and its patterns as regular expressions."""

from __future__ import annotations

import math
import re
from typing import Protocol

# Unknown parts stand between these characters, which no script contains.
BEGIN, END = "\ue000", "\ue001"
# The first character of an unknown part that stands for a variable which nothing sets.
UNSET = "\ue002"
_CLASSES = {
    "digit": "0-9",
    "alpha": "A-Za-z",
    "alnum": "A-Za-z0-9",
    "space": " \t\n\r\f\v",
    "upper": "A-Z",
    "lower": "a-z",
    "xdigit": "0-9A-Fa-f",
    "punct": "!-/:-@[-`{-~",
}
# A repetition of a repetition: it may take longer than anyone waits.
_NESTED = re.compile(r"[*+}]\)[*+{]")
# Limit of the ways in which the parts `*` of a pattern can share a text.
MOST_WAYS = 10**10

# A longer text is not filled in: variables can double their length with every line.
MOST_CHARACTERS = 1 << 20
# An array by index or key. A plain variable is a text.
Value = str | dict[str, str]


class Shell(Protocol):
    """What the expansion of a word asks the script's state."""

    hidden: list[str]
    alone: bool

    def value(self, name: str) -> Value | None: ...

    def assign(self, name: str, value: Value) -> None: ...

    def sum(self, text: str) -> str: ...

    def output(self, text: str) -> str: ...


def unknown(written: str) -> str:
    """Return a text that stands for a value known only when the script runs: what is written in its place."""
    return f"{BEGIN}{shown(written)}{END}"


def is_open(text: str) -> bool:
    """Return whether a part of the text is known only when the script runs."""
    return BEGIN in text


def shown(text: str) -> str:
    """Return the text with its unknown parts as the script writes them."""
    return text.replace(BEGIN, "").replace(END, "").replace(UNSET, "")


def without_unset(text: str) -> str:
    """Return the text with nothing in place of variables that nothing sets."""
    return re.sub(f"{BEGIN}{UNSET}[^{END}]*{END}", "", text)


def divided(text: str) -> list[str]:
    """Return the words of a text; an unknown part is never divided."""
    return re.findall(rf"(?:{BEGIN}[^{END}]*{END}|[^\s{BEGIN}])+", text)


def compiled(made: str, subject: str) -> re.Pattern[str]:
    """Return a regular expression for a text; raise ValueError if it is none, or could take minutes."""
    parts = len(re.findall(r"\.[*+]", made.removesuffix(".*")))
    if _NESTED.search(made) or math.comb(len(subject) + parts, parts) > MOST_WAYS:
        raise ValueError(f"{made[:40]} could take minutes")
    try:
        return re.compile(made, re.S)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None


def with_classes(text: str) -> str:
    """Return a text with the characters of `[:digit:]` and other classes in their place."""
    return re.sub(r"\[:([a-z]+):\]", lambda match: _CLASSES.get(match[1], match[0]), text)


def pattern(text: str) -> str:
    """Return a shell pattern as a regular expression."""
    result, at = "", 0
    while at < len(text):
        char = text[at]
        at += 1
        if char in "?*+@" and text[at : at + 1] == "(" and ")" in text[at:]:
            end = text.index(")", at)
            inner = "|".join(pattern(part) for part in text[at + 1 : end].split("|"))
            result += f"(?:{inner}){'' if char == '@' else char}"
            at = end + 1
        elif char == "*":
            result += ".*"
        elif char == "?":
            result += "."
        elif char == "[" and (found := re.match(r"[!^]?\]?(?:\[:[a-z]+:\]|[^\]])*\]", text[at:])):
            inside = with_classes(found[0][:-1]).replace("\\", r"\\").replace("[", r"\[")
            result += f"[{'^' + inside[1:] if inside[:1] == '!' else inside}]"
            at += found.end()
        elif char == "\\" and at < len(text):
            result += re.escape(text[at])
            at += 1
        else:
            result += re.escape(char)
    return result
