"""What was found in a command, a script or a file of another program: its options, with their places."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

# The text of a number that is 0.
ZERO = re.compile(r"0+(\.0*)?")
KINDS = ("flag", "int", "float", "text", "words", "bool", "any")


@dataclass(frozen=True)
class Option:
    """How an option of another trainer is translated into a job."""

    names: tuple[str, ...]
    kind: str
    """flag: it takes no value; words: all words up to the next option; bool: true or false; any: not read."""
    target: str
    """A key of the job; `key=value` for a flag; `@name` for a value that is combined with others; `!` if no model
    here has what it asks for; "" if not mapped."""
    note: str = ""
    """A remark about a mapped option; the reason if the option is not mapped."""


def read_table(text: str) -> Iterator[Option]:
    """Yield the rows of a table: `names | kind | target | note`, `-` for no target."""
    for line in text.strip().splitlines():
        names, kind, target, *note = (part.strip() for part in line.split("|"))
        if kind not in KINDS or not names or (target == "-" and not any(note)):
            raise ValueError(f"a row in the table of options is wrong: {line!r}")
        yield Option(tuple(names.split()), kind, "" if target == "-" else target, note[0] if note else "")


@cache
def options_by_name(text: str) -> dict[str, Option]:
    """Return the options of a table by each of their names, with `_` in place of `-`."""
    return {plain(name): option for option in read_table(text) for name in option.names}


def plain(name: str) -> str:
    """Return an option's name without leading dashes and with `_` for `-`: programs accept both spellings."""
    return name.lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Given:
    """An option as it was given: `name` as written, its values, and the place for messages."""

    name: str
    values: tuple[object, ...]
    where: str
    option: Option | None = None
    """None for an option that no table has."""


@dataclass
class Found:
    """A training of another program."""

    family: str
    title: str
    source: str
    """What was read, for the head of the job: a file's name or "a command"."""
    given: list[Given] = field(default_factory=list)
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Keys of the job that the program sets if an option is left out."""
    name: str = ""
    notes: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    """What a script decides only when it runs, by place."""
    verb: str = "job"
    """What it becomes: a job, or a command that serves, generates, evaluates, imports or builds data."""
    summary: str = ""
    """The first line of the job, if it does not count options."""
    choice: str = ""
    """If a script has several trainings: which one was taken, and which ones were skipped."""
