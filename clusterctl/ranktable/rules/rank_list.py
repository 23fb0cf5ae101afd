"""The rules of version 2.0 (A5): a flat list of ranks, each with its levels of network addresses."""

from __future__ import annotations

from collections.abc import Mapping

from clusterctl.ranktable.finding import invalid
from clusterctl.ranktable.rules.fields import BACKUP_LOCAL_ID
from clusterctl.ranktable.rules.reader import Values, is_address
from clusterctl.ranktable.rules.state import SeenDevice, TableState

# Network layer and net_instance_id, to the number of addresses and the level that shows it.
Networks = dict[tuple[int, str], tuple[int, str]]


def check_ranks(state: TableState) -> None:
    """Check `rank_list`."""
    reader = state.reader
    values = reader.read("2.0 table", state.value, "")
    state.check_count(values, "rank_count", state.value, "rank_list")
    local_ids: dict[int, str] = {}
    backups: list[tuple[str, int]] = []
    networks: Networks = {}
    for at, rank in reader.objects("2.0 table", "rank_list", state.value, ""):
        numbers = reader.read("rank", rank, at).numbers
        local_id = numbers.get("local_id")
        if local_id == BACKUP_LOCAL_ID:
            replaced = reader.read("backup rank", rank, at).numbers.get("replaced_local_id")
            backups += [(at, replaced)] if replaced is not None else []
        elif local_id is not None:
            local_ids.setdefault(local_id, at)
        _check_levels(state, rank, at, networks)
        plane = reader.control_plane(rank, at)
        if plane is not None:
            here = f"{at}/control_plane"
            _check_address(state, reader.read("control plane", plane, here), here)
        state.devices.append(SeenDevice(at, 0, None, numbers.get("rank_id")))
    _check_backups(state, backups, local_ids)


def _check_backups(state: TableState, backups: list[tuple[str, int]], local_ids: Mapping[int, str]) -> None:
    """Check that at most one rank is a backup, and that the rank that it replaces is gone."""
    for at, _ in backups[1:]:
        problem = f"a second backup rank (local_id {BACKUP_LOCAL_ID}); the first is {backups[0][0]}"
        hccl = invalid("NA", "NA", "multiple replaced rank is configured.")
        state.reader.add("local-id", f"{at}/local_id", problem, "a table has at most one backup rank", hccl)
    if backups and backups[0][1] in local_ids:
        at, replaced = backups[0]
        problem = f"'replaced_local_id' is {replaced}, which {local_ids[replaced]} still has"
        hccl = invalid(replaced, "recordedReplacedLocalId", "not the local_id of another rank")
        state.reader.add("local-id", f"{at}/replaced_local_id", problem, "remove the replaced rank", hccl)


def _check_levels(state: TableState, rank: Mapping[str, object], at: str, networks: Networks) -> None:
    """Check the levels of one rank, and that each network has as many addresses as in the ranks before."""
    reader = state.reader
    if rank.get("level_list") == []:
        problem = "'level_list' is empty: no other rank can reach this one"
        reader.warn("empty-list", f"{at}/level_list", problem, "add a level")
    before = -1
    for here, level in reader.objects("rank", "level_list", rank, at):
        values = reader.read("level", level, here)
        layer, network = values.numbers.get("net_layer"), values.texts.get("net_instance_id")
        if layer is not None and layer <= before:
            problem = f"'net_layer' is {layer}, and an earlier level has {before}"
            reader.add("net-layer", f"{here}/net_layer", problem, "sort the levels; use each layer once")
        before = before if layer is None else layer
        for pointer, address in reader.objects("level", "rank_addr_list", level, here):
            _check_address(state, reader.read("address", address, pointer), pointer)
        addresses = level.get("rank_addr_list")
        if layer is None or network is None or not isinstance(addresses, list):
            continue
        count, first = networks.setdefault((layer, network), (len(addresses), here))
        if len(addresses) != count:
            problem = (
                f"the number of addresses is {len(addresses)}, but {count} for the same network at {first}"
            )
            reader.add("list-length", f"{here}/rank_addr_list", problem, "give every rank as many addresses")


def _check_address(state: TableState, values: Values, at: str) -> None:
    """Check an address and its backups against their type."""
    kind = values.texts.get("addr_type")
    if kind is None:
        return
    expected = "32 hexadecimal digits" if kind == "EID" else f"a valid {kind} address"
    text = values.texts.get("addr")
    if text is not None and not is_address(text, kind):
        problem = f"'addr' is {text[:80]!r}, not {expected}"
        state.reader.add("address", f"{at}/addr", problem, expected, invalid(text, "addr", expected))
    for index, backup in enumerate(values.lists.get("backup_addr", ())):
        here = f"{at}/backup_addr/{index}"
        if kind == "EID":
            state.reader.add("address", here, "an EID has no backup address", "remove it")
        elif not is_address(backup, kind):
            state.reader.add("address", here, f"{backup[:80]!r} is not {expected}", expected)
