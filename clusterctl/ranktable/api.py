"""RankTable: which device of which server is which rank, as HCCL and torch_npu read it from RANK_TABLE_FILE.

A RankTable is well formed: whoever holds one holds ranks 0 to N-1 in order. `load` takes what
`ranktable_check` passes and refuses the rest with every fault at its JSON pointer; `render` writes the
vendors' own layout, in which every scalar of versions 1.0 and 1.2 is a string, and those of 2.0 are numbers.
This is the door; the rooms behind it are ranktable_model, _read, _make, _check, _rules, _edit and _plan.
"""

from __future__ import annotations

from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.ranktable.build import (
    build,
    buildable,
    checked,
    complete,
    in_order,
    merge,
    named_by,
    server_places,
)
from clusterctl.ranktable.check import check, load, load_all, parse
from clusterctl.ranktable.finding import Finding
from clusterctl.ranktable.table import (
    Device,
    RankTable,
    Server,
    SuperPod,
    in_rank_order,
    renumbered,
)

__all__ = [
    "Device", "Finding", "RankTable", "Server", "SuperPod",
    "build", "buildable", "check", "checked", "complete", "file_name", "in_order", "in_rank_order", "load",
    "load_all", "merge", "named_by", "parse", "renumbered", "save", "server_places",
]  # fmt: skip


def save(table: RankTable, path: Path, force: bool = False, dry_run: bool = False) -> bool:
    """Write a table whole; False when the file held it already. Another table there is kept unless forced."""
    from clusterctl.files import save_new

    if path.is_dir():
        raise UsageError(f"{path}: is a folder", "name a file")
    if path.suffix != ".json":
        raise UsageError(
            f"{path}: HCCL takes a rank table only from a name that ends in .json", f"{path}.json"
        )
    return save_new(path, table.render(), force, dry_run)


def file_name(table: RankTable) -> str:
    """The vendors' own names: `hccl_8p_01234567_10.0.0.1.json` for one server, else `hccl_4s_32p.json`."""
    if len(table.servers) > 1:
        return f"hccl_{len(table.servers)}s_{table.ranks}p.json"
    server = table.servers[0]
    ids = "".join(str(device.device_id) for device in server.devices)
    place = "".join(char if char.isalnum() or char in "._-:" else "_" for char in server.server_id)
    return f"hccl_{len(server.devices)}p_{ids}_{place}.json"
