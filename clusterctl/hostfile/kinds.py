"""Tell the kinds of files that list nodes apart."""

from __future__ import annotations

import re
from pathlib import Path

# Bytes that show the kind of a file.
HEAD = 64 << 10

_YAML_KEY = re.compile(r"^(nodes|defaults|name|groups|known_hosts)\s*:(\s|$)", re.MULTILINE)
_TABLE_KEY = re.compile(r'"(server_list|group_list|rank_list|server_count|rank_count|server_group_list)"')


def kind_of_file(path: Path) -> str:
    """Return cluster, ranktable or hostfile, from the suffix and the first bytes of a file."""
    if path.suffix in (".yaml", ".yml"):
        return "cluster"
    try:
        with path.open("rb") as file:
            head = file.read(HEAD).decode("utf-8", "replace").removeprefix("\ufeff")
    except OSError:
        # The reader of the whole file reports why it cannot be read.
        return "hostfile" if path.exists() else "cluster"
    if path.suffix == ".json" and head.lstrip()[:1] != "{":
        # The reader of rank tables reports what is wrong with it.
        return "ranktable"
    if head.lstrip()[:1] == "{":
        return "ranktable" if _TABLE_KEY.search(head) else "cluster"
    return "cluster" if _YAML_KEY.search(head) else "hostfile"
