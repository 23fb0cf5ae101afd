"""Read a lock file: one exact version and its hashes per line, as `pip install --require-hashes` reads it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import Fault, InputFaults, UsageError

LINE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[A-Za-z0-9._, -]*\])?\s*==\s*(?P<version>[^\s;]+)"
)
HASH = re.compile(r"--hash[= ](?P<kind>[a-z0-9]+):(?P<digest>[0-9A-Fa-f]+)(?=\s|$)")
# Options of pip-compile's output that do not change what is installed from a wheelhouse.
HARMLESS = ("--index-url", "--extra-index-url", "-i ", "--find-links", "-f ", "--no-index", "--only-binary")
# The lock file in a folder of wheels.
LOCK = "requirements.lock"
MAKE = "clusterctl nodes wheelhouse REQUIREMENTS -o FOLDER fetches the wheels and writes their lock file"
# A larger file is not a lock file: one of 400 packages has 0.5 MB.
MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Pin:
    """One package of a lock file."""

    name: str
    """The name in its normal form: lower case, with `-`."""
    version: str
    hashes: frozenset[str]
    """The SHA-256 of every file that may be installed for it."""
    marker: str = ""
    """The environment marker that says which machines need it; "" for all machines."""
    line: int = 0

    @property
    def text(self) -> str:
        """Return the line that pip reads."""
        marker = f" ; {self.marker}" if self.marker else ""
        return f"{self.name}=={self.version}{marker}" + "".join(
            f" --hash=sha256:{h}" for h in sorted(self.hashes)
        )


@dataclass(frozen=True)
class Lock:
    """A lock file that was read without an error."""

    pins: tuple[Pin, ...]
    source: str

    @property
    def text(self) -> str:
        """Return the sorted lines of the lock, without anything that has no effect on the installation."""
        return "".join(f"{pin.text}\n" for pin in sorted(self.pins, key=lambda pin: (pin.name, pin.marker)))

    def fingerprint(self, python: str) -> str:
        """Return the fingerprint of an environment of this lock and a Python; its folder has this name."""
        return hashlib.sha256(json.dumps([1, python, self.text]).encode()).hexdigest()[:20]


def normal(name: str) -> str:
    """Return a package's name in its normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> Lock:
    """Read and check a lock file; raise InputFaults with all of its faults."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: more than {MOST_BYTES >> 20} MB: not a lock file", MAKE)
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"{path}: {problem.strerror}", MAKE) from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8 text", MAKE) from None
    return parse_lock(text, str(path))


def parse_lock(text: str, source: str) -> Lock:
    """Check the text of a lock file; raise InputFaults with all of its faults."""
    pins: list[Pin] = []
    faults: list[Fault] = []
    seen: dict[tuple[str, str], int] = {}
    for number, line in _logical_lines(text):
        if line.startswith(HARMLESS):
            continue
        found = _pin(number, line, f"{source}:{number}")
        if isinstance(found, Fault):
            faults.append(found)
            continue
        earlier = seen.setdefault((found.name, found.marker), number)
        if earlier != number:
            faults.append(
                Fault(f"{source}:{number}", f"{found.name} is also in line {earlier}", "keep one line")
            )
        pins.append(found)
    if not pins and not faults:
        faults.append(Fault(source, "contains no package", MAKE))
    if faults:
        raise InputFaults(faults)
    return Lock(tuple(pins), source)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each requirement with the number of its first line; `\\` continues a line, `#` begins a comment."""
    begun, parts = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        bare = re.sub(r"(^|\s)#.*", "", line).strip()
        begun = begun if parts else number
        parts.append(bare.removesuffix("\\").strip())
        if bare.endswith("\\"):
            continue
        joined = " ".join(part for part in parts if part)
        parts = []
        if joined:
            yield begun, joined


def _pin(number: int, line: str, where: str) -> Pin | Fault:
    shown = line[:60] + ("..." if len(line) > 60 else "")
    found = LINE.match(line)
    if found is None:
        remedy = (
            f"a lock file names one exact version of a package in each line: NAME==VERSION --hash=...; {MAKE}"
        )
        return Fault(where, f"{shown!r} pins no version", remedy)
    before, _, _ = line[found.end() :].partition("--hash")
    rest = before.strip()
    if rest and not rest.startswith(";"):
        return Fault(
            where, f"{rest[:40]!r} follows the version of {found['name']}", "remove it, or pin one version"
        )
    hashes = {match["digest"].lower() for match in HASH.finditer(line) if match["kind"] == "sha256"}
    if not hashes or any(len(digest) != 64 for digest in hashes):
        return Fault(where, f"{found['name']} has no SHA-256", f"add --hash=sha256:... of its wheel; {MAKE}")
    marker = " ".join(rest.removeprefix(";").split())
    return Pin(normal(found["name"]), found["version"], frozenset(hashes), marker, number)
