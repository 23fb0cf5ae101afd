"""Check a rank table (its file, its JSON text, and HCCL's rules for the content), and read it into a RankTable."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterctl.errors import Fault, InputFaults
from clusterctl.json_types import JsonObject
from clusterctl.ranktable.dialects import recognized
from clusterctl.ranktable.finding import (
    Finding,
    Severity,
    hardware_named,
    kind,
    missing,
)
from clusterctl.ranktable.rules.apply import apply_rules
from clusterctl.ranktable.rules.group_list import is_laboratory
from clusterctl.ranktable.strict_json import MAX_BYTES, JsonFault, pointer, read_json
from clusterctl.ranktable.table import (
    Device,
    RankTable,
    Server,
    SuperPod,
    counted,
    hccl_opens,
    many_objects,
    renumbered,
    why_not_opened,
)
from clusterctl.text import escape_controls

_READABLE = "make it readable for the owner: chmod u+r"
_PARSE_FAILURE = "EI0004: Failed to parse the ranktable file."
# What no JSON parser accepts; HCCL's parser accepts the other faults, such as a key that is repeated.
_UNPARSED = ("syntax", "encoding", "number")
_SILENT = "nothing: torch_npu negotiates without the table, with no message"


@dataclass(frozen=True)
class Report:
    """The result of a check; `guessed` if the hardware was derived from the version."""

    findings: tuple[Finding, ...]
    value: Any = None
    version: str | None = None
    hardware: str = ""
    guessed: bool = False
    servers: int = 0
    ranks: int = 0

    @property
    def refused(self) -> bool:
        """Return whether HCCL refuses the table."""
        return any(finding.severity is Severity.REFUSED for finding in self.findings)


def check(text: str | bytes, hardware: str | None = None) -> list[Finding]:
    """Return all findings about the text of a table; an empty list means that HCCL accepts it."""
    return list(inspect(text, hardware).findings)


@many_objects()
def inspect(text: str | bytes, hardware: str | None = None) -> Report:
    """Check the text of a table; return the findings, the version, and the number of servers and ranks."""
    if hardware is not None:
        hardware_named(hardware)
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    value, faults = read_json(raw)
    findings = [_json_finding(fault) for fault in faults]
    if any(fault.fatal for fault in faults):
        return Report(tuple(findings))
    if not isinstance(value, dict):
        problem = f"the file holds {kind(value)}, not an object"
        return Report((*findings, Finding("json-top", "", problem, "{...}", _PARSE_FAILURE)))
    dialect = recognized(value)
    if dialect:
        value = dialect.value
        findings.append(_dialect_finding(dialect.name))
    state = apply_rules(value, hardware)
    found = state.reader.findings
    if dialect:
        found = [replace(finding, pointer=dialect.pointer(finding.pointer)) for finding in found]
    return Report(
        findings=(*findings, *found),
        value=value,
        version=state.version,
        hardware=state.hardware.name,
        guessed=hardware is None,
        servers=_count_servers(value) if state.version == "2.0" else len(state.servers),
        ranks=len(state.devices),
    )


def _json_finding(fault: JsonFault) -> Finding:
    unparsed = fault.kind in _UNPARSED
    return Finding(
        f"json-{fault.kind}",
        escape_controls(fault.pointer),
        fault.what,
        fault.remedy,
        _PARSE_FAILURE if unparsed else "",
        Severity.REFUSED if unparsed else Severity.WRONG,
    )


def _count_servers(value: JsonObject) -> int:
    """Return the number of servers that a table of version 2.0 appears to have; 0 if it cannot be read."""
    try:
        return len(_from_ranks(value).servers)
    except (KeyError, TypeError, ValueError, AttributeError):
        return 0


def differs(first: Report, other: Report) -> Finding | None:
    """Return where two tables of one run differ, or None; like HCCL, ignore the order of keys and white space."""
    pointer = _difference(first.value, other.value)
    if pointer is None:
        return None
    problem = "differs here from the first file; the ranks of a run compare their tables"
    if first.version != other.version:
        pointer = "/version"
        problem = f"is version {other.version}, and the first file is version {first.version}"
    hccl = "EI0005: the ranktable's CRC differs between the local and the remote rank."
    return Finding(
        "differs", pointer, problem, "give every node the same file: clusterctl ranktable push", hccl
    )


def alike(reports: Sequence[Report]) -> list[Report]:
    """Return the reports of the tables of one run; each that differs from the first begins with that finding."""
    found = [differs(reports[0], report) for report in reports]
    return [
        replace(report, findings=(finding, *report.findings)) if finding else report
        for report, finding in zip(reports, found, strict=True)
    ]


def _difference(left: Any, right: Any, at: str = "") -> str | None:
    """Return the pointer to the first difference of two values, or None. The reader has bounded their depth."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        pairs = [(pointer(key), left[key], right[key]) for key in left]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = [(f"/{step}", left[step], right[step]) for step in range(len(left))]
    else:
        return None if type(left) is type(right) and left == right else at
    found = (_difference(a, b, at + step) for step, a, b in pairs)
    return next((candidate for candidate in found if candidate is not None), None)


