"""Find the files of a run's folder that cannot be read, so that `status` names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.errors import UsageError
from clusterctl.jobs.run_folder import damaged
from clusterctl.runs.causes.cause import Cause
from clusterctl.runs.state import read_state
from clusterctl.typed_json import BadValue, decode

if TYPE_CHECKING:
    from pathlib import Path

    from clusterctl.jobs.run_folder import RunDir


def damaged_files(run: RunDir) -> dict[Path, str]:
    """Return the JSON files of a run's folder that cannot be used, each with its path and the reason in words."""
    found: dict[Path, str] = {}
    for pattern in ("*.json", "attempts/*/*.json"):
        for path in sorted(run.root.glob(pattern)):
            try:
                _check(run, path)
            except UsageError as error:
                found[path] = error.message
    return found


def _check(run: RunDir, path: Path) -> None:
    value = run.read_json(path)
    if not isinstance(value, dict):
        raise damaged(path, "not a JSON object")
    if path.name == run.state.name:
        read_state(run, path)
    if path.name == run.cause.name:
        try:
            decode(Cause, value)
        except BadValue as error:
            raise damaged(path, error) from None
