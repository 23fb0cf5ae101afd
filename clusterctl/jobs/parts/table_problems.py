"""Read the rank table of a job, and compare it with the job's nodes and devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clusterctl.errors import InputFaults, UsageError
from clusterctl.inventory.cluster import Node
from clusterctl.ranktable import live_table
from clusterctl.ranktable.check import parse

# Limit of ranks with another device that are named.
MOST = 3


def read_table(file: Path) -> str:
    """Return the text of a table that HCCL accepts; raise InputFaults with all of its faults, or a UsageError."""
    return live_table.read(file).data.decode("utf-8")


def table_problems(file: Path, places: Sequence[tuple[Node, Sequence[int]]]) -> list[tuple[str, str]]:
    """Return what is wrong with a table for ranks on these devices of these nodes: problems with their remedies."""
    try:
        live = live_table.read(file)
    except InputFaults as error:
        return [(f"{fault.where}: {fault.what}", fault.remedy) for fault in error.faults]
    except UsageError as error:
        return [(error.message, error.hint)]
    except OSError as error:
        return [(f"{file}: {error.strerror}", "check the name and its permissions")]
    table = parse(live.data, str(file))
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
