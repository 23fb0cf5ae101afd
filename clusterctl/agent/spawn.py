"""Start programs in sessions of their own, with the login's environment.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any, Dict, Iterator, List, Mapping, Optional

# The exit codes that shells use for a program that does not exist or cannot be started.
NOT_FOUND, NOT_RUNNABLE = 127, 126


def raw(text: str) -> bytes:
    """Return the bytes of a text from the launcher, independent of the node's locale."""
    return text.encode("utf-8", "surrogateescape")


def environment(extra: Dict[str, Any], change: Optional[Dict[str, Any]] = None) -> Dict[bytes, bytes]:
    """Return the login's environment without the variables of SSH, changed by a setup, with `extra` added."""
    inherited = {name: value for name, value in os.environb.items() if not name.startswith(b"SSH_")}
    if change:
        inherited.update({raw(name): raw(value) for name, value in change["set"].items()})
        for name in change["unset"]:
            inherited.pop(raw(name), None)
    inherited.update({raw(str(name)): raw(str(value)) for name, value in extra.items()})
    return inherited


def command(argv: List[str]) -> List[bytes]:
    """Return argv as the kernel takes it.

    `~/` at the start of the program's name (not of arguments) is the login's home.
    """
    program = os.path.expanduser(argv[0]) if argv[0].startswith("~/") else argv[0]
    return [raw(entry) for entry in [program, *argv[1:]]]


def start(
    argv: List[bytes], env: Mapping[bytes, bytes], out: int, err: int, stdin: int = subprocess.DEVNULL
) -> "subprocess.Popen[bytes]":
    """Start a program in a session of its own and in the present folder; raise OSError if that fails.

    `out`, `err` and `stdin` are open files, or PIPE. Without `stdin`, the program reads an empty file.
    """
    return subprocess.Popen(
        argv, stdin=stdin, stdout=out, stderr=err, env=env, start_new_session=True, bufsize=0
    )


def candidates(program: bytes, env: Mapping[bytes, bytes]) -> Iterator[bytes]:
    """Yield where a program may be: a name without a slash is looked up in the PATH that it will have."""
    if b"/" in program:
        yield program
        return
    for folder in env.get(b"PATH", os.fsencode(os.defpath)).split(b":"):
        path = os.path.join(folder or b".", program)
        if os.path.exists(path):
            yield path
