"""Rank tables to and from what else describes the same nodes: another version, a plan, a hostfile of any launcher."""

from __future__ import annotations

from pathlib import Path

from clusterctl.errors import InputFaults, UsageError, did_you_mean
from clusterctl.ranktable.check import load
from clusterctl.ranktable.edit import to_version
from clusterctl.ranktable.plan import load_plan, render_plan, skeleton
from clusterctl.ranktable.table import RankTable

VERSIONS = ("1.0", "1.2", "2.0")
HOSTFILES = ("deepspeed", "openmpi", "mpich", "slurm", "torchrun", "cluster")
TARGETS = (*VERSIONS, "plan", *HOSTFILES)


def is_plan(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def read(path: Path, hardware: str | None = None) -> RankTable:
    """A table out of a table in any form, or out of a plan."""
    return load_plan(path) if is_plan(path) else load(path, hardware)


def is_hostfile(path: Path) -> bool:
    """Whether a file is no table and no plan: neither by its name nor by its first character."""
    if is_plan(path) or path.suffix == ".json":
        return False
    try:
        with path.open("rb") as file:
            return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"{"
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", "check the name") from None


def as_table(path: Path, version: str | None, facts: Path | None, super_pod: str | None) -> RankTable:
    """The table of a file in a version; its own where none is asked for."""
    if is_hostfile(path):
        what = f"{path}: neither a rank table nor a plan; a hostfile names no addresses of devices"
        hint = f"clusterctl ranktable build --hostfile {path} asks its nodes; --to plan leaves room for them"
        raise UsageError(what, hint)
    table = read(path)
    return to_version(table, version or table.version, read(facts) if facts else None, super_pod)


def as_text(path: Path, target: str, lossy: bool = False) -> str:
    """The text of a plan, or of another launcher's file, that says the same."""
    from clusterctl.hostfile import convert, detect

    if target not in TARGETS:
        near = did_you_mean(target, TARGETS)
        raise UsageError(f"unknown format {target!r}", near or f"one of {', '.join(TARGETS)}")
    if target != "plan":
        if is_plan(path):
            raise UsageError(f"{path}: a plan becomes a table first", "clusterctl ranktable convert --to 1.0")
        source = detect.read(path)
        if source.faults:
            raise InputFaults(source.faults)
        return convert.render(source, target, lossy=lossy)
    if is_hostfile(path):
        return skeleton(detect.load(path, "npu"))
    return render_plan(read(path), str(path), lossy)
