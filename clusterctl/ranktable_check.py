"""Whether HCCL takes a rank table: its file, its JSON, and every rule of `ranktable_rules`."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterctl.errors import Fault, InputFaults
from clusterctl.ranktable_dialects import recognized
from clusterctl.ranktable_findings import Finding, hardware_named, kind, missing
from clusterctl.ranktable_model import many_objects
from clusterctl.ranktable_rules import Rules
from clusterctl.sanitize import escape_controls
from clusterctl.strict_json import MAX_BYTES, pointer, read_json

_READABLE = "make it readable for the owner: chmod u+r"
_PARSE_FAILURE = "EI0004: Failed to parse the ranktable file."
_UNPARSED = ("syntax", "encoding", "number")
"""What no JSON reader takes; what HCCL says of the rest (a byte order mark, a key given twice) is not known."""
_SILENT = "nothing: torch_npu falls back to negotiation in silence"


@dataclass(frozen=True)
class Report:
    """What a check saw; `guessed` when the hardware was told from the version."""

    findings: tuple[Finding, ...]
    value: Any = None
    version: str | None = None
    hardware: str = ""
    guessed: bool = False
    servers: int = 0
    ranks: int = 0


def check(text: str | bytes, hardware: str | None = None) -> list[Finding]:
    """Every rule that the text of a table breaks, all at once; none means that HCCL takes it."""
    return list(inspect(text, hardware).findings)


@many_objects()
def inspect(text: str | bytes, hardware: str | None = None) -> Report:
    """Check a table, and say what was seen of it."""
    if hardware is not None:
        hardware_named(hardware)
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    value, faults = read_json(raw)
    findings = [
        Finding(
            f"json-{fault.kind}",
            escape_controls(fault.pointer),
            fault.what,
            fault.remedy,
            _PARSE_FAILURE if fault.kind in _UNPARSED else "",
        )
        for fault in faults
    ]
    if any(fault.fatal for fault in faults):
        return Report(tuple(findings))
    if not isinstance(value, dict):
        what = f"the file holds {kind(value)}, not an object"
        return Report((*findings, Finding("json-top", "", what, "{...}", _PARSE_FAILURE)))
    dialect = recognized(value)
    if dialect:
        value = dialect.value
        findings.append(_dialect_finding(dialect.name))
    rules = Rules(value, hardware)
    rules.run()
    found = rules.findings
    if dialect:
        found = [replace(one, pointer=dialect.pointer(one.pointer)) for one in found]
    return Report(
        findings=(*findings, *found),
        value=value,
        version=rules.version,
        hardware=rules.hardware.name,
        guessed=hardware is None,
        servers=len(rules.servers),
        ranks=len(rules.devices),
    )


def differs(first: Report, other: Report) -> Finding | None:
    """Where two tables of one run differ as HCCL compares them: key order and space don't count, array order does."""
    place = _difference(first.value, other.value)
    if place is None:
        return None
    what = "differs here from the first file; the ranks of a run compare their tables"
    hccl = "EI0005: the ranktable's CRC differs between the local and the remote rank."
    return Finding("differs", place, what, "give every node the same file: clusterctl ranktable push", hccl)


def alike(reports: Sequence[Report]) -> list[Report]:
    """The reports of the tables of one run, those that are unlike the first with a finding more."""
    found = [differs(reports[0], one) for one in reports]
    return [
        replace(report, findings=(*report.findings, one)) if one else report
        for report, one in zip(reports, found, strict=True)
    ]


def _difference(left: Any, right: Any, at: str = "") -> str | None:
    """The pointer to the first difference; the depth was bounded when they were read."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        pairs = [(pointer(key), left[key], right[key]) for key in left]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = [(f"/{step}", left[step], right[step]) for step in range(len(left))]
    else:
        return None if type(left) is type(right) and left == right else at
    found = (_difference(one, other, at + step) for step, one, other in pairs)
    return next((place for place in found if place is not None), None)


def _dialect_finding(name: str) -> Finding:
    what = f"a table in the form of {name}, which HCCL does not read"
    remedy = "clusterctl ranktable convert FILE -o OUT.json writes it as HCCL reads it"
    return Finding("dialect", "", what, remedy, missing("server_list"))


def check_file(path: Path, hardware: str | None = None) -> Report:
    """Check a table and the file that holds it; a file that is not there is the command line's fault."""
    mode = _mode(path)
    findings = tuple(_file_findings(path, mode))
    try:
        if not stat.S_ISREG(mode) and not path.is_file() and path.exists():
            return Report(findings)
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)  # a byte too many is a finding; of the rest nothing is kept
    except FileNotFoundError:
        raise InputFaults([Fault(str(path), "no such file", "check the name")]) from None
    except OSError as error:
        what = f"can't be read: {error.strerror or error}"
        others = tuple(one for one in findings if one.code != "file-unreadable")
        return Report((*others, Finding("file-unreadable", "", what, _READABLE, _SILENT)))
    report = inspect(raw, hardware)
    return replace(report, findings=findings + report.findings)


def _mode(path: Path) -> int:
    """What the path itself is, without following a link; 0 for nothing: a merge asks this of 10,000 files."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _file_findings(path: Path, mode: int) -> Iterator[Finding]:
    if stat.S_ISLNK(mode):
        remedy = "put the file itself in this place"
        yield Finding("file-symlink", "", "the path is a symbolic link", remedy, _SILENT)
    elif mode and not stat.S_ISREG(mode):
        yield Finding("file-kind", "", "the path is not a regular file", "name a file", _SILENT)
    elif mode and not mode & stat.S_IRUSR:  # root reads it all the same, the ranks' owner does not
        yield Finding("file-unreadable", "", "its owner can't read it", _READABLE, _SILENT)
    if path.suffix != ".json":
        what = f"the name {path.name!r} does not end in .json"
        yield Finding("file-suffix", "", what, "rename it", _PARSE_FAILURE)
