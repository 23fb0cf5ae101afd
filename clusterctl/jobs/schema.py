"""The JSON schema of job files: the launcher's keys, and the `train` part as the trainer defines it."""

from __future__ import annotations

from clusterctl.jobs.ask_trainer import ask_trainer
from clusterctl.jobs.job import Job
from clusterctl.wire.schema import schema_of


def job_schema() -> dict[str, object]:
    """Return the JSON schema of a job file."""
    schema = schema_of(Job)
    schema["properties"]["train"] = ask_trainer(dict, ["schema"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "clusterctl job",
        **schema,
        "oneOf": [{"required": ["command"]}, {"required": ["train"]}],
    }
