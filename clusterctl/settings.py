"""Settings from the environment, the project's clusterctl.yaml and the user's configuration file."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from clusterctl.environment import environment as environment
from clusterctl.environment import inherited as inherited
from clusterctl.errors import InputFaults, UsageError

PROJECT_FILE = "clusterctl.yaml"
PREFIX = "CLUSTERCTL_"
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
# A month; a longer time is probably a wrong unit.
MAX_PERSIST = 30 * 86400.0


@dataclass(frozen=True)
class Settings:
    """Defaults for options of the command line."""

    cluster: str = "cluster.yaml"
    """The inventory (`--cluster`)."""
    kind: str = "cpu"
    """Kind of the devices in a hostfile or a Slurm allocation: cpu, cuda or npu."""
    runs: str = "runs"
    """Folder of the runs."""
    fanout: int = 32
    """Number of nodes that are contacted at the same time."""
    connect_timeout: float = 10.0
    """Seconds after which a node that does not answer is unreachable."""
    accept_new_host_keys: bool = False
    """Trust nodes seen for the first time; a changed key is still refused."""
    ssh: str = "auto"
    """SSH client: paramiko, openssh or auto."""
    persist: str = "off"
    """How long connections are kept open after their last use (10m), or off."""


def load_settings(directory: Path | None = None) -> Settings:
    """Return the settings that apply in a folder."""
    values: dict[str, object] = {}
    variables = environment()
    user_file = (
        Path(variables.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "clusterctl" / "config.yaml"
    )
    here = directory or Path.cwd()
    project = project_folder(here)
    values.update(_found_above(project, here))
    for path in (user_file, project / PROJECT_FILE):
        if path.is_file():
            values.update(_from_file(path))
    values.update(_from_environment(variables))
    return Settings(**values)  # type: ignore[arg-type]


def project_folder(here: Path) -> Path:
    """Return the folder of the project: the first of `here` and its parents with a cluster.yaml or clusterctl.yaml.

    A parent counts only if it belongs to this user, below the home folder; else it is `here`.
    """
    home, user = Path.home(), os.getuid()
    for folder in (here, *here.parents):
        if any((folder / name).is_file() for name in (PROJECT_FILE, Settings.cluster)):
            return folder
        try:
            if folder == home or folder.parent.stat().st_uid != user or (folder / ".git").exists():
                break
        except OSError:
            break
    return here


def _found_above(project: Path, here: Path) -> dict[str, object]:
    """Return the inventory and the runs of a project whose folder is a parent of `here`."""
    if project == here:
        return {}
    found: dict[str, object] = {}
    if (project / Settings.cluster).is_file():
        found["cluster"] = str(project / Settings.cluster)
    if not (here / Settings.runs).is_dir():
        found["runs"] = str(project / Settings.runs)
    return found


def _from_file(path: Path) -> dict[str, object]:
    from clusterctl.document import Section, load_document

    section = Section(load_document(path))
    kinds: dict[str, type[object]] = {
        "cluster": str,
        "kind": str,
        "runs": str,
        "fanout": int,
        "connect_timeout": float,
        "accept_new_host_keys": bool,
        "ssh": str,
    }
    found: dict[str, object] = {key: section.take(key, kind) for key, kind in kinds.items()}
    found["persist"] = section.take_text("persist") or None
    try:
        duration(str(found["persist"] or "off"))
    except UsageError as error:
        section.fault("persist", error.message, error.hint)
    for key, example in (("fanout", "32"), ("connect_timeout", "10")):
        if found[key] is not None and (problem := out_of_range(key, found[key])):
            section.fault(key, problem, f"for example {example}")
    section.done()
    if section.faults:
        raise InputFaults(section.faults)
    for key in ("cluster", "runs"):
        name = found[key]
        if isinstance(name, str):
            found[key] = str(path.parent / Path(name).expanduser())
    return {key: value for key, value in found.items() if value is not None}


def _from_environment(variables: dict[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key in ("cluster", "kind", "runs", "ssh", "persist"):
        if variables.get(PREFIX + key.upper()):
            found[key] = variables[PREFIX + key.upper()]
    for key, kind, example in (("fanout", int, "32"), ("connect_timeout", float, "10")):
        name = PREFIX + key.upper()
        text = variables.get(name)
        if text:
            try:
                found[key] = kind(text)
            except ValueError:
                raise UsageError(
                    f"${name} is {text!r}, not a number", f"for example {name}={example}"
                ) from None
            if problem := out_of_range(key, found[key]):
                raise UsageError(f"${name} is {text!r}: {problem}", f"for example {name}={example}")
    return found


def out_of_range(key: str, value: object) -> str:
    """Return which value `fanout` or `connect_timeout` needs; "" if it has such a one."""
    least, most = {"fanout": (1, 100_000), "connect_timeout": (0.01, 86_400)}[key]
    fits = isinstance(value, (int, float)) and least <= value <= most
    return "" if fits else f"{least} to {most:,} is needed"


def duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `10m`, `1.5h` or `1d`; 0 for `off`."""
    if text.strip().lower() in ("off", "no", "false"):
        return 0.0
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([smhd]?)", text.strip().lower())
    seconds = float(match[1]) * UNITS[match[2]] if match else math.inf
    if seconds > MAX_PERSIST:
        raise UsageError(f"{text[:40]!r} is not a duration (30 days at most)", "use 90s, 10m, 1h or off")
    return seconds


def cache_folder() -> Path:
    """Return the cache folder of this user."""
    return Path(environment().get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clusterctl"