def _dialect_finding(name: str) -> Finding:
    problem = f"a table in the form of {name}, which HCCL does not read"
    remedy = "clusterctl ranktable convert FILE -o OUT.json writes the form that HCCL reads"
    return Finding("dialect", "", problem, remedy, missing("group_count"))


def check_file(path: Path, hardware: str | None = None) -> Report:
    """Check a table and the file that holds it; raise InputFaults if there is no such file."""
    mode = _mode(path)
    findings = tuple(_file_findings(path, mode))
    try:
        if not stat.S_ISREG(mode) and not path.is_file() and path.exists():
            return Report(findings)
        with path.open("rb") as file:
            # One byte more than allowed is enough to find a file that is too large.
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputFaults([Fault(str(path), "no such file", "check the name")]) from None
    except OSError as error:
        problem = f"can't be read: {error.strerror or error}"
        others = tuple(finding for finding in findings if finding.code != "file-unreadable")
        return Report((*others, Finding("file-unreadable", "", problem, _READABLE, _SILENT)))
    report = inspect(raw, hardware)
    if report.version == "2.0":
        # Its reader opens a file of any name.
        findings = tuple(finding for finding in findings if finding.code != "file-suffix")
    return replace(report, findings=findings + report.findings)


def _mode(path: Path) -> int:
    """Return the mode of the path itself, without following a link; 0 if there is nothing."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _file_findings(path: Path, mode: int) -> Iterator[Finding]:
    if stat.S_ISLNK(mode):
        remedy = "replace the link with the file"
        yield Finding("file-symlink", "", "the path is a symbolic link", remedy, _SILENT)
    elif mode and not stat.S_ISREG(mode):
        yield Finding("file-kind", "", "the path is not a regular file", "name a file", _SILENT)
    elif mode and not mode & stat.S_IRUSR:
        # Root can read it, but the owner of the ranks cannot.
        yield Finding("file-unreadable", "", "its owner can't read it", _READABLE, _SILENT)
    if not hccl_opens(str(path)):
        yield Finding("file-suffix", "", why_not_opened(str(path)), "rename it", _PARSE_FAILURE)


_TOP_KEYS = {"version", "server_count", "server_list", "super_pod_list", "status"}
_SERVER_KEYS = {"server_id", "device", "host_nic_ip"}
_POD_KEYS = {"super_pod_id", "server_list"}
_DEVICE_KEYS = {"device_id", "device_ip", "rank_id", "super_device_id"}
_V2_TOP_KEYS = {"version", "rank_count", "rank_list", "status"}
_V2_RANK_KEYS = {"rank_id", "local_id", "device_id", "level_list"}
# HCCL does not read these forms; a reader that converts them can.
_FORGIVEN = ("dialect",)


@many_objects()
def load(path: Path, hardware: str | None = None) -> RankTable:
    """Read a table from a file; raise InputFaults with everything that HCCL would refuse.

    The name of the file and a symbolic link do not matter here. A table in the form of a cloud or of
    an operator is converted.
    """
    return _from_report(check_file(path, hardware), str(path))


@many_objects()
def load_all(paths: Sequence[Path], hardware: str | None = None) -> list[tuple[str, RankTable]]:
    """Read tables that belong together; return each with its file name, or raise the faults of all files."""
    faults: list[Fault] = []
    versions: dict[str, str] = {}
    tables: list[tuple[str, RankTable]] = []
    for path in paths:
        try:
            report = check_file(path, hardware)
            if report.version is not None:
                versions.setdefault(report.version, str(path))
            tables.append((str(path), _from_report(report, str(path))))
        except InputFaults as error:
            faults += error.faults
    if faults and len(versions) > 1:
        # The cause of the other faults comes first.
        which = ", ".join(f"{version or 'none'} in {name}" for version, name in versions.items())
        faults.insert(0, Fault("the files", f"their versions differ: {which}", _ONE_VERSION))
    if faults:
        raise InputFaults(faults)
    return tables


_ONE_VERSION = "`clusterctl ranktable convert` them to one version first"


@many_objects()
def parse(text: str | bytes, source: str = "rank table") -> RankTable:
    """Read a table from its text; `source` names it in messages."""
    return _from_report(inspect(text), source)


def _from_report(report: Report, source: str) -> RankTable:
    """Return the table of a report; raise InputFaults if it cannot be used."""
    unread = ("file-unreadable", "file-kind")
    faults = [
        Fault(f"{source} {finding.pointer}".rstrip(), finding.what, finding.remedy)
        for finding in report.findings
        if finding.code in unread or not (finding.code in _FORGIVEN or finding.code.startswith("file-"))
    ]
    if faults:
        raise InputFaults(faults)
    if report.version == "2.0":
        return _from_ranks(report.value)
    return _from_groups(report.value) if report.version == "" else _from_concise(report.value)


def _rest(value: Mapping[str, object], known: set[str]) -> JsonObject:
    return {} if value.keys() <= known else {key: inner for key, inner in value.items() if key not in known}


def _from_concise(value: JsonObject) -> RankTable:
    servers = []
    for server in value["server_list"]:
        devices = tuple([_device(device, int(device["rank_id"])) for device in server["device"]])
        nic, extras = server.get("host_nic_ip"), _rest(server, _SERVER_KEYS)
        # HCCL does not read it, so it may be of any type.
        if nic is not None and not isinstance(nic, str):
            nic, extras = None, {"host_nic_ip": nic, **extras}
        servers.append(Server(server["server_id"], devices, nic, extras))
    extras = _rest(value, _TOP_KEYS)
    if value["version"] == "1.0" and not _has_pods(value):
        extras |= {key: value[key] for key in ("super_pod_list",) if key in value}
        return RankTable(tuple(servers), "1.0", (), value["status"], extras)
    pods = tuple(_pod(pod) for pod in value.get("super_pod_list", ()))
    return RankTable(tuple(servers), value["version"], pods, value["status"], extras)


def _pod(pod: JsonObject) -> SuperPod:
    ids = tuple(server["server_id"] for server in pod["server_list"])
    rests = {
        server["server_id"]: _rest(server, {"server_id"}) for server in pod["server_list"] if len(server) > 1
    }
    return SuperPod(pod["super_pod_id"], ids, _rest(pod, _POD_KEYS), rests)


def _has_pods(value: JsonObject) -> bool:
    """Return whether a 1.0 table, whose super pods HCCL ignores, has a well-formed list of them."""
    pods = value.get("super_pod_list")
    if not isinstance(pods, list) or not pods or not all(isinstance(pod, dict) for pod in pods):
        return False
    lists = [pod.get("server_list") for pod in pods]
    if not all(isinstance(listed, list) and listed for listed in lists):
        return False
    entries = [entry for listed in lists for entry in listed]
    if not all(isinstance(entry, dict) for entry in entries):
        return False
    names = [entry.get("server_id") for entry in entries]
    pod_ids = [pod.get("super_pod_id") for pod in pods]
    if not all(isinstance(text, str) and text for text in [*names, *pod_ids]):
        return False
    known = {server["server_id"] for server in value["server_list"]}
    unique = len(set(pod_ids)) == len(pod_ids) and len(set(names)) == len(names)
    return unique and set(names) <= known


def _from_groups(value: JsonObject) -> RankTable:
    """Return a table in the old form as version 1.0; its keys about network planes are dropped.

    A cloud's table has no rank ids: its devices get them in the order of the file.
    """
    laboratory = is_laboratory(value)
    by_server: dict[str, list[Device]] = {}
    for group in value["group_list"]:
        for entry in group["instance_list"]:
            devices = by_server.setdefault(entry["server_id"], [])
            devices.extend(_device(device, int(entry.get("rank_id", 0))) for device in entry["devices"])
    servers = tuple(Server(name, tuple(devices)) for name, devices in by_server.items())
    return RankTable(servers if laboratory else renumbered(servers))


def _from_ranks(value: JsonObject) -> RankTable:
    """Return a table of version 2.0, whose list of ranks is split into servers."""
    devices = [
        Device(
            entry["device_id"], "", entry["rank_id"], None,
            _rest(entry, _V2_RANK_KEYS), entry["local_id"], tuple(entry["level_list"]),
        )
        for entry in sorted(value["rank_list"], key=lambda entry: int(entry["rank_id"]))
    ]  # fmt: skip
    status = value.get("status", "completed")
    extras = _rest(value, _V2_TOP_KEYS)
    if not isinstance(status, str):
        status, extras = "completed", {"status": status, **extras}
    return RankTable(counted(devices), "2.0", (), status, extras)


def _device(value: JsonObject, rank: int) -> Device:
    extras = {} if value.keys() <= _DEVICE_KEYS else _rest(value, _DEVICE_KEYS)
    super_id = value.get("super_device_id")
    return Device(
        int(value["device_id"]),
        value.get("device_ip", ""),
        rank,
        super_id if isinstance(super_id, str) else None,
        extras,
    )
