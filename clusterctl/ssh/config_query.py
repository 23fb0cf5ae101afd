"""Query OpenSSH's configuration with `ssh -G`, once for all hosts to which the same settings apply."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterctl.errors import UsageError

Answers = Mapping[str, tuple[str, ...]]
"""The values of each option in order; option names are in lower case."""

# Seconds: a command of `Match exec` may query a slow service.
ASK_LIMIT = 60.0
EXPANDED = "userknownhostsfile|globalknownhostsfile|identityagent|hostkeyalias|knownhostscommand|bindaddress"
_LINE = re.compile(
    rf'\s*(host|match|canonicalizehostname|{EXPANDED})(?:\s*=\s*|\s+)"?(.*?)\s*$', re.IGNORECASE
)
_READ = re.compile(r"^debug1: Reading configuration data (.+?)\r?$", re.MULTILINE)
_VERSION = re.compile(r"^OpenSSH(?:_for_Windows)?_(\d+)\.(\d+)", re.MULTILINE)


@dataclass
class _Slot:
    """The options of one group of hosts, and the lock of the thread that queries them."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: Answers | None = None
    asked_for: str = ""


class Configuration:
    """The user's SSH configuration; `file` replaces it, "none" means an empty one.

    Each query starts a process, which takes 4 ms: a second for 256 nodes. Hosts that match the same `Host`
    lines share one query. Only a `Match` other than `all`, or canonical host names, need a query for each
    host.
    """

    def __init__(self, file: str | None = None) -> None:
        self.file = file
        self.program = shutil.which("ssh")
        self._slots: dict[object, _Slot] = {}
        self._change = threading.Lock()
        self._reading = threading.Lock()
        self._patterns: list[list[str]] | None = None
        self._each_alone = False
        self._version = (0, 0)
        self._marked: dict[str, bool] = {}
        self.routes: dict[object, Any] = {}
        """The results of config.route_to, cached by node (0.2 ms each); the backend choice and the connection
        use them."""

    def of(self, host: str, user: str | None, port: int | None) -> Answers:
        """Return the options that apply to a host; {} if there is no `ssh` program."""
        if self.program is None:
            return {}
        self._read_patterns(host)
        if not self._each_alone:
            slot = self._answered(self._class_of(host), host, None, None)
            found = _for_host(slot, host)
            if found is not None:
                own = {"user": user, "port": port and str(port)}
                return {**found, **{key: (value,) for key, value in own.items() if value}}
        return self._answered((host, user, port), host, user, port).answers or {}

    def built_in(self) -> Answers:
        """Return OpenSSH's built-in defaults."""
        return self._answered("built in", "localhost", None, None, "none").answers or {}

    @property
    def version(self) -> tuple[int, int]:
        """Return the version of OpenSSH, such as (9, 2)."""
        if self.program is not None:
            self._read_patterns("localhost")
        return self._version

    def has_marks(self, path: str) -> bool:
        """Return whether a known_hosts file lists certificate authorities or revoked keys."""
        if path not in self._marked:
            try:
                lines = Path(path).read_bytes().splitlines()
            except OSError:
                lines = []
            self._marked[path] = any(line.lstrip().startswith(b"@") for line in lines)
        return self._marked[path]

    def _read_patterns(self, host: str) -> None:
        """Find the configuration files that OpenSSH reads, and collect their `Host` patterns."""
        with self._reading:
            if self._patterns is not None:
                return
            done = self._ask(host, None, None, self.file, verbose=True)
            log = done.stderr.decode(errors="replace")
            version = _VERSION.search(log)
            self._version = (int(version[1]), int(version[2])) if version else (0, 0)
            patterns: list[list[str]] = []
            for name in _READ.findall(log):
                self._each_alone |= _read_patterns(Path(name), patterns)
            self._patterns = patterns
            key: object = (host, None, None) if self._each_alone else self._class_of(host)
            self._slots[key] = _Slot(answers=_parsed(done.stdout.decode(errors="replace")), asked_for=host)

    def _class_of(self, host: str) -> tuple[bool, ...]:
        return tuple(_applies(patterns, host) for patterns in self._patterns or ())

    def _answered(
        self, key: object, host: str, user: str | None, port: int | None, file: str | None = None
    ) -> _Slot:
        with self._change:
            slot = self._slots.setdefault(key, _Slot())
        with slot.lock:
            if slot.answers is None:
                done = self._ask(host, user, port, file or self.file)
                slot.answers, slot.asked_for = _parsed(done.stdout.decode(errors="replace")), host
        return slot

    def _ask(
        self, host: str, user: str | None, port: int | None, file: str | None, verbose: bool = False
    ) -> subprocess.CompletedProcess[bytes]:
        argv = [str(self.program), "-G", *(["-v"] if verbose else []), *(["-F", file] if file else [])]
        argv += ["-l", user] if user else []
        argv += ["-p", str(port)] if port else []
        try:
            done = subprocess.run(
                [*argv, "--", host],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=ASK_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            message = f"ssh did not read its configuration for {host} within {ASK_LIMIT:g} s"
            raise UsageError(message, "see the commands of `Match exec` in ~/.ssh/config") from None
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").splitlines()
            problems = "; ".join(
                line for line in lines if not line.startswith(("debug", "OpenSSH_", "Pseudo-"))
            ).strip()
            raise UsageError(
                f"ssh can't read its configuration for {host}: {problems}",
                f"try `ssh -G {shlex.quote(host)}`",
            )
        return done


def _parsed(text: str) -> Answers:
    found: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        found[key.lower()] = (*found.get(key.lower(), ()), value)
    return found


def _for_host(slot: _Slot, host: str) -> Answers | None:
    """Return the options of one host adapted to another; None if they cannot be known without a query."""
    answers = slot.answers or {}
    shown = answers.get("hostname", (slot.asked_for,))[0]
    if host == slot.asked_for:
        return answers
    if shown.lower() != slot.asked_for.lower():
        # HostName is set and may contain %h.
        return None
    # `ssh -G` writes it in lower case too.
    return {**answers, "hostname": (host.lower(),)}


def _read_patterns(path: Path, patterns: list[list[str]]) -> bool:
    """Add the patterns of a file's `Host` lines; return whether each host needs its own query."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return True
    alone = False
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        key, hosts = found[1].lower(), found[2].replace('"', " ").split()
        if key == "host" and hosts != ["*"]:
            patterns.append(hosts)
        elif key == "match":
            alone |= [word.lower() for word in hosts] != ["all"]
        elif key == "canonicalizehostname":
            alone |= [word.lower() for word in hosts] not in (["no"], ["none"], ["false"])
        else:
            # `ssh -G` has replaced the tokens by the queried host's name.
            alone |= "%" in found[2]
    return alone


def _applies(hosts: list[str], host: str) -> bool:
    """Return whether a `Host` line applies: a pattern matches, and no negated pattern does."""
    if any(word.startswith("!") and _matches(word[1:], host) for word in hosts):
        return False
    return any(_matches(word, host) for word in hosts if not word.startswith("!"))


def _matches(pattern: str, host: str) -> bool:
    parts = (
        ".*" if character == "*" else "." if character == "?" else re.escape(character)
        for character in pattern
    )
    return re.fullmatch("".join(parts), host, re.DOTALL) is not None
