"""Data that lies on the nodes already: before anything starts, every node is asked whether it has all of it, alike."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clusterctl import nodeset
from clusterctl.errors import WorkFailed
from clusterctl.outcomes import on_all
from clusterctl.words import size, some

if TYPE_CHECKING:
    from clusterctl.inventory import Cluster
    from clusterctl.stored import Tell
    from clusterctl.transport import Connections

SHOWN = 20  # faults in words; all are counted
HINT = "bring the same data to every node: clusterctl push --nodes SET FOLDER PATH; clusterctl data verify looks closer"


def check_there(cluster: Cluster, folder: str, connections: Connections, tell: Tell) -> dict[str, str]:
    """Where the folder is on each node; an error that names every node and file where it is absent, cut or another."""
    began = time.monotonic()
    answers = on_all(connections, cluster.nodes, lambda node, link: link.call("there", {"path": folder}))
    faults = faults_of(folder, answers)
    if faults:
        more = [f"... and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise WorkFailed("\n".join(["nothing was started:", *faults[:SHOWN], *more]), HINT)
    first = next(iter(answers.values()))
    total = sum(one[0] for one in first["files"].values())
    what = (
        f"{some(len(first['files']), 'file')}, {size(total)}, whole and alike on {some(len(answers), 'node')}"
    )
    tell("data", f"{folder}: {what} ({time.monotonic() - began:.1f} s)")
    return {name: str(answer["path"]) for name, answer in answers.items()}


def faults_of(folder: str, answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong on which nodes, folded; for each file the commonest copy counts as the right one."""
    said: dict[str, list[str]] = {}

    def note(node: str, what: str) -> None:
        said.setdefault(what, []).append(node)

    names = sorted({name for answer in answers.values() for name in answer["files"]})
    for node, answer in answers.items():
        if answer["missing"]:
            note(node, f"{folder}: no such folder")
        elif not answer["files"]:
            note(node, f"{folder}: is empty")
        for fault in answer["faults"]:
            note(node, f"{folder}/{fault}")
    present = {node: answer["files"] for node, answer in answers.items() if answer["files"]}
    for name in names:
        copies = Counter(tuple(files.get(name, ())) for files in present.values())
        right = max(copies, key=lambda copy: (bool(copy), copies[copy]))
        for node, files in present.items():
            mine = tuple(files.get(name, ()))
            if not mine:
                note(node, f"{folder}/{name}: is not there")
            elif mine != right:
                why = (
                    f"has {mine[0]} bytes, on others {right[0]}"
                    if mine[0] != right[0]
                    else "is not what others have"
                )
                note(node, f"{folder}/{name}: {why}")
    return [f"{nodeset.fold(nodes)}: {what}" for what, nodes in said.items()]
