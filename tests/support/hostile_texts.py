"""Hostile texts for encoders, each generated from its number alone."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

WHITE = " \t\n\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u200a\u2028\u2029\u202f\u205f\u3000"
NEARLY_WHITE = "\x00\x08\x0e\x7f\u180e\u200b\u200c\u200d\u2060\ufeff\u2423"
CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'RE", "'l", "'v", "'r", "’s", "''s", "'ſ"]
# For endings of every kind: letters of many scripts, marks, numbers that are not digits, joined emoji.
SCRIPTS = (
    (0x41, 0x5B), (0x61, 0x7B), (0xC0, 0x250), (0x300, 0x370), (0x370, 0x400), (0x400, 0x530), (0x590, 0x700),
    (0x900, 0x980), (0xE00, 0xE80), (0x1100, 0x1200), (0x2070, 0x20A0), (0x2150, 0x2190), (0x2460, 0x2500),
    (0x3040, 0x3100), (0x4E00, 0xA000), (0xAC00, 0xD7B0), (0xE000, 0xE100), (0xFE00, 0xFE10), (0x10000, 0x10400),
    (0x1D400, 0x1D800), (0x1F300, 0x1F700), (0x20000, 0x2A6E0), (0x30000, 0x31350), (0xE0100, 0xE01F0),
)  # fmt: skip


def hostile(number: int, added: tuple[str, ...] = ("<|endoftext|>",)) -> str:
    """Return text `number`: up to a dozen pieces of kinds that are difficult to split or to merge."""
    random = Random(number)
    pieces: list[str] = []
    for _ in range(random.choice((1, 2, 3, 5, 8, 12))):
        kind = random.choice(KINDS)
        pieces.append(kind(random, added))
        if random.random() < 0.1:
            pieces.append(random.choice(pieces))
    return "".join(pieces)


def _word(random: Random, added: tuple[str, ...]) -> str:
    word = "".join(random.choices("etaoinshrdlu", k=random.randint(1, 12)))
    return random.choice(("", " ", "  ", "\n")) + random.choice((word, word.capitalize(), word.upper()))


def _contraction(random: Random, added: tuple[str, ...]) -> str:
    return (
        random.choice(("", " ", "x", "1", "!", "\n")) + random.choice(CONTRACTIONS) + random.choice("  se1'")
    )


def _white(random: Random, added: tuple[str, ...]) -> str:
    return "".join(random.choices(WHITE + NEARLY_WHITE, k=random.randint(1, 6)))


def _spaces(random: Random, added: tuple[str, ...]) -> str:
    return random.choice((" ", " ", "\n", "\t", "\u3000")) * random.randint(1, 40)


def _numbers(random: Random, added: tuple[str, ...]) -> str:
    return "".join(random.choices("0123456789.,²½Ⅷ٣९", k=random.randint(1, 10)))


def _script(random: Random, added: tuple[str, ...]) -> str:
    first, end = random.choice(SCRIPTS)
    return "".join(chr(random.randrange(first, end)) for _ in range(random.randint(1, 30)))


def _anything(random: Random, added: tuple[str, ...]) -> str:
    codes = (
        random.choice((random.randrange(0x110000), random.randrange(0x3000)))
        for _ in range(random.randint(1, 8))
    )
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


def _marks(random: Random, added: tuple[str, ...]) -> str:
    return "".join(random.choices("!?.,;:-_()[]{}<>|'\"/\\@#$%^&*+=~`", k=random.randint(1, 8)))


def _run(random: Random, added: tuple[str, ...]) -> str:
    size = random.choice((7, 8, 9, 15, 16, 17, 59, 60, 61, 127, 255, 256, 257, 600))
    return random.choice(("a", "ab", "the", "-", "=", "0", "é", "中", "哈哈", "\U0001f600")) * size


def _added(random: Random, added: tuple[str, ...]) -> str:
    token = random.choice(added)
    cut = random.randrange(len(token) + 1)
    return random.choice((token, token * 2, token[:cut], token[cut:], token[:cut] + token, f" {token} "))


KINDS: tuple[Callable[[Random, tuple[str, ...]], str], ...] = (
    _word, _word, _word, _contraction, _white, _spaces, _numbers, _script, _script, _anything, _marks, _run, _added,
)  # fmt: skip
