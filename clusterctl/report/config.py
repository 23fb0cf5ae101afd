"""The configuration of a run as flat keys, and how two of them differ."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterctl.jobs.record import RunRecord
from clusterctl.report.history import History

# A pushed folder on a node: every node has its own path to the same content.
_STORED = re.compile(r"^/.*/store/(data|code)/([0-9a-f]{8})[0-9a-f]+")


@dataclass(frozen=True)
class Difference:
    """One key whose value is not the same in all runs; "" where a run has no such key."""

    key: str
    values: tuple[str, ...]


def flat_config(record: RunRecord, history: History) -> dict[str, str]:
    """Return all settings of a run: those of the job, and those of its training with all defaults."""
    job = record.job
    facts: dict[str, object] = {
        "ranks": record.world_size,
        "nodes": len(record.ranks),
        "devices": ", ".join(sorted({node.kind for node in record.cluster.nodes})),
        "env_style": job.env_style,
        **{f"env.{name}": value for name, value in job.env.items()},
    }
    if job.command:
        facts["command"] = " ".join(job.command)
    # With all defaults, as the trainer reported it at its last start.
    resolved = history.starts[-1].facts.get("config") if history.starts else None
    train = resolved if isinstance(resolved, dict) and resolved else job.train or {}
    return {key: _text(value) for key, value in {**facts, **flat(train, "train")}.items()}


def flat(value: Mapping[str, object], prefix: str) -> dict[str, object]:
    """Return nested mappings as one with dotted keys."""
    result: dict[str, object] = {}
    for key, inner in value.items():
        name = f"{prefix}.{key}"
        result |= flat(inner, name) if isinstance(inner, Mapping) else {name: inner}
    return result


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _STORED.sub(r"{\1 \2}", text)


def differences(configs: list[dict[str, str]]) -> list[Difference]:
    """Return the keys whose values differ, in the order of the first configuration."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [Difference(key, tuple(config.get(key, "") for config in configs)) for key in keys]
    return [row for row in rows if len(set(row.values)) > 1]
