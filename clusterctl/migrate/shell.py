"""Read the simple commands of a shell script without running anything.

Variables that the script itself sets are filled in, with defaults (`${N:-4}`) and sums of whole numbers. Expressions
whose value is known only when the script runs, such as `$(hostname)`, stay as written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from clusterctl.errors import Fault, InputFaults

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_BRACED = re.compile(r"\$\{([A-Za-z_0-9]+)(?:\[[@*]\])?(?::?-([^{}]*))?\}")
_PLAIN = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*|[0-9])")
_TERM = re.compile(r"[0-9]+|[-+*/%]")
# Words before a command that do not change which program it is.
PREFIXES = ("then", "else", "do", "!", "{", "time", "exec", "nohup", "sudo", "env", "export", "local", "set")
# Script files are short.
MOST_CHARACTERS = 1 << 20
# Rounds of filling in variables; more are needed only if a variable refers to itself, directly or through others.
MOST_ROUNDS = 20


@dataclass
class Word:
    """A word of a script, and the line on which it begins."""

    text: str
    line: int
    divides: bool = False
    """Whether it contains an expansion outside quotes, so that its value is divided into words."""
    literal: bool = False
    """Whether single quotes keep it from being filled in."""


@dataclass
class Command:
    """A simple command: its words, with variables filled in."""

    words: list[Word] = field(default_factory=list)


class Lexer:
    """Divides a text into words and ends of commands (None)."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.at, self.line = 0, 1

    def words(self) -> Iterator[Word | None]:
        """Yield words; None where a command ends, `(` and `)` as words of their own after `NAME=`."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r":
                self.at += 1
            elif char == "\\" and self.text[self.at + 1 : self.at + 2] in ("\n", "\r"):
                self._skip_line_end()
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char == "\n" or char in ";|&":
                self.line += char == "\n"
                self.at += 1
                yield None
            elif char in "()":
                self.at += 1
                yield Word(char, self.line, literal=True)
            else:
                yield self._word()

    def _skip_line_end(self) -> None:
        self.at += 2 if self.text[self.at + 1] == "\n" else 3
        self.line += 1

    def _word(self) -> Word:
        word = Word("", self.line)
        quoted = False
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;|&()":
            char = self.text[self.at]
            if char == "\\":
                if self.text[self.at + 1 : self.at + 2] in ("\n", "\r"):
                    self._skip_line_end()
                    continue
                word.text += self.text[self.at + 1 : self.at + 2]
                self.at += 2
            elif char == "'":
                word.text += self._until("'")
                word.literal = quoted = True
            elif char == '"':
                word.text += self._double_quoted()
                quoted = True
            elif char in "$`":
                word.text += self._expansion()
                word.divides = True
            else:
                word.text += char
                self.at += 1
        word.literal = word.literal and "$" in word.text
        word.divides = word.divides and not quoted
        return word

    def _until(self, end: str) -> str:
        """Return the text up to the closing quote `end`, and move behind it."""
        start, begun = self.at + 1, self.line
        found = self.text.find(end, start)
        if found < 0:
            raise InputFaults(
                [Fault(f"{self.source}:{begun}", f"a {end} is never closed", "close the quote")]
            )
        self.at = found + 1
        self.line += self.text.count("\n", start, found)
        return self.text[start:found]

    def _double_quoted(self) -> str:
        result, begun = "", self.line
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] == "\n":
                self._skip_line_end()
                result += " "
                continue
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\"):
                self.at += 1
                char = self.text[self.at]
            self.line += char == "\n"
            result += char
            self.at += 1
        if self.at >= len(self.text):
            raise InputFaults([Fault(f"{self.source}:{begun}", 'a " is never closed', "close the quote")])
        self.at += 1
        return result

    def _expansion(self) -> str:
        """Return `$NAME`, `${...}`, `$(...)` or a part in backquotes, as it is written."""
        if self.text[self.at] == "`":
            return "`" + self._until("`") + "`"
        start = self.at
        self.at += 1
        opening = self.text[self.at : self.at + 1]
        if opening in ("(", "{"):
            closing, depth = {"(": ")", "{": "}"}[opening], 0
            while self.at < len(self.text):
                depth += (self.text[self.at] == opening) - (self.text[self.at] == closing)
                self.line += self.text[self.at] == "\n"
                self.at += 1
                if not depth:
                    break
        elif found := re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?]").match(self.text, self.at):
            self.at = found.end()
        return self.text[start : self.at]


def commands(text: str, source: str) -> list[Command]:
    """Return the simple commands of a script with its variables filled in; raise InputFaults for open quotes."""
    if len(text) > MOST_CHARACTERS:
        raise InputFaults([Fault(source, "is too long for a script", "is this the right file?")])
    variables: dict[str, str] = {}
    found = []
    words: list[Word] = []
    stream = [*Lexer(text, source).words(), None]
    at = 0
    while at < len(stream):
        word = stream[at]
        at += 1
        if word is not None and not words and (assigned := _ASSIGNMENT.match(word.text)):
            name, more = assigned[1], bool(assigned[2])
            value = word.text[assigned.end() :]
            if not value and at < len(stream) and (opened := stream[at]) is not None and opened.text == "(":
                value, at = _array(stream, at + 1)
            value = value if word.literal else fill(value, variables)
            variables[name] = f"{variables.get(name, '')} {value}".strip() if more else value
        elif word is not None and not words and word.text in PREFIXES:
            continue
        elif word is not None:
            words.append(word)
        elif words:
            found.append(Command([part for each in words for part in _filled(each, variables)]))
            words = []
    return found


def _array(stream: list[Word | None], at: int) -> tuple[str, int]:
    """Return the words of `NAME=( ... )` as one text, and the place after the closing bracket."""
    parts = []
    while at < len(stream):
        word = stream[at]
        at += 1
        if word is not None and word.text == ")":
            break
        if word is not None:
            parts.append(word.text)
    return " ".join(parts), at


def _filled(word: Word, variables: dict[str, str]) -> Iterator[Word]:
    """Yield a word with variables filled in, or several words if its value is divided."""
    if word.literal:
        yield word
        return
    text = fill(word.text, variables)
    # An array in quotes is divided too, and so are options in a variable.
    if word.divides or "[@]}" in word.text:
        yield from (Word(part, word.line) for part in text.split())
    else:
        yield Word(text, word.line)


def fill(text: str, variables: dict[str, str]) -> str:
    """Return a text with the values of known variables; unknown ones stay as they are written."""
    for _ in range(MOST_ROUNDS):
        filled = _BRACED.sub(lambda match: _value(match, variables), text)
        filled = _PLAIN.sub(lambda match: variables.get(match[1], match[0]), filled)
        filled = _SUM.sub(lambda match: _computed(match, variables), filled)
        if filled == text or len(filled) > MOST_CHARACTERS:
            break
        text = filled
    return text


def _value(match: re.Match[str], variables: dict[str, str]) -> str:
    name, default = match[1], match[2]
    return variables.get(name) or (default if default is not None else variables.get(name, match[0]))


def _computed(match: re.Match[str], variables: dict[str, str]) -> str:
    """Return the value of `$((...))` with whole numbers, or the text itself; products come before sums."""
    text = _NAME.sub(lambda name: variables.get(name[0], name[0]), match[1])
    terms = _TERM.findall(text)
    if "".join(terms) != text.replace(" ", "") or len(terms) % 2 == 0:
        return match[0]
    numbers = [int(term) if term.isdigit() else None for term in terms[::2]]
    signs = terms[1::2]
    if any(number is None for number in numbers) or any(sign.isdigit() for sign in signs):
        return match[0]
    sums = [numbers[0] or 0]
    for sign, number in zip(signs, numbers[1:], strict=True):
        assert number is not None
        if sign in "+-":
            sums.append(number if sign == "+" else -number)
        elif sign == "*":
            sums[-1] *= number
        elif number == 0:
            return match[0]
        else:
            sums[-1] = int(sums[-1] / number) if sign == "/" else sums[-1] % number
    return str(sum(sums))


def is_open(text: str) -> bool:
    """Return whether a text has an expression whose value is known only when the script runs."""
    return bool(re.search(r"\$[A-Za-z_0-9{(@*#?]|`", text))
