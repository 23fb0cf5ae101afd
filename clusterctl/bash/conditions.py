"""Whether a test of a script holds: True, False, or None if that is known only when it runs."""

from __future__ import annotations

import re
from collections.abc import Callable

from clusterctl.bash.expand import text_of
from clusterctl.bash.texts import BEGIN, END, Shell, compiled, is_open, pattern, with_classes

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_TEXTS = ("=", "==", "!=", "=~", "<", ">")


def holds(shell: Shell, words: list[str], *, double: bool) -> bool | None:
    """Return whether the test of these written words holds; `double` for `[[ ]]`, with patterns and `&&`."""
    try:
        reader = _Reader(shell, words, double)
        value = reader.either()
    except (IndexError, ValueError, RecursionError):
        return None
    return None if reader.words else value


def words_of(written: str) -> list[str]:
    """Return the written words of a test: divided at spaces outside quotes, with `&&`, `||` and brackets apart."""
    part = re.compile(
        r"""\s+|\\.|'[^']*'|"(?:\\.|\$\([^)]*\)|[^"\\])*"|\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\((?:[^()]|\([^()]*\))*\)"""
        r"""|\$\{[^}]*\}|`[^`]*`|&&|\|\||.""",
        re.S,
    )
    result: list[str] = []
    begun = False
    for token in part.findall(written):
        apart = token in ("&&", "||") or (
            token in "()" and (not begun or token == ")") and result[-1:] != ["=~"]
        )
        if token.isspace() or apart:
            begun = False
            result += [token] if apart else []
        elif begun:
            result[-1] += token
        else:
            result.append(token)
            begun = True
    return result


class _Reader:
    def __init__(self, shell: Shell, words: list[str], double: bool) -> None:
        self.shell, self.words, self.double = shell, words, double

    def either(self) -> bool | None:
        value = self.both()
        while self.words and self.words[0] in ("||", "-o"):
            del self.words[0]
            other = self.both()
            value = True if value or other else None if value is None or other is None else False
        return value

    def both(self) -> bool | None:
        value = self.one()
        while self.words and self.words[0] in ("&&", "-a"):
            del self.words[0]
            other = self.one()
            value = False if value is False or other is False else None if None in (value, other) else True
        return value

    def one(self) -> bool | None:
        word = self.words.pop(0)
        if word == "!" and self.words:
            value = self.one()
            return None if value is None else not value
        if word == "(" and self.words:
            value = self.either()
            del self.words[0]
            return value
        if self.words and self.words[0] in (*_TEXTS, *_NUMBERS):
            return self.compared(word, self.words.pop(0), self.words.pop(0))
        if re.fullmatch(r"-[a-zA-Z]", word) and self.words and self.words[0] not in ("&&", "||", ")"):
            return self.asked(word, self.words.pop(0))
        return self.filled(word)

    def text(self, written: str) -> str:
        return text_of(self.shell, written, tested=True)

    def filled(self, written: str) -> bool | None:
        """Return whether a text is not empty; None if it is unknown as a whole."""
        text = self.text(written)
        return None if is_open(text) and not re.sub(f"{BEGIN}[^{END}]*{END}", "", text) else bool(text)

    def asked(self, letter: str, written: str) -> bool | None:
        if letter in ("-n", "-z"):
            value = self.filled(written)
            return None if value is None else value == (letter == "-n")
        if letter == "-v":
            return self.shell.value(self.text(written)) is not None
        # A file of the machine where the script runs.
        return None

    def compared(self, first: str, sign: str, second: str) -> bool | None:
        left = self.text(first)
        expression = sign == "=~" and not re.search(r"[\"'$]", second)
        patterned = self.double and sign in ("=", "==", "!=", "=~")
        right = second if expression else text_of(self.shell, second, tested=True, as_pattern=patterned)
        if is_open(left) or is_open(right):
            return None
        if sign in _NUMBERS:
            numbers = [self.shell.sum(text) for text in (left, right)] if self.double else [left, right]
            return _NUMBERS[sign](*(int(number.strip()) for number in numbers))
        if sign == "=~":
            return compiled(with_classes(right).replace("[[", r"[\["), left).search(left) is not None
        if sign in "<>":
            return left < right if sign == "<" else left > right
        equal = compiled(pattern(right), left).fullmatch(left) is not None if patterned else left == right
        return equal == (sign != "!=")
