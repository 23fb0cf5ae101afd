"""NamedTuple as typing has it, without typing, which takes 10 ms of CPU where an agent first needs it.

Runs on nodes too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    from collections import namedtuple

    class _Made(type):
        """Makes of each class below NamedTuple a tuple with its fields' names, defaults and methods."""

        def __new__(cls, name, bases, space):
            if not bases:
                return super().__new__(cls, name, bases, space)
            fields = list(space.get("__annotations__", ()))
            defaults = [space.pop(field) for field in fields if field in space]
            plain = namedtuple(name, fields, defaults=defaults, module=space["__module__"])
            return type(name, (plain,), {"__slots__": (), **space})

    class NamedTuple(metaclass=_Made):
        """A tuple whose parts have names; defaults stand at the end."""
