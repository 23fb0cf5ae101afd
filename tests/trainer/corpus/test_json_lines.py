"""A text that the compiled reader gives is the one that Python's gives, and what that one refuses is left to it."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native.text import json_lines as compiled_lines
from tests.support.hostile_texts import hostile
from trainer.files import texts

pytestmark = pytest.mark.usefixtures("compiled")


def python(line: bytes, key: str = "text") -> str | None:
    """The text, or None where there is none that UTF-8 can say."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    found = record.get(key) if isinstance(record, dict) else None
    try:
        return found if isinstance(found, str) and found.encode() is not None else None
    except UnicodeEncodeError:
        return None


def one(line: bytes, key: str = "text") -> str | bytes:
    ((number, found),) = texts(line, key)
    assert number == 0
    return found


PLAIN = [
    b'{"text": "a"}',
    b' \t{ "text" :\t"a" , "n" : [ 1 , -2.5e-3 , 0, -0, 1E+9, true, false, null, {}, [], "" ] } \r',
    b'{"text":""}',
    b'{"a": {"text": "inner"}, "text": "outer", "b": [{"text": "other"}]}',
    b'{"text": 1, "text": "the last counts"}',
    b'{"text": "one", "text": "two"}',
    rb'{"text": "\"\\\/\b\f\n\r\t\u0041\u00e9\u4e2d\ud83d\ude00\u0000\uFFFF"}',
    '{"text": "é中\U0001f600\x7f\u2028", "ключ": "значение"}'.encode(),
    b'{"other\\n": "no", "text": "t"}'.replace(b"\\n", b" "),
    b'{"text": "12345678901234567890 and no escape"}',
    b'{"text": "1234567\\n12345678\\n"}',
    b'{"deep": ' + b"[" * 50 + b"]" * 50 + b', "text": "t"}',
]


@pytest.mark.parametrize("line", PLAIN)
def test_texts_are_found(line: bytes) -> None:
    assert one(line) == python(line) and isinstance(one(line), str)


LEFT = [
    b"", b"{", b"}", b"{}", b"[]", b'"text"', b"1", b"null",
    b"{]", b'{"text"', b'{"text":', b'{"text": "a', b'{"text": "a"',
    b'{"text": "a"} x', b'{"text": "a"}{}', b'{"text": "a",}', b'{,"text": "a"}', b'{"text" "a"}', b'{text: "a"}',
    b"{'text': 'a'}", b'{"text": 1}', b'{"text": null}',
    b'{"text": ["a"]}', b'{"text": {"text": "a"}}', b'{"other": "a"}',
    b'{"text": "a", "text": 1}', b'{"text": "a\tb"}', b'{"text": "\x00"}', rb'{"text": "\x"}', rb'{"text": "\u12"}',
    rb'{"text": "\u12g4"}', rb'{"text": "\ud83d"}', rb'{"text": "\ude00"}', rb'{"text": "\ud83d\u0041"}',
    rb'{"text": "\ud83dx"}', rb'{"text": "\ud83d\ud83d\ude00"}', b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}',
    b'{"text": "a", "n": 01}', b'{"text": "a", "n": 1.}', b'{"text": "a", "n": .5}', b'{"text": "a", "n": -}',
    b'{"text": "a", "n": +1}', b'{"text": "a", "n": 1e}', b'{"text": "a", "n": 0x1}', b'{"text": "a", "n": tru}',
    b'{"text": "a", "n": truer}', b'{"text": "a", "n": [1 2]}',
    b'{"text": "a", "n": [1,]}', b'{"text": "a", "n": [,1]}',
    b'{"text": "a", "n": {"x"}}', b'{"text": "a", "n": {"x": 1,}}',
    b'{"text": "a", "n": {1: 2}}', b'{"text": "a" "n": 1}',
    b'\xef\xbb\xbf{"text": "a"}', b'{"text": "a"}\x00', b'\x0b{"text": "a"}', b'{"text": "a", "n": nan}',
    b'{"text": "a", "n": ' + b"1" * 5000 + b"}", b'{"text": "a", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"text": "a", "n": "\x1f"}', b'{"text": "a", "\n": 1}'.replace(b"\n", b"\x01"), rb'{"text": "a", "n": "\q"}',
]  # fmt: skip


