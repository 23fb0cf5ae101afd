"""The public library of rank tables: read, check, build, merge and write the file that RANK_TABLE_FILE names.

A RankTable is always well formed: it holds the ranks 0 to N-1, each once. `load` and `parse` accept a table that
`check` accepts, and raise InputFaults with every fault and its JSON pointer otherwise. `render` writes the layout of
the vendor's tools, in which versions 1.0 and 1.2 have strings only and version 2.0 has numbers.

>>> from clusterctl.ranktable import api
>>> server = api.Server("10.0.0.1", (api.Device(0, "192.168.1.1", 0), api.Device(1, "192.168.2.1", 1)))
>>> other = api.Server("10.0.0.2", (api.Device(0, "192.168.1.2", 0), api.Device(1, "192.168.2.2", 1)))
>>> table = api.merge([("a.json", api.RankTable((server,))), ("b.json", api.RankTable((other,)))])
>>> table.ranks, api.file_name(table)
(4, 'hccl_2s_4p.json')
>>> [(device.rank_id, server.server_id, device.device_ip) for server, device in table.by_rank()][2:]
[(2, '10.0.0.2', '192.168.1.2'), (3, '10.0.0.2', '192.168.2.2')]

A check lists what HCCL would refuse, and where:

>>> text = table.render().replace('"rank_id": "3"', '"rank_id": 3')
>>> for finding in api.check(text):
...     print(finding.pointer, finding.hccl_code, finding.severity.value)
...     print(finding.what)
/server_list/1/device/1/rank_id EI0017 refused
'rank_id' is a number; every value must be a string
>>> api.parse(table.render()) == table
True
"""

from __future__ import annotations

from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.files import save_new
from clusterctl.ranktable.build import (
    build,
    checked,
    complete,
    in_order,
    merge,
    named_by,
    server_places,
)
from clusterctl.ranktable.check import check, load, load_all, parse
from clusterctl.ranktable.finding import Finding, Severity
from clusterctl.ranktable.table import (
    Device,
    RankTable,
    Server,
    SuperPod,
    hccl_opens,
    in_rank_order,
    renumbered,
    why_not_opened,
)

__all__ = [
    "Device", "Finding", "RankTable", "Server", "Severity", "SuperPod",
    "build", "check", "checked", "complete", "file_name", "in_order", "in_rank_order", "load",
    "load_all", "merge", "named_by", "parse", "renumbered", "save", "server_places",
]  # fmt: skip


def save(table: RankTable, path: Path, force: bool = False, dry_run: bool = False) -> bool:
    """Write a table to a file; return False if the file already has it.

    Raise UsageError if the file has other content and `force` is not set.

    >>> import tempfile
    >>> table = RankTable((Server("10.0.0.1", (Device(0, "192.168.1.1", 0),)),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / file_name(table)
    ...     save(table, path), save(table, path), load(path) == table
    (True, False, True)
    """
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", "name a file")
    if not hccl_opens(path.name):
        raise UsageError(f"{path}: HCCL opens no rank table there: {why_not_opened(path.name)}", "table.json")
    return save_new(path, table.render(), force=force, dry_run=dry_run)


def file_name(table: RankTable) -> str:
    """Return the name that the vendor's tools give a table.

    >>> file_name(RankTable((Server("10.0.0.1", (Device(4, "192.168.1.1", 0), Device(5, "192.168.2.1", 1))),)))
    'hccl_2p_45_10.0.0.1.json'
    """
    if len(table.servers) > 1:
        return f"hccl_{len(table.servers)}s_{table.ranks}p.json"
    server = table.servers[0]
    ids = "".join(str(device.device_id) for device in server.devices)
    name = "".join(char if char.isalnum() or char in "._-:" else "_" for char in server.server_id)
    return f"hccl_{len(server.devices)}p_{ids}_{name}.json"
