"""Find node groups that other programs define: ClusterShell's files below /etc/clustershell, and /etc/genders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

# ClusterShell reads both, the user's own last.
CLUSTERSHELL = (Path("/etc/clustershell"), Path("~/.config/clustershell"))
GENDERS = Path("/etc/genders")


def foreign_groups() -> dict[str, str]:
    """Return the node sets of all groups by name; those of a named source of ClusterShell also as SOURCE:GROUP."""
    found = dict(_genders(GENDERS))
    for folder in CLUSTERSHELL:
        folder = folder.expanduser()
        for file in (folder / "groups", *sorted((folder / "groups.d").glob("*.cfg"))):
            found |= dict(_lines(file))
        for file in sorted((folder / "groups.d").glob("*.yaml")):
            found |= dict(_sources(file))
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the groups of a file with lines `GROUP: NODES`."""
    for line in _text(file).splitlines():
        name, colon, nodes = line.partition("#")[0].partition(":")
        if colon and name.strip() and nodes.strip():
            yield name.strip(), ",".join(nodes.split())


def _sources(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the groups of a YAML file {source: {group: nodes}}; a file that is no YAML has none."""
    import yaml

    try:
        content = yaml.safe_load(_text(file))
    except yaml.YAMLError:
        return
    for source, groups in content.items() if isinstance(content, dict) else ():
        for name, nodes in groups.items() if isinstance(groups, dict) else ():
            text = ",".join(map(str, nodes)) if isinstance(nodes, list) else str(nodes)
            yield f"{source}:{name}", text
            yield str(name), text


def _genders(file: Path) -> Iterator[tuple[str, str]]:
    """Yield a group for each attribute of genders, `NODES ATTRIBUTE[=VALUE],...`, and for each ATTRIBUTE=VALUE."""
    members: dict[str, list[str]] = {}
    for line in _text(file).splitlines():
        nodes, *attributes = re.split(r"[,\s]+(?![^\[]*\])", line.partition("#")[0].strip())
        for attribute in attributes:
            for name in dict.fromkeys((attribute, attribute.partition("=")[0])):
                members.setdefault(name, []).append(nodes)
    return ((name, ",".join(nodes)) for name, nodes in members.items())
