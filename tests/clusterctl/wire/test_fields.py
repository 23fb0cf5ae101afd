"""One declaration of a key: its reader, errors, schema, and page agree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from clusterctl.document import parse_document, reader
from clusterctl.errors import Fault
from clusterctl.inventory.cluster import Node
from clusterctl.jobs import job_check as job_schemas
from clusterctl.jobs.job import Job
from clusterctl.settings import Settings
from clusterctl.wire.fields import Checked, Problem, Reader, own, setting
from clusterctl.wire.schema import schema_of


@dataclass(frozen=True)
class Inner(Checked):
    """A part of the settings."""

    least: int = setting(1, least=1, most=9)
    """Lowest number."""
    most: int = setting(9, least=1, most=9)
    """Highest number."""

    def problems(self) -> Iterator[Problem]:
        if self.least > self.most:
            yield "least", f"{self.least} is more than most", "exchange them"


@dataclass(frozen=True)
class Outer:
    """All settings."""

    word: str = setting("", pattern=re.compile("[a-z]+"), noun="a word", example="as in word")
    """A word."""
    kinds: tuple[str, ...] = setting((), choices=("red", "green"))
    """Colours."""
    share: float | None = setting(None, above=0.0, below=1.0)
    """A share."""
    inner: Inner | None = setting(None)
    """A part."""
    names: dict[str, str] = setting(factory=dict)
    """Texts by name."""
    needed: str = setting("", required=True)
    """A text that must be there."""
    filled: int = own(7)
    parts: tuple[Inner, ...] = field(default=())
    """A list of parts."""


def read(text: str) -> tuple[Outer, list[str]]:
    document = parse_document(text, "file.yaml")
    faults = list[Fault]()
    return reader(document, faults).read(Outer, document.value), [str(fault) for fault in faults]


def test_a_mapping_becomes_an_object_with_its_defaults() -> None:
    text = "word: abc\nkinds: [red]\nshare: 0.5\ninner: {least: 2}\nnames: {a: 1, b: c}\nneeded: yes\n"
    found, faults = read(text)
    assert not faults
    names = {"a": "1", "b": "c"}
    assert found == Outer("abc", ("red",), 0.5, Inner(2, 9), names, "yes")
    parts = read("needed: x\nparts: [{most: 3}, {}]\n")[0].parts
    assert parts == (Inner(1, 3), Inner())
    # A key without a value counts as missing.
    assert read("needed: x\nshare:\ninner:\n") == (Outer(needed="x"), [])


def test_every_error_comes_with_its_line_and_a_remedy() -> None:
    text = (
        "word: A1\nkinds: [red, gren]\nshare: 1\ninner:\n  least: 5\n  most: 0\n  lest: 1\nnames: [a]\nfilled: 8\n"
        "parts: [{least: 8, most: 2}, 3]\n"
    )
    assert read(text)[1] == [
        "file.yaml:1 word: 'A1' is not a word (as in word)",
        "file.yaml:2 kinds: unknown 'gren' (did you mean 'green'?)",
        "file.yaml:3 share: 1.0 is too large (more than 0.0 and less than 1.0)",
        "file.yaml:6 inner.most: 0 is too small (1 to 9)",
        "file.yaml:7 inner.lest: unknown key 'lest' (did you mean 'least'?)",
        "file.yaml:8 names: must be a mapping, not ['a'] (as in {key: value})",
        "file.yaml:9 filled: unknown key 'filled' (known: word, kinds, share, inner, names, needed, parts)",
        "file.yaml:10 parts.0.least: 8 is more than most (exchange them)",
        "file.yaml:10 parts.1: must be a mapping, not 3 (as in {key: value})",
        "file.yaml:1 needed: 'needed' is missing (add `needed:`)",
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("8.5", "must be a whole number, not 8.5 (write 8)"),
        ("'8'", "must be a whole number, not '8' (write it as a number, without quotes)"),
        ("true", "must be a whole number, not True (as in 8)"),
        ("{}", "must be a whole number, not a mapping (as in 8)"),
        ("99999999999999999999", "(write a number of at most 18 digits)"),
    ],
)
def test_a_wrong_number_is_answered_with_the_right_form(given: str, told: str) -> None:
    assert told in read(f"needed: x\ninner: {{least: {given}}}\n")[1][0]


def test_the_schema_has_types_limits_defaults_and_explanations() -> None:
    schema = schema_of(Outer)
    assert schema["required"] == ["needed"] and not schema["additionalProperties"]
    keys = schema["properties"]
    assert list(keys) == ["word", "kinds", "share", "inner", "names", "needed", "parts"]
    assert keys["word"] == {"type": "string", "pattern": "^([a-z]+)$", "description": "A word."}
    assert keys["kinds"]["items"] == {"enum": ["red", "green"]}
    assert keys["share"] == {
        "type": "number",
        "exclusiveMinimum": 0.0,
        "exclusiveMaximum": 1.0,
        "description": "A share.",
    }
    assert keys["inner"]["properties"]["most"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "description": "Highest number.",
        "default": 9,
    }


def leaves(
    schema: dict[str, Any], place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the place and the schema of each key that has one plain form."""
    for key, inner in schema.get("properties", {}).items():
        if "properties" in inner:
            yield from leaves(inner, (*place, key))
        elif "enum" in inner or "type" in inner:
            yield (*place, key), inner


def refused(kind: type, place: tuple[str, ...], value: object) -> bool:
    """Return whether the reader of `kind` refuses a value at a place."""
    raw: Any = value
    for key in reversed(place):
        raw = {key: raw}
    problems = []
    Reader(lambda key, *_: problems.append(key), blank=True).given(kind, raw)
    return any(key[: len(place)] == place for key in problems)


@pytest.mark.parametrize("kind", [Job, Node, Settings], ids=lambda kind: kind.__name__)
def test_the_reader_has_the_limits_of_the_schema(kind: type) -> None:
    seen = 0
    for place, schema in leaves(schema_of(kind)):
        if place == ("train",):
            continue
        for limit, way in (("minimum", -1), ("maximum", 1)):
            if limit in schema:
                assert refused(kind, place, schema[limit] + way), place
                assert not refused(kind, place, schema[limit]), place
                seen += 1
        for choice in schema.get("enum", ()):
            assert not refused(kind, place, choice), place
            seen += 1
        if "enum" in schema or schema["type"] in ("integer", "number", "boolean"):
            assert refused(kind, place, "no such value"), place
            seen += 1
        assert refused(kind, place, {"a": {}}), place
    assert seen > 3


def test_a_key_that_is_declared_is_read_described_and_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Longer(Job):
        """A job with one more key."""

        patience: int = setting(3, least=0)
        """How long it waits."""

    from docs import generate

    assert refused(Job, ("patience",), 1) and not refused(Longer, ("patience",), 1)
    assert refused(Longer, ("patience",), -1)
    monkeypatch.setattr(job_schemas, "Job", Longer)
    assert "patience" in job_schemas.job_schema()["properties"]  # type: ignore[operator]
    assert "| `patience` | whole number, >= 0, default 3 | How long it waits. |" in generate.job_page()
