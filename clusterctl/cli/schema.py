"""`schema`: what an editor needs to complete and to check a job's file."""

from __future__ import annotations

from clusterctl.cli import screen


def schema() -> None:
    """A JSON schema of a job's file, for editors: clusterctl schema > job.schema.json, named in the file's first line
    as `# yaml-language-server: $schema=job.schema.json`."""
    from clusterctl.jobs.schema import job_schema

    screen.show_json(job_schema())
