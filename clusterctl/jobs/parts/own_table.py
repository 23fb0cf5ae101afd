"""The rank table that a job brings (`rank_table: FILE`): found, and checked against the job's nodes and devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clusterctl.document import Section
from clusterctl.errors import InputFaults, UsageError, did_you_mean
from clusterctl.inventory.cluster import Node

CHOICES = ("auto", "always", "never")
# Places of ranks that differ, of which so many are named.
MOST = 3


def take_rank_table(top: Section, path: Path) -> str:
    """Return one of the choices, or the path of a table; a relative one is next to the job file."""
    value = top.take_text("rank_table", "auto")
    if value in CHOICES:
        return value
    if not ("/" in value or value.endswith(".json")):
        remedy = did_you_mean(value, CHOICES) or f"one of {', '.join(CHOICES)}, or a file: ./table.json"
        top.fault("rank_table", f"unknown {value!r}", remedy)
        return "auto"
    file = Path(value).expanduser()
    file = file if file.is_absolute() else path.parent / file
    if not file.is_file():
        top.fault("rank_table", f"no file {file}", "a path is relative to the job file; auto builds a table")
    restart = top.value.get("restart")
    moves = [key for key in ("spare_nodes", "min_nodes") if isinstance(restart, dict) and restart.get(key)]
    if moves:
        problem = f"restart.{moves[0]} changes the nodes, and the table of a file names fixed ones"
        top.fault("rank_table", problem, "rank_table: auto builds one for each attempt")
    return str(file.resolve())


def file_of(choice: str) -> Path | None:
    """Return the file of a job's `rank_table`; None for the other choices."""
    return None if choice in CHOICES else Path(choice)


def read_table(file: Path) -> str:
    """Return the text of a table that HCCL accepts; raise InputFaults with all of its faults, or a UsageError."""
    from clusterctl.ranktable import live_table

    return live_table.read(file).data.decode("utf-8")


def table_problems(file: Path, places: Sequence[tuple[Node, Sequence[int]]]) -> list[tuple[str, str]]:
    """Return what is wrong with a table for ranks on these devices of these nodes: problems with their remedies."""
    from clusterctl.ranktable import api, live_table

    try:
        live = live_table.read(file)
    except InputFaults as error:
        return [(f"{fault.where}: {fault.what}", fault.remedy) for fault in error.faults]
    except UsageError as error:
        return [(error.message, error.hint)]
    except OSError as error:
        return [(f"{file}: {error.strerror}", "check the name and its permissions")]
    table = api.parse(live.data, str(file))
    wanted = [(node, device) for node, devices in places for device in devices]
    if table.ranks != len(wanted):
        problem = f"{file} has {table.ranks} ranks, and the job {len(wanted)}"
        ranks = f"clusterctl ranktable slice {file} makes a smaller table"
        return [(problem, f"choose nodes and devices of the table, or a table for these: {ranks}")]
    problems = []
    for rank, ((node, device), (server, entry)) in enumerate(zip(wanted, table.by_rank(), strict=True)):
        name = live_table.server_of(node, live) if table.names_servers else server.server_id
        if name is None:
            known = ", ".join(list(live.servers)[:3])
            problem = f"{file} has no server {node.server_id or node.address} for {node.name}; it has {known}"
            problems.append((problem, "set the node's `server_id` in the inventory to one of the table"))
        elif (name, device) != (server.server_id, entry.device_id):
            owner = f" of {server.server_id}" if table.names_servers else ""
            in_job, in_file = f"device {device} of {node.name}", f"device {entry.device_id}{owner}"
            remedy = "put nodes and devices into the order of the table, or build it: rank_table: auto"
            problems.append((f"rank {rank} is {in_job} in the job, and {in_file} in {file}", remedy))
    return list(dict.fromkeys(problems))[:MOST]
