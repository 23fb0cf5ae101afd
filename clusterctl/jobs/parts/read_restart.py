"""Read the `restart` part of a job, and times such as `90s`."""

from __future__ import annotations

from clusterctl.agent.frames import SILENCE
from clusterctl.document import Section
from clusterctl.errors import UsageError, did_you_mean
from clusterctl.jobs.restarts import Restart
from clusterctl.settings import duration

GROW_CHOICES = ("restart", "checkpoint")


def read_restart(top: Section) -> Restart | None:
    """Return the `restart` part of a job, or None if it has none."""
    inner = top.section("restart")
    if top.value.get("restart") is None:
        return None
    plain = Restart()
    found = Restart(
        max=_at_least(inner, "max", 0, plain.max),
        backoff=take_seconds(inner, "backoff", plain.backoff) or 0.0,
        spare_nodes=inner.take("spare_nodes", str),
        min_nodes=_at_least(inner, "min_nodes", 1, 0) or None,
        node_lost_after=take_seconds(inner, "node_lost_after", plain.node_lost_after) or 0.0,
        grow=_grow(inner, plain.grow),
    )
    if found.node_lost_after <= SILENCE:
        problem = (
            f"{found.node_lost_after:g} s is too short: a silent connection is noticed after {SILENCE:g} s"
        )
        inner.fault("node_lost_after", problem, f"{plain.node_lost_after:g}s, or more")
    inner.done()
    return found


def _at_least(section: Section, key: str, least: int, default: int) -> int:
    value = section.take(key, int, default)
    if value is not None and value < least and section.value.get(key) is not None:
        section.fault(key, f"{value} is too small", f"{least} or more")
    return value or 0


def take_seconds(section: Section, key: str, default: float | None) -> float | None:
    """Return a time in seconds, given as a number or as `90s`, `10m`, `off`."""
    section.taken.append(key)
    value = section.value.get(key)
    if value is None:
        return default
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    try:
        return duration(value if isinstance(value, str) else "?")
    except UsageError:
        section.fault(key, f"{value!r} is not a time", "as in 10, 90s, 10m, or off")
        return default


def _grow(section: Section, default: str) -> str:
    value = section.take_text("grow", default)
    if value not in GROW_CHOICES:
        near = did_you_mean(value, GROW_CHOICES) or f"one of {', '.join(GROW_CHOICES)}"
        section.fault("grow", f"unknown {value!r}", near)
    return value
