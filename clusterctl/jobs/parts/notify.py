"""The `notify` key of a job: a command, a webhook, or a variable that holds either.

The address of a webhook is often a password. It is never written to a record of a run: the process that starts the
run remembers it, and others read it from the variable.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from clusterctl.environment import environment

VARIABLE = re.compile(r"\$\{?(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}?")
HIDDEN = "***"
REMEDY = "notify: $NAME reads the address from the variable NAME, which is never recorded"
# Text of a shell that only the shell can replace.
UNKNOWN = re.compile(r"[$`*?\[\](){};&|<>!#]")
WEB = "https://HOST/PATH or the full path of a program"
FORMS = "a command, https://HOST/PATH, or $NAME for a variable that holds either"
# The targets of this process, by their masked text.
_given: dict[str, str] = {}


def is_web(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def problem_of(target: str) -> str:
    """Return why a target can be neither a webhook nor a command, "" if it can."""
    scheme, mark, _ = target.partition("://")
    if not mark or not scheme.isalpha():
        return ""
    try:
        host = urlsplit(target).hostname
    except ValueError:
        host = ""
    return "" if is_web(target) and host else f"{masked(target)!r} is not the address of a webhook"


def masked(target: str) -> str:
    """Return a target in the form for records: an address without its path, query and user."""
    if not is_web(target):
        return target
    try:
        parts = urlsplit(target)
        host = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    except ValueError:
        return f"https://{HIDDEN}"
    has_more = parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc
    return f"{parts.scheme}://{host}/{HIDDEN}" if has_more else target


def remember(target: str) -> str:
    """Keep a target in the memory of this process; return its masked form for records."""
    hidden = masked(target)
    if hidden != target and not target.endswith(f"/{HIDDEN}"):
        _given[hidden] = target
    return hidden


def resolved(target: str) -> tuple[str, str]:
    """Return the command or address that a recorded target stands for, or "" and why there is none."""
    if found := VARIABLE.fullmatch(target):
        value = environment().get(found["name"], "")
        return value, "" if value else f"${found['name']} is not set here"
    if is_web(target) and target.endswith(f"/{HIDDEN}"):
        value = _given.get(target, "")
        return value, "" if value else f"the address of {target} is not recorded: {REMEDY}"
    return target, ""


def program_problem(target: str) -> tuple[str, str] | None:
    """Return why the program of a command cannot start on this machine and a remedy; None if it can, or may.

    A controller calls the command with its own folder and PATH: call this on the controller's machine.
    """
    command = resolved(target)[0]
    program = "" if is_web(command) else _program_of(command)
    found = _file_problem(program) if program else None
    if found and VARIABLE.fullmatch(target):
        # Its value may be a secret, such as an address without https://.
        return f"{target} holds neither an address nor a command that can start here", f"set it to {WEB}"
    return found


def _file_problem(program: str) -> tuple[str, str] | None:
    path = Path(program)
    if "/" not in program:
        known = shutil.which(program, path=environment().get("PATH")) or _is_of_shell(program)
        return (
            None
            if known
            else (f"no program {program!r} is on PATH", "check the name, or write its full path")
        )
    if path.is_dir():
        return f"{program} is a folder, not a program", "name a program"
    if not path.exists():
        here = "" if path.is_absolute() else f" in {Path.cwd()}"
        return f"{program}: no such file{here}", "write the full path of a program on this machine"
    if not os.access(path, os.X_OK):
        return f"{program} is not executable", f"chmod +x {program}, or name the program that reads it"
    return None


def _program_of(command: str) -> str:
    """Return the program that a line of the shell starts; "" if only the shell can know."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "", True
    try:
        words = [word for word in lexer if not re.match(r"[A-Za-z_]\w*=", word)]
    except ValueError:
        # A quotation that does not end.
        return ""
    # `name()` defines a function.
    if not words or words[1:2] == ["()"] or "\n" in command:
        return ""
    variables = environment()
    word = VARIABLE.sub(lambda found: variables.get(found["name"], found[0]), os.path.expanduser(words[0]))
    return "" if UNKNOWN.search(word) else word


def _is_of_shell(word: str) -> bool:
    """Return whether a word is a builtin or a keyword of the shell that runs the command."""
    argv = ["sh", "-c", 'command -v "$1"', "sh", word]
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        # The search path contains a dead network disk, perhaps. The call itself will show it.
        return True
