"""Settings from the environment, the project's clusterctl.yaml and the user's configuration file."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from clusterctl.environment import environment as environment
from clusterctl.environment import inherited as inherited
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.wire.fields import Reader, keys_of, misfit, rule_of, setting

PROJECT_FILE = "clusterctl.yaml"
PREFIX = "CLUSTERCTL_"
# The folder of a sandbox if the user names none.
SANDBOX = Path(".clusterctl-sandbox")
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
# A month; a longer time is probably a wrong unit.
MAX_PERSIST = 30 * 86400.0


def duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `10m`, `1.5h` or `1d`; 0 for `off`."""
    if text.strip().lower() in ("off", "no", "false"):
        return 0.0
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([smhd]?)", text.strip().lower())
    seconds = float(match[1]) * UNITS[match[2]] if match else math.inf
    if seconds > MAX_PERSIST:
        raise UsageError(f"{text[:40]!r} is not a duration (30 days at most)", "use 90s, 10m, 1h or off")
    return seconds


def seconds_of(value: object) -> float:
    """Return a time in seconds, given as a number or as `90s`, `10m`, `off`; raise ValueError for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    try:
        # YAML reads `off` as false.
        return duration("off" if value is False else value if isinstance(value, str) else "?")
    except UsageError:
        raise ValueError(f"{value!r} is not a time", "as in 10, 90s, 10m, or off") from None


def a_time(default: float | None) -> float:
    """Return the setting of a time in seconds."""
    written = {"type": "string", "pattern": "^([0-9.]+(ms|s|m|h|d)?|off)$"}
    found: float = setting(
        default, read=seconds_of, form={"anyOf": [{"type": "number", "minimum": 0}, written]}
    )
    return found


def _persist(value: object) -> str:
    try:
        duration(str(value))
    except UsageError as error:
        raise ValueError(error.message, error.hint) from None
    return str(value)


@dataclass(frozen=True)
class Settings:
    """Defaults for options of the command line."""

    cluster: str = setting("cluster.yaml")
    """The inventory (`--cluster`)."""
    kind: str = setting("cpu")
    """Kind of the devices in a hostfile or an allocation: cpu, cuda or npu."""
    runs: str = setting("runs")
    """Folder of the runs."""
    fanout: int = setting(32, least=1, most=100_000)
    """Number of nodes that are contacted at the same time."""
    connect_timeout: float = setting(10.0, least=0.01, most=86_400)
    """Seconds after which a node that does not answer is unreachable."""
    accept_new_host_keys: bool = setting(False)
    """Trust nodes seen for the first time; a changed key is still refused."""
    ssh: str = setting("auto")
    """SSH client: paramiko, openssh or auto."""
    persist: str = setting("off", read=_persist)
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
    from clusterctl.document import load_document

    document = load_document(path)
    faults = list[Fault]()
    reader = Reader(lambda *problem: faults.append(document.fault(*problem)), blank=True)
    found = reader.given(Settings, document.value or {})
    if faults or found is None:
        raise InputFaults(faults)
    for key in ("cluster", "runs"):
        if key in found:
            found[key] = str(path.parent / Path(found[key]).expanduser())
    return found


def _from_environment(variables: dict[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for item in keys_of(Settings):
        name = PREFIX + item.name.upper()
        text = variables.get(name)
        # A shell's variable is no place for a decision about trust.
        if not text or type(item.default) is bool:
            continue
        try:
            found[item.name] = value = type(item.default)(text)
        except ValueError:
            raise UsageError(
                f"${name} is {text!r}, not a number", f"for example {name}={item.default:g}"
            ) from None
        problem, remedy = misfit(rule_of(item), value)
        if problem:
            raise UsageError(
                f"${name} is {text!r}: {problem}: {remedy}", f"for example {name}={item.default:g}"
            )
    return found


def cache_folder() -> Path:
    """Return the cache folder of this user."""
    return Path(environment().get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clusterctl"
