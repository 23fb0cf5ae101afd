"""Check the content of a rank table against the rules of HCCL's readers.

The readers are those of the old form without a version (910A), of `1.0` (910A and 910B), of `1.2` (A3 super
pods), and of `2.0` (A5), which another library reads. `fields` has the rules of each value; `server_list`,
`group_list` and `rank_list` walk a table; `across_servers` compares its servers and devices. A Finding has
the place, the reason, the remedy, and the message of HCCL, which often misleads: HCCL calls a number in place
of a string "missing", and waits half an hour for a table whose status is not "completed".
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterctl.ranktable.finding import GUESS, HARDWARE, invalid, missing
from clusterctl.ranktable.rules.across_servers import check_across_servers
from clusterctl.ranktable.rules.group_list import check_groups
from clusterctl.ranktable.rules.rank_list import check_ranks
from clusterctl.ranktable.rules.server_list import check_servers
from clusterctl.ranktable.rules.state import TableState

_VERSIONS = '"1.0", "1.2" or "2.0"'


def apply_rules(value: Mapping[str, object], hardware: str | None = None) -> TableState:
    """Check a table for this hardware (guessed from the version if None); return what was read and found."""
    state = TableState(value)
    state.version = _read_version(state)
    state.hardware = HARDWARE[hardware or GUESS["1.0" if state.version is None else state.version]]
    state.reader.numbers_as_text = state.version != "2.0"
    _check_hardware(state)
    if state.version == "2.0":
        check_ranks(state)
    elif state.version is not None:
        check_groups(state) if state.version == "" else check_servers(state)
        _check_status(state)
    check_across_servers(state)
    return state


def _read_version(state: TableState) -> str | None:
    """Return the version, "" for the old form, None for one that is not known here."""
    reader, value = state.reader, state.value
    if "version" not in value:
        if "group_list" in value:
            return ""
        remedy = 'add "version": "1.0" (910A, 910B), "1.2" (A3) or "2.0" (A5)'
        reader.add("version", "", "'version' is missing", remedy, missing("group_count"))
        return "1.0"
    version = value["version"]
    if not isinstance(version, str):
        reader.read("version", value, "")
        # The rest of the table is still checked.
        return str(version) if str(version) in ("1.0", "1.2") else None
    if version in ("1.0", "1.2", "2.0"):
        return version
    if version == "1.1":
        problem = "version 1.1 (mixed hardware) has rules that are not known here"
        reader.warn("version", "/version", problem, _VERSIONS)
    else:
        hccl = invalid(version, "version", "a valid version number")
        reader.add("version", "/version", f"unknown version {version[:80]!r}", _VERSIONS, hccl)
    return None


def _check_hardware(state: TableState) -> None:
    """Check that the hardware uses this version; HCCL itself only tells 2.0 from the others."""
    if state.version is None or state.version in state.hardware.versions:
        return
    wanted = state.hardware.versions[-1]
    pointer = "/version" if state.version else ""
    problem = f"{state.hardware.name} needs version {wanted}, not {state.version or 'a table without one'}"
    remedy = "build the table for this hardware"
    if "2.0" in (state.version, wanted):
        state.reader.add("hardware", pointer, problem, remedy, invalid(state.version, "version", wanted))
    else:
        state.reader.warn("hardware", pointer, problem, remedy)


def _check_status(state: TableState) -> None:
    status = state.reader.read("status", state.value, "").texts.get("status", "completed")
    if status != "completed":
        problem = f"'status' is {status[:80]!r}: HCCL reads the file again every second for 30 minutes"
        remedy = 'wait until the program that writes it sets "completed"'
        state.reader.add("status", "/status", problem, remedy, "nothing for 30 minutes, then a time-out")