@pytest.mark.parametrize("line", LEFT)
def test_what_is_faulty_is_left_to_python(line: bytes) -> None:
    assert python(line) is None
    assert [found for _, found in texts(line, "text")] == ([line] if line else [])


# What Python reads, but this reader is not certain of.
@pytest.mark.parametrize(
    "line",
    [
        rb'{"t\u0065xt": "a"}', rb'{"text": "a", "\n": 1}',
        b'{"text": "a", "n": NaN}', b'{"text": "a", "n": -Infinity}',
        b'{"text": "a", "n": ' + b"1" * 100 + b"}", b'{"text": "a", "n": ' + b"[" * 70 + b"]" * 70 + b"}",
        rb'{"text": "a", "n": "\ud800"}',
    ],
)  # fmt: skip
def test_what_is_unusual_is_left_to_python(line: bytes) -> None:
    assert python(line) == "a"
    assert one(line) == line


@pytest.mark.parametrize("key", ["", "ключ", "a b", 'quo"te', "back\\slash", "new\nline", "\ud800"])
def test_any_key(key: str) -> None:
    for ascii_only in (True, False):
        line = json.dumps({"text": "no", key: "yes", f"{key}x": "no"}, ensure_ascii=ascii_only)
        data = line.encode("utf-8", "surrogatepass")
        assert one(data, key) == (
            "yes" if not set(key) & set('"\\\n\ud800') and (key.isascii() or not ascii_only) else data
        )


def test_lines_are_numbered_and_blank_ones_passed_over() -> None:
    data = b'\n{"text": "a"}\r\n \t\x0b\x0c\r\n\n{"text": 1}\nno\n{"text": "b"}'
    assert list(texts(data, "text")) == [(1, "a"), (4, b'{"text": 1}'), (5, b"no"), (6, "b")]
    assert list(texts(b"", "text")) == list(texts(b"\n\n", "text")) == []


def test_without_compiled_code_every_line_is_python_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_lines, "why_not", lambda: "it was not compiled here")
    data = b'\n{"text": "a"}\r\n \t\x0b\n5'
    assert list(texts(data, "text")) == [(1, b'{"text": "a"}\r'), (3, b"5")]


def test_characters_are_counted() -> None:
    found = compiled_lines.read('{"text": "é中\U0001f600a"}\n{"text": ""}\n5'.encode(), "text")
    assert found.characters.tolist() == [4, 0, 0] and found.plain.tolist() == [True, True, False]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("text"), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["text", "id", "é", "x\ny"]), values), max_size=4),
    plain=st.booleans(),
)
def test_any_objects_are_read_as_python_reads_them(rows: list[dict[str, Any]], plain: bool) -> None:
    lines = [json.dumps(row, ensure_ascii=plain).encode() for row in rows]
    got = list(texts(b"\n".join(lines), "text"))
    assert [number for number, _ in got] == list(range(len(lines)))
    for line, (_, found) in zip(lines, got, strict=True):
        assert found == line or found == python(line)


def test_broken_lines_are_never_taken_for_whole_ones() -> None:
    """Hostile lines with changed, missing and added bytes give the same result as Python's json."""
    found_some = left_some = 0
    for number in range(6000):
        random = Random(number)
        row = {"id": number, "text": hostile(number % 500), "meta": {"k": [1.5, None, "x"]}}
        line = bytearray(json.dumps(row, ensure_ascii=random.random() < 0.5).encode())
        for _ in range(random.randint(0, 2)):
            at = random.randrange(len(line))
            line[at : at + random.choice((0, 1, 1, 6))] = random.choice(
                (
                    b"",
                    b'"',
                    b"\\",
                    b"}",
                    b",",
                    b"\\u",
                    b"\\ud83d",
                    b"\xff",
                    b"\x01",
                    b"0",
                    b"e",
                    b" ",
                    b":",
                    b"[",
                    b"text",
                )
            )
        line = bytearray(line.replace(b"\n", b""))
        for _, found in texts(bytes(line), "text"):
            found_some += isinstance(found, str)
            left_some += isinstance(found, bytes)
            assert found == bytes(line) or found == python(bytes(line)), bytes(line)
            if not isinstance(found, str):
                # Left only where Python has no text, or for what the cases above name.
                assert python(bytes(line)) is None or b"\\" in line or b"00" in line, bytes(line)
    assert found_some > 2000 and left_some > 1000
