"""Expand the words of a script: quotes, variables, patterns, sums; unknown parts stay as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator

from clusterctl.bash.texts import (
    BEGIN,
    END,
    MOST_CHARACTERS,
    UNSET,
    Shell,
    compiled,
    divided,
    is_open,
    pattern,
    shown,
    unknown,
    without_unset,
)

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"(!?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?")
_BRACKETS = {"(": ")", "{": "}"}
# Words that `{1..N}` stands for.
MOST_WORDS = 1000


class Expander:
    """Expands one written word into fields."""

    def __init__(self, shell: Shell, *, as_pattern: bool = False) -> None:
        self.shell, self.as_pattern = shell, as_pattern
        self.fields: list[str] = []
        self.open = False
        """Whether more text continues the last field."""

    def expand(self, written: str) -> list[str]:
        """Return the fields of a word; none if it is an unquoted expansion of nothing."""
        for each in _braces(written) if "{" in written and not self.as_pattern else [written]:
            self.open = False
            if each[:1] == "~" and each[1:2] in ("", "/"):
                self._add(unknown("~"))
            for text, quoted, several in self._parts(each.removeprefix("~") if self.open else each):
                add = self._add if quoted else self._add_divided
                for at, part in enumerate([text] if several is None else several):
                    self.open = self.open and not at
                    add(part)
        return self.fields

    def _add(self, text: str) -> None:
        if self.open:
            self.fields[-1] += text
        else:
            self.fields.append(text)
        self.open = True

    def _add_divided(self, text: str) -> None:
        words = divided(text)
        if text[:1].isspace():
            self.open = False
        for at, word in enumerate(words):
            self.open = self.open and not at
            self._add(word)
        if words and text[-1:].isspace():
            self.open = False

    def _literal(self, text: str) -> str:
        """Return text that is no pattern."""
        return re.sub(r"([*?\[\]\\@+(])", r"\\\1", text) if self.as_pattern else text

    def _parts(self, written: str, *, inside: bool = False) -> Iterator[tuple[str, bool, list[str] | None]]:
        """Yield each part: its text, whether it is kept whole, and the fields if it has several of its own."""
        at = 0
        while at < len(written):
            char = written[at]
            if char == BEGIN:
                end = written.index(END, at) + 1
                yield self.shell.hidden[int(written[at + 1 : end - 1])], True, None
                at = end
            elif char == "\\" and not inside:
                if written[at + 1 : at + 2] != "\n":
                    yield self._literal(written[at + 1 : at + 2]), True, None
                at += 2
            elif char == "\\" and written[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
                yield written[at + 1 : at + 2].replace("\n", ""), True, None
                at += 2
            elif char == "'" and not inside:
                end = _end_of(written, at)
                yield self._literal(written[at + 1 : end - 1]), True, None
                at = end
            elif char == '"' and not inside:
                end = _end_of(written, at)
                parts = list(self._parts(written[at + 1 : end - 1], inside=True))
                # "$@" without arguments is no word.
                if not parts or any(several != [] for _, _, several in parts):
                    yield "", True, None
                for text, _, several in parts:
                    yield self._literal(text), True, several
                at = end
            elif char == "$" and written[at + 1 : at + 2] == "'" and not inside:
                end = _end_of(written, at + 1)
                yield written[at + 2 : end - 1].replace("\\n", "\n").replace("\\t", "\t"), True, None
                at = end
            elif char in "$`" and (end := _end_of(written, at)) > at + 1:
                text, several = self._expansion(written[at:end], quoted=inside)
                yield text, inside or self.as_pattern, several
                at = end
            else:
                end = at + 1
                while end < len(written) and written[end] not in f"\\'\"$`{BEGIN}":
                    end += 1
                yield written[at:end], True, None
                at = end

    def _expansion(self, written: str, *, quoted: bool) -> tuple[str, list[str] | None]:
        """Return the text of `$NAME`, `${...}`, `$(...)`, `$((...))` or backquotes, or several fields."""
        if written.startswith("$(("):
            return self.shell.sum(text_of(self.shell, written[3:-2])), None
        if written.startswith(("$(", "`")):
            return self.shell.output(written[2:-1] if written[0] == "$" else written[1:-1]), None
        if written.startswith("${"):
            return self._braced(written[2:-1], quoted)
        return self._whole(written[1:], written[1:], quoted)

    def _whole(self, name: str, written: str, quoted: bool, index: str = "") -> tuple[str, list[str] | None]:
        """Return the value of a variable; `index` chooses an entry of an array."""
        value = self.shell.value(name)
        if value is None and index in ("@", "*"):
            return "", []
        if value is None:
            return f"{BEGIN}{UNSET}${written}{END}", None
        if isinstance(value, str):
            return value if index in ("", "0", "@", "*") else "", None
        if name == "@" or index == "@" or (index == "*" and not quoted) or (name == "*" and not quoted):
            return "", list(value.values())
        if name == "*" or index == "*":
            return " ".join(value.values()), None
        key = text_of(self.shell, index, tested=True).strip() or "0"
        if key not in value and re.search(r"[-+*/%]|^[A-Za-z_]", key):
            key = self.shell.sum(key)
        if re.fullmatch(r"-\d+", key):
            key = [*[""] * int(key[1:]), *value][-int(key[1:])]
        return (unknown(f"${written}") if is_open(key) else value.get(key, "")), None

    def _braced(self, inner: str, quoted: bool) -> tuple[str, list[str] | None]:
        """Return the value of `${inner}`."""
        if counted := re.fullmatch(r"#([A-Za-z_]\w*|[0-9@*])(?:\[([^\]]+)\])?", inner):
            text, several = self._whole(counted[1], inner, True, counted[2] or "")
            number = str(len(text if several is None else several))
            return (unknown(f"${{{inner}}}") if is_open(text) else number), None
        found = _PARAMETER.match(inner)
        if found is None:
            return unknown(f"${{{inner}}}"), None
        indirect, name, index = found[1], found[2], found[3] or ""
        rest = inner[found.end() :]
        if indirect and index:
            value = self.shell.value(name)
            return "", list(value) if isinstance(value, dict) else ["0"] if value else []
        if indirect:
            target = self.shell.value(name)
            if not isinstance(target, str) or is_open(target):
                return unknown(f"${{{inner}}}"), None
            name = target
        if not rest:
            return self._whole(
                name, f"{{{inner}}}" if index or (len(name) > 1 and name.isdigit()) else name, quoted, index
            )
        return self._changed(name, index, rest, inner, quoted)

    def _changed(
        self, name: str, index: str, rest: str, inner: str, quoted: bool
    ) -> tuple[str, list[str] | None]:
        """Return `${NAME<rest>}`: a default, a part cut off or replaced, a slice, another case."""
        own = self.shell.value(name)
        if sign := re.match(r":?[-=+?]", rest):
            operator, word = sign[0][-1], rest[sign.end() :]
            if isinstance(own, str) and own and not without_unset(own):
                own = None
            filled = bool(own) if ":" in sign[0] else own is not None
            if operator == "+":
                return (text_of(self.shell, word) if filled else ""), None
            if filled:
                return self._whole(name, name, quoted, index)
            if operator == "?":
                return unknown(f"${name}"), None
            text = text_of(self.shell, word)
            if operator == "=":
                self.shell.assign(name, text)
            return text, None
        whole, several = self._whole(name, name, quoted, index)
        texts = [whole] if several is None else several
        if rest[0] == ":" and several is not None:
            start, _, length = rest[1:].partition(":")
            first = max(0, int(self.shell.sum(start) or 0) - (name in "@*"))
            return "", texts[first : first + int(self.shell.sum(length))] if length else texts[first:]
        changed = [self._cut(text, rest, inner) for text in texts]
        return (changed[0], None) if several is None else ("", changed)

    def _cut(self, text: str, rest: str, inner: str) -> str:
        """Return a text with `rest` of a braced expansion applied; it is unknown if it cannot be."""
        try:
            cut = None if is_open(text) else self._known_cut(text, rest)
        except ValueError:
            cut = None
        return unknown(f"${{{inner}}}") if cut is None else cut

    def _known_cut(self, text: str, rest: str) -> str | None:
        two = rest[:2]
        if rest[0] in "#%":
            greedy = two in ("##", "%%")
            made = compiled(pattern(text_of(self.shell, rest[1 + greedy :], as_pattern=True)), text)
            ends = range(len(text) + 1) if greedy == (rest[0] == "%") else range(len(text), -1, -1)
            if rest[0] == "#":
                ends = range(len(text), -1, -1) if greedy else range(len(text) + 1)
                return next((text[end:] for end in ends if made.fullmatch(text[:end])), text)
            return next((text[:end] for end in ends if made.fullmatch(text[end:])), text)
        if rest[0] == "/":
            everywhere = two == "//"
            old, _, new = rest[1 + everywhere :].partition("/")
            made = compiled(pattern(text_of(self.shell, old, as_pattern=True)), text)
            replacement = text_of(self.shell, new)
            return made.sub(lambda match: replacement, text, count=0 if everywhere else 1)
        if rest[0] == ":":
            start, _, length = rest[1:].partition(":")
            numbers = [self.shell.sum(part) for part in (start, length) if part.strip()]
            if all(re.fullmatch(r"-?\d+", number) for number in numbers):
                first, *more = map(int, numbers)
                return text[first:][: more[0]] if more else text[first:]
        if two in (",,", "^^"):
            return text.lower() if two == ",," else text.upper()
        return None


def text_of(shell: Shell, written: str, *, tested: bool = False, as_pattern: bool = False) -> str:
    """Return a word as one text; a variable that is not set is empty where it is tested, else unknown."""
    text = " ".join(Expander(shell, as_pattern=as_pattern).expand(written))
    if tested and not shell.alone:
        text = without_unset(text)
    return text if len(text) <= MOST_CHARACTERS else unknown(f"{shown(written)[:40]}...")


def quoted_text(shell: Shell, written: str) -> str:
    """Return a here-document, in which quotes are text."""
    parts = Expander(shell)._parts(written, inside=True)
    return "".join(text if several is None else " ".join(several) for text, _, several in parts)


def _braces(written: str) -> list[str]:
    """Return the words that `a{b,c}` or `{1..3}` stands for; a word with quotes or expansions in braces is itself."""
    found = re.search(r"(?<![$\\])\{([^{}\s\"'`$]*)\}", written)
    if found is None or re.search(r"[\"'`]", written[: found.start()]):
        return [written]
    if numbers := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", found[1]):
        first, last = int(numbers[1]), int(numbers[2])
        step = 1 if first <= last else -1
        parts = [str(number) for number in range(first, last + step, step)[:MOST_WORDS]]
    else:
        parts = found[1].split(",")
    if len(parts) == 1:
        return [written]
    return [
        word for part in parts for word in _braces(written[: found.start()] + part + written[found.end() :])
    ]


def _end_of(text: str, at: int) -> int:
    """Return the place after the quote, expansion or command that begins at `at`."""
    char = text[at]
    if char == "'":
        return (text.find("'", at + 1) + 1) or len(text)
    if char in '"`':
        place = at + 1
        while place < len(text) and text[place] != char:
            place = (
                place + 2
                if text[place] == "\\"
                else _end_of(text, place)
                if text[place] == "$"
                else place + 1
            )
        return min(place + 1, len(text))
    opening = text[at + 1 : at + 2]
    if opening not in _BRACKETS:
        found = _NAME.match(text, at + 1)
        return found.end() if found else at + 1
    place, depth = at + 2, 1
    while place < len(text) and depth:
        inner = text[place]
        if inner == "\\":
            place += 1
        elif inner in "'\"`" or (inner == "$" and text[place + 1 : place + 2] in _BRACKETS):
            place = _end_of(text, place)
            continue
        depth += (inner == opening) - (inner == _BRACKETS[opening])
        place += 1
    return place
