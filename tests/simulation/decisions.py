"""The modules of decisions as one value; a planted bug changes their source."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
AGENT = "clusterctl/agent/ranks/decide.py"
ATTEMPT = "clusterctl/runs/decide/attempt.py"
RUN = "clusterctl/runs/decide/run.py"
RESTARTS = "clusterctl/jobs/restarts.py"


@cache
def decisions(bug: tuple[str, str, str] | None = None) -> Any:
    """Return the decisions; with a bug, (file, text, other text), those of the changed file."""
    agent, attempt, run = (_module(path, bug) for path in (AGENT, ATTEMPT, RUN))
    if bug and bug[0] == RESTARTS:
        restarts = _module(RESTARTS, bug)
        run.decide, run.membership = restarts.decide, restarts.membership  # type: ignore[attr-defined]
    names: Mapping[str, Any] = {
        **{name: value for name, value in vars(attempt).items() if not name.startswith("_")},
        **{name: value for name, value in vars(agent).items() if name in AGENTS},
        **{name: value for name, value in vars(run).items() if name in RUNS},
    }
    return SimpleNamespace(**{**names, "watch": attempt.step, "stop_run": run.stop, "RunEnded": run.Ended})


AGENTS = {"Supervised", "Stopping", "Seen", "Event", "step", "stop"}
RUNS = {"control", "choose", "Members", "Start", "STOPPED"}


def _module(path: str, bug: tuple[str, str, str] | None) -> ModuleType:
    """Return a module of its own, made from the source with the bug in it."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if bug and bug[0] == path:
        assert text.count(bug[1]) == 1, f"{path} has not once: {bug[1]}"
        text = text.replace(bug[1], bug[2])
    name = f"simulated_{Path(path).parent.name}_{Path(path).stem}"
    module = ModuleType(name)
    # Dataclasses look their module up.
    sys.modules[name] = module
    exec(compile(text, path, "exec"), vars(module))
    return module
