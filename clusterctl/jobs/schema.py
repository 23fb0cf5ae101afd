"""A JSON schema of a job's file: the launcher's own keys here, the train part as the trainer tells it."""

from __future__ import annotations

from typing import Any

from clusterctl.jobs.job import (
    COLLECT_CHOICES,
    GROW_CHOICES,
    RANK_TABLE_CHOICES,
    ask_trainer,
)

TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "number", "minimum": 0}
TIME: dict[str, Any] = {"anyOf": [NUMBER, TEXT | {"pattern": "^([0-9.]+(ms|s|m|h|d)?|off)$"}]}
NAME: dict[str, Any] = TEXT | {"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$"}
DEVICES: dict[str, Any] = {"type": ["string", "integer", "array"]}
WORDS: dict[str, Any] = {"type": "array", "items": {"type": ["string", "number", "boolean"]}}


def job_schema() -> dict[str, Any]:
    """The whole of a job's file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "clusterctl job",
        "type": "object",
        "properties": {**_own(), "train": ask_trainer(["schema"])},
        "additionalProperties": False,
        "oneOf": [{"required": ["command"]}, {"required": ["train"]}],
    }


def _own() -> dict[str, Any]:
    told = {
        "name": (NAME, "Names the runs; the file's name if left out."),
        "command": (WORDS, "A program of yours, as a list of words; or a train part."),
        "nodes": (TEXT, "A node set: node[1-4], @group; all where nothing is said."),
        "devices": (DEVICES, "Which devices of each node, as in [0,4); one rank each."),
        "code": (TEXT, "A folder to push; the processes start in it."),
        "data": (TEXT, "A folder to push; {data} in the train part is where it lies on each node."),
        "data_there": (TEXT, "A folder that lies on all nodes already; compared, not pushed."),
        "env": (
            {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
            "More environment; {node.address} and the like are filled a node at a time.",
        ),
        "forward": (WORDS, "Variables of the launcher's own environment that travel."),
        "rank_table": (
            {"enum": list(RANK_TABLE_CHOICES)},
            "Whether the run gets a rank table; auto: on NPUs.",
        ),
        "master_port": ({"type": "integer", "minimum": 0, "maximum": 65535}, "0 lets the first node choose."),
        "grace": (NUMBER, "Seconds between SIGTERM and SIGKILL, for a last checkpoint."),
        "collect": (
            {"type": "array", "items": {"enum": list(COLLECT_CHOICES)}},
            "What else is brought home.",
        ),
        "share_devices": ({"type": "boolean"}, "Whether another run may use the devices too."),
        "restart": (_restart(), "What follows a failure."),
        "hang_after": (TIME, "Time without a step after which a training counts as hung."),
    }
    return {key: {**schema, "description": text} for key, (schema, text) in told.items()}


def _restart() -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "max": {"type": "integer", "minimum": 0},
            "backoff": TIME,
            "spare_nodes": TEXT,
            "min_nodes": {"type": "integer", "minimum": 1},
            "node_lost_after": TIME,
            "grow": {"enum": list(GROW_CHOICES)},
        },
    }
