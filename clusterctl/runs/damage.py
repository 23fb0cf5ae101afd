"""Find the files of a run's folder that cannot be read, so that `status` names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.errors import UsageError
from clusterctl.jobs.run_folder import damaged
from clusterctl.runs.causes.cause import Cause
from clusterctl.runs.state import read_state
from clusterctl.wire.typed_json import BadValue, decode

if TYPE_CHECKING:
    from pathlib import Path

    from clusterctl.jobs.run_folder import RunDir


def damaged_files(run: RunDir) -> dict[Path, str]:
    """Return the JSON files of a run's folder that cannot be used, each with its path and the reason in words."""
    found: dict[Path, str] = {}
    for path in (*sorted(run.root.glob("*.json")), *sorted(run.root.glob("attempts/*/*.json"))):
        try:
            if path.name == run.state.name:
                read_state(run, path)
            elif path.name == run.cause.name:
                decode(Cause, run.read_json(path))
            elif not isinstance(run.read_json(path), dict):
                raise BadValue("not a JSON object")
        except BadValue as error:
            found[path] = damaged(path, error).message
        except UsageError as error:
            found[path] = error.message
    return found
