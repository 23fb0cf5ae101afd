"""Declare options as fields of dataclasses, without the library that reads command lines."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return a field of a group of options, with its help; `names` where they do not follow from the field's name."""

    def made(name: str) -> Any:
        import typer

        return typer.Option(*names or [name], help=text, **more)

    return field(default=default, metadata={"option": made})


def argument(text: str, *, default: Any = None, **more: Any) -> Any:
    """Return a field for words without an option's name, which need not be given, with its help."""

    def made(name: str) -> Any:
        import typer

        return typer.Argument(help=text, **more)

    return field(default=default, metadata={"option": made})


def flag(text: str, *names: str, **more: Any) -> Any:
    """Return a field of a group of options that is True where the option is given."""
    return option(text, *names, default=False, **more)
