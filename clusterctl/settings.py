"""Settings: flag, environment, the project's clusterctl.yaml, the user's own file, default.

The launcher's only reader of the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import InputFaults, UsageError

PROJECT_FILE = "clusterctl.yaml"
PREFIX = "CLUSTERCTL_"


@dataclass(frozen=True)
class Settings:
    """What may be said once instead of on every command line."""

    cluster: str = "cluster.yaml"
    """The inventory, `-c`."""
    kind: str = "cpu"
    """What the slots of a hostfile or of a Slurm allocation are: cpu, cuda or npu."""
    runs: str = "runs"
    """Where the folders of runs are kept."""
    fanout: int = 32
    """How many nodes are talked to at once."""
    connect_timeout: float = 10.0
    """Seconds until a node that does not answer counts as unreachable."""
    accept_new_host_keys: bool = False
    """Record the key of a node never seen before; a changed key is always refused."""


def load_settings(directory: Path | None = None) -> Settings:
    """The settings in force in a folder."""
    values: dict[str, object] = {}
    user_file = (
        Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "clusterctl" / "config.yaml"
    )
    for path in (user_file, (directory or Path.cwd()) / PROJECT_FILE):
        if path.is_file():
            values.update(_from_file(path))
    values.update(_from_environment())
    return Settings(**values)  # type: ignore[arg-type]


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
    }
    found: dict[str, object] = {key: section.take(key, kind) for key, kind in kinds.items()}
    section.done()
    if section.faults:
        raise InputFaults(section.faults)
    for key in ("cluster", "runs"):
        name = found[key]
        if isinstance(name, str):
            found[key] = str(path.parent / Path(name).expanduser())
    return {key: value for key, value in found.items() if value is not None}


def _from_environment() -> dict[str, object]:
    found: dict[str, object] = {}
    for key in ("cluster", "kind", "runs"):
        if os.environ.get(PREFIX + key.upper()):
            found[key] = os.environ[PREFIX + key.upper()]
    for key, kind, example in (("fanout", int, "32"), ("connect_timeout", float, "10")):
        name = PREFIX + key.upper()
        text = os.environ.get(name)
        if text:
            try:
                found[key] = kind(text)
            except ValueError:
                raise UsageError(f"${name} is {text!r}, not a number", f"as in {name}={example}") from None
    return found


def inherited(names: tuple[str, ...]) -> dict[str, str]:
    """The named variables of the launcher's own environment, those that are set; nothing else of it travels."""
    return {name: os.environ[name] for name in names if name in os.environ}


def environment() -> dict[str, str]:
    """A copy of the whole environment, for programs that the launcher starts on this machine."""
    return dict(os.environ)
