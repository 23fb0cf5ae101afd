"""What was found in a command, a script or a file of another program: its options, with their places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterctl.migrate.option import Option


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
