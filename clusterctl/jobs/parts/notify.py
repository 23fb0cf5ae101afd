"""The `notify` key of a job: a command, a webhook, or a variable that holds either.

The address of a webhook is often a password. It is never written to a record of a run: the process that starts the
run remembers it, and others read it from the variable.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from clusterctl.environment import environment

VARIABLE = re.compile(r"\$\{?(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}?")
HIDDEN = "***"
REMEDY = "notify: $NAME reads the address from the variable NAME, which is never recorded"
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
