"""Convert rank tables to and from other versions, plans, and the hostfiles of other launchers."""

from __future__ import annotations

from pathlib import Path

from clusterctl.errors import InputFaults, UsageError, did_you_mean
from clusterctl.hostfile import convert, detect, node_lists
from clusterctl.hostfile.kinds import kind_of_file
from clusterctl.ranktable.check import load
from clusterctl.ranktable.edit import to_version
from clusterctl.ranktable.plan import load_plan, render_plan, skeleton
from clusterctl.ranktable.table import RankTable

VERSIONS = ("1.0", "1.2", "2.0")
TARGETS = (*VERSIONS, "plan", *node_lists.TARGETS)


def is_plan(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def read(path: Path, hardware: str | None = None) -> RankTable:
    """Return the table in a file: a rank table in any form, or a plan."""
    return load_plan(path) if is_plan(path) else load(path, hardware)


def as_table(path: Path, version: str | None, facts: Path | None, super_pod: str | None) -> RankTable:
    """Return the table in a file, converted to a version if one is given."""
    if not is_plan(path) and kind_of_file(path) == "hostfile":
        problem = f"{path}: neither a rank table nor a plan; a hostfile has no addresses of devices"
        hint = f"clusterctl ranktable build --hostfile {path} queries its nodes; --to plan leaves them empty"
        raise UsageError(problem, hint)
    table = read(path)
    return to_version(table, version or table.version, read(facts) if facts else None, super_pod)


def as_text(path: Path, target: str, lossy: bool = False) -> str:
    """Return the table in a file as a plan, or as the file of another launcher."""
    if target not in TARGETS:
        near = did_you_mean(target, TARGETS)
        raise UsageError(f"--to: unknown format {target!r}", near or f"use one of {', '.join(TARGETS)}")
    if target != "plan":
        if is_plan(path):
            raise UsageError(
                f"{path}: convert the plan to a table first", "clusterctl ranktable convert --to 1.0"
            )
        source = detect.read(path)
        if source.faults:
            raise InputFaults(source.faults)
        return convert.render(source, target, lossy=lossy)
    if not is_plan(path) and kind_of_file(path) == "hostfile":
        return skeleton(detect.load(path, "npu"))
    return render_plan(read(path), str(path), lossy)
