"""The process's environment: the launcher's only reader and writer of it, light enough for the fast door."""

from __future__ import annotations

import os


def inherited(names: tuple[str, ...]) -> dict[str, str]:
    """The named variables of the launcher's own environment, those that are set; nothing else of it travels."""
    return {name: os.environ[name] for name in names if name in os.environ}


def environment() -> dict[str, str]:
    """A copy of the whole environment, for programs that the launcher starts on this machine."""
    return dict(os.environ)


def raw_environment() -> dict[bytes, bytes]:
    """The same in bytes, for those that hand it on unread."""
    return dict(os.environb)


def replace_environment(variables: dict[bytes, bytes]) -> None:
    """Take another process's environment in place of this one's own."""
    os.environb.clear()
    os.environb.update(variables)
