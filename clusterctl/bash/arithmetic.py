"""Whole-number expressions of a shell: `$((a * 2 + 1))`, `let`, `((i++))`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(\*\*|<<|>>|[<>=!]=|&&|\|\||\+\+|--|[-+*/%]=|0[xX][0-9a-fA-F]+|[0-9]+|[A-Za-z_]\w*|\S)"
)
# Operators by how strongly they bind; all are left-associative but `**`, which is rare.
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<=": lambda a, b: int(a <= b),
        ">=": lambda a, b: int(a >= b),
        "<": lambda a, b: int(a < b),
        ">": lambda a, b: int(a > b),
    },
    {"<<": lambda a, b: a << b if b <= 256 else _refuse(), ">>": operator.rshift},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": lambda a, b: _truncated(a, b), "%": lambda a, b: a - b * _truncated(a, b)},
    {"**": lambda a, b: a**b if 0 <= b <= 256 else _refuse()},
)
# A larger number is no size of anything.
MOST = 1 << 200


def compute(text: str, get: Callable[[str], str], put: Callable[[str, str], None]) -> int | None:
    """Return the value of an expression, with its assignments done by `put`; None if it cannot be known."""
    try:
        reader = _Reader(_TOKEN.findall(text), get, put)
        value = reader.comma()
    except (ValueError, ZeroDivisionError, RecursionError):
        return None
    return None if reader.tokens or abs(value) > MOST else value


def _truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _refuse() -> int:
    raise ValueError("not a number of this size")


class _Reader:
    def __init__(self, tokens: list[str], get: Callable[[str], str], put: Callable[[str, str], None]) -> None:
        self.tokens, self.get, self.put = tokens, get, put

    def take(self, *wanted: str) -> str:
        """Take the next token if it is one of these; return it, or ""."""
        return self.tokens.pop(0) if self.tokens and self.tokens[0] in wanted else ""

    def comma(self) -> int:
        value = self.choice()
        while self.take(","):
            value = self.choice()
        return value

    def choice(self) -> int:
        value = self.binary(0)
        if self.take("?"):
            first = self.choice()
            if not self.take(":"):
                raise ValueError("a ? without :")
            second = self.choice()
            value = first if value else second
        return value

    def binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self.unary()
        value = self.binary(level + 1)
        while sign := self.take(*_LEVELS[level]):
            value = _LEVELS[level][sign](value, self.binary(level + 1))
            if abs(value) > MOST:
                raise ValueError("too large")
        return value

    def unary(self) -> int:
        if sign := self.take("-", "+", "!"):
            value = self.unary()
            return {"-": -value, "+": value, "!": int(not value)}[sign]
        if self.take("("):
            value = self.comma()
            if not self.take(")"):
                raise ValueError("an open bracket")
            return value
        if sign := self.take("++", "--"):
            return self.assign(self.tokens.pop(0) if self.tokens else "", 1 if sign == "++" else -1)
        token = self.tokens.pop(0) if self.tokens else ""
        if not re.match(r"[A-Za-z_]", token):
            return int(token, 0) if re.match(r"0[xX]", token) else int(token)
        if sign := self.take("++", "--"):
            return self.assign(token, 1 if sign == "++" else -1) - (1 if sign == "++" else -1)
        if sign := self.take("=", "+=", "-=", "*=", "/=", "%="):
            value = self.choice()
            if sign != "=":
                value = next(level[sign[0]] for level in _LEVELS if sign[0] in level)(
                    self.number(token), value
                )
            self.put(token, str(value))
            return value
        return self.number(token)

    def assign(self, name: str, change: int) -> int:
        value = self.number(name) + change
        self.put(name, str(value))
        return value

    def number(self, name: str) -> int:
        return int(self.get(name).strip() or "0")
