"""Whether HCCL takes a rank table: its file, its JSON, and every rule of `ranktable_rules`.

Rank tables read: a file or a text into a RankTable, or every fault of it with its JSON pointer.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterctl.errors import Fault, InputFaults
from clusterctl.ranktable.dialects import recognized
from clusterctl.ranktable.finding import (
    Finding,
    hardware_named,
    kind,
    missing,
)
from clusterctl.ranktable.rules import Rules
from clusterctl.ranktable.strict_json import MAX_BYTES, pointer, read_json
from clusterctl.ranktable.table import (
    Device,
    RankTable,
    Server,
    SuperPod,
    counted,
    many_objects,
)
from clusterctl.text import escape_controls

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
            # A byte too many is a finding; of the rest nothing is kept.
            raw = file.read(MAX_BYTES + 1)
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
    elif mode and not mode & stat.S_IRUSR:
        # Root reads it all the same, the ranks' owner does not.
        yield Finding("file-unreadable", "", "its owner can't read it", _READABLE, _SILENT)
    if path.suffix != ".json":
        what = f"the name {path.name!r} does not end in .json"
        yield Finding("file-suffix", "", what, "rename it", _PARSE_FAILURE)


_TOP_KEYS = {"version", "server_count", "server_list", "super_pod_list", "status"}
_SERVER_KEYS = {"server_id", "device", "host_nic_ip"}
_POD_KEYS = {"super_pod_id", "server_list"}
_DEVICE_KEYS = {"device_id", "device_ip", "rank_id", "super_device_id"}
_V2_TOP_KEYS = {"version", "rank_count", "rank_list", "status"}
_V2_RANK_KEYS = {"rank_id", "local_id", "device_id", "level_list"}
# HCCL does not take these forms; a reader who turns them into its own does.
_FORGIVEN = ("dialect",)


@many_objects()
def load(path: Path, hardware: str | None = None) -> RankTable:
    """Read a table from a file; everything that HCCL would refuse is refused here, all at once.

    The file's name and a symbolic link matter to a run and not to a reader, so they pass; so does a table in
    one of the Kubernetes forms, which is read as the table that it stands for.
    """
    report = check_file(path, hardware)
    unread = [one for one in report.findings if one.code in ("file-unreadable", "file-kind")]
    inner = [one for one in report.findings if not one.code.startswith("file-")]
    return _from_report(report, unread + inner, str(path))


@many_objects()
def load_all(paths: Sequence[Path], hardware: str | None = None) -> list[tuple[str, RankTable]]:
    """Tables with their files' names; the faults of all of them at once."""
    tables: list[tuple[str, RankTable]] = []
    faults: list[Fault] = []
    for path in paths:
        try:
            tables.append((str(path), load(path, hardware)))
        except InputFaults as error:
            faults += error.faults
    if faults:
        raise InputFaults(faults)
    return tables


@many_objects()
def parse(text: str | bytes, source: str = "rank table") -> RankTable:
    """Read a table from its text; `source` names it in messages."""
    report = inspect(text)
    return _from_report(report, list(report.findings), source)


def _from_report(report: Report, findings: Sequence[Finding], source: str) -> RankTable:
    faults = [
        Fault(f"{source} {one.pointer}".rstrip(), one.what, one.remedy)
        for one in findings
        if one.code not in _FORGIVEN
    ]
    if faults:
        raise InputFaults(faults)
    if report.version == "2.0":
        return _from_ranks(report.value)
    return _from_lab(report.value) if report.version == "" else _from_concise(report.value)


def _rest(value: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    return {} if value.keys() <= known else {key: inner for key, inner in value.items() if key not in known}


def _from_concise(value: dict[str, Any]) -> RankTable:
    servers = []
    for server in value["server_list"]:
        devices = tuple([_device(device, int(device["rank_id"])) for device in server["device"]])
        nic, extras = server.get("host_nic_ip"), _rest(server, _SERVER_KEYS)
        # Nobody reads it, so it may be anything.
        if nic is not None and not isinstance(nic, str):
            nic, extras = None, {"host_nic_ip": nic, **extras}
        servers.append(Server(server["server_id"], devices, nic, extras))
    extras = _rest(value, _TOP_KEYS)
    if value["version"] == "1.0" and not _has_pods(value):
        extras |= {key: value[key] for key in ("super_pod_list",) if key in value}
        return RankTable(tuple(servers), "1.0", (), value["status"], extras)
    pods = tuple(_pod(pod) for pod in value.get("super_pod_list", ()))
    return RankTable(tuple(servers), value["version"], pods, value["status"], extras)


def _pod(pod: dict[str, Any]) -> SuperPod:
    ids = tuple(one["server_id"] for one in pod["server_list"])
    rests = {one["server_id"]: _rest(one, {"server_id"}) for one in pod["server_list"] if len(one) > 1}
    return SuperPod(pod["super_pod_id"], ids, _rest(pod, _POD_KEYS), rests)


def _has_pods(value: dict[str, Any]) -> bool:
    """Whether a table of version 1.0, in which HCCL looks at no super pods, has a list of them that makes sense."""
    pods = value.get("super_pod_list")
    if not isinstance(pods, list) or not all(isinstance(pod, dict) for pod in pods):
        return False
    lists = [pod.get("server_list") for pod in pods]
    entries = [one for listed in lists if isinstance(listed, list) for one in listed or [None]]
    if not all(isinstance(listed, list) for listed in lists) or not all(
        isinstance(one, dict) for one in entries
    ):
        return False
    named = [one.get("server_id") for one in entries]
    pod_ids = [pod.get("super_pod_id") for pod in pods]
    if not pods or not all(isinstance(one, str) and one for one in [*named, *pod_ids]):
        return False
    there = {server["server_id"] for server in value["server_list"]}
    return len(set(pod_ids)) == len(pod_ids) and len(set(named)) == len(named) and set(named) <= there


def _from_lab(value: dict[str, Any]) -> RankTable:
    """The old form as a 1.0 table; its keys about network planes have no place there and are dropped."""
    by_server: dict[str, list[Device]] = {}
    for group in value["group_list"]:
        for entry in group["instance_list"]:
            devices = by_server.setdefault(entry["server_id"], [])
            devices.extend(_device(device, int(entry["rank_id"])) for device in entry["devices"])
    return RankTable(tuple(Server(name, tuple(devices)) for name, devices in by_server.items()))


def _from_ranks(value: dict[str, Any]) -> RankTable:
    """Version 2.0: ranks in a row, of which the servers are counted."""
    devices = [
        Device(
            entry["device_id"], "", entry["rank_id"], None,
            _rest(entry, _V2_RANK_KEYS), entry["local_id"], tuple(entry["level_list"]),
        )
        for entry in sorted(value["rank_list"], key=lambda entry: int(entry["rank_id"]))
    ]  # fmt: skip
    return RankTable(counted(devices), "2.0", (), value["status"], _rest(value, _V2_TOP_KEYS))


def _device(value: dict[str, Any], rank: int) -> Device:
    extras = {} if value.keys() <= _DEVICE_KEYS else _rest(value, _DEVICE_KEYS)
    super_id = value.get("super_device_id")
    return Device(
        int(value["device_id"]),
        value.get("device_ip", ""),
        rank,
        super_id if isinstance(super_id, str) else None,
        extras,
    )
