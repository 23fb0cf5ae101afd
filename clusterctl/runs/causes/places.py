"""Name the place where a rank stands by its stack: the user's line, the call in it, and whether it waits for others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# Files of Python and of installed packages, as opposed to the user's and to this project's trainer.
LIBRARY = re.compile(
    r"/(?:site|dist)-packages/(?!(?:trainer|native)/)|/lib(?:64)?/python\d[^/]*/(?!(?:site|dist)-packages/)|^<frozen"
)
# Packages whose functions let ranks meet.
MEETING = re.compile(
    r"torch/(?:distributed|cuda)/|torch/autograd/graph\.py|torch_npu/|horovod/|deepspeed/comm/|mpi4py|mindspore/|jax/"
    r"|paddle/|oneflow/"
)
COLLECTIVES = (
    r"all_?reduce\w*|all_?gather\w*|reduce_?scatter\w*|all_?to_?all\w*|broadcast\w*|bcast|(?:monitored_)?barrier"
    r"|gather\w*|scatter\w*|reduce|isend|irecv|wait_tensor|synchronize|_engine_run_backward|init_process_group"
    r"|rendezvous|new_group|destroy_process_group|sync_global_devices"
)
MEETS = re.compile(rf"(?:{COLLECTIVES}|send|recv|wait)$", re.IGNORECASE)
# In a line of source that calls compiled code. `send` and `recv` of a socket are no collectives.
CALLED = re.compile(
    rf"\b(?P<name>{COLLECTIVES})\(|\.(?P<wait>wait|item|backward)\(\)"
    r"|\b(?:dist|distributed|comm|hvd|world)\w*\.(?P<peer>sendrecv|send|recv)\(",
    re.IGNORECASE,
)
# Functions that only pass a call on.
PASSES_ON = re.compile(
    r"_?_?(?:wrapper|wrapped|inner|decorate_context|_fn|call|_call_impl|_wrapped_call_impl|func|__call__)\w*$"
)
# Functions without a name stand within one.
INNER = re.compile(r"<(?:genexpr|listcomp|dictcomp|setcomp|lambda)>$")
# Names of functions that their users know by another one.
NAMES = {"_engine_run_backward": "backward"}
# The first line of a traceback, and the prefix that torch and torchrun add to each line.
TRACEBACK = "Traceback (most recent call last):"
PREFIX = re.compile(r"^\[(?:rank|default)\d+\]:? ?")
# Folders named after a hash, or after a run.
HASH = re.compile(r"(?:[0-9a-f]{16,}|.+-\d{4}-\d{6}-[0-9a-f]{4})$")


@dataclass(frozen=True)
class Frame:
    """One function on a stack."""

    function: str
    file: str
    line: int = 0
    text: str = ""
    """The line of source."""

    @property
    def is_library(self) -> bool:
        return LIBRARY.search(self.file) is not None


@dataclass(frozen=True)
class Place:
    """Where a rank stands: a function of the user's or a call in it, and the line."""

    what: str
    where: str
    waits: bool

    def describe(self) -> str:
        return f"{self.what} at {self.where}"


def place_of(frames: Sequence[Frame]) -> Place | None:
    """Return the place of a stack, whose innermost frame is the first; None without frames."""
    if not frames:
        return None
    at = next((index for index, frame in enumerate(frames) if not frame.is_library), len(frames) - 1)
    own, inside = frames[at], frames[:at]
    where = f"{short(own.file)}:{own.line}"
    meeting = next((frame for frame in reversed(inside) if _meets(frame)), None)
    if meeting is not None:
        return Place(NAMES.get(meeting.function, meeting.function), where, True)
    called = CALLED.search(own.text) if not inside else None
    if called is not None:
        return Place(called["name"] or called["wait"] or called["peer"], where, True)
    name = next((frame.function for frame in frames[at:] if not INNER.match(frame.function)), own.function)
    call = next((frame for frame in reversed(inside) if not PASSES_ON.match(frame.function)), None)
    return Place(
        f"`{name}`" if call is None else f"`{call.function}`, called by `{name}`",
        where,
        False,
    )


def path_of(frames: Sequence[Frame]) -> tuple[Place, ...]:
    """Return the user's functions on a stack, the outermost first."""
    own = [frame for frame in reversed(frames) if not frame.is_library]
    return tuple(Place(f"`{frame.function}`", f"{short(frame.file)}:{frame.line}", False) for frame in own)


def _meets(frame: Frame) -> bool:
    return MEETING.search(frame.file) is not None and MEETS.match(frame.function) is not None


def short(file: str) -> str:
    """Return a file's path without the folders that differ between nodes."""
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in file:
            return file.rpartition(mark)[2]
    parts = [part for part in file.split("/") if part][-3:]
    while len(parts) > 2 or (len(parts) > 1 and HASH.match(parts[0])):
        parts = parts[1:]
    return "/".join(parts)
