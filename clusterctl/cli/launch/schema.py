"""`schema`: the JSON schema of job files, for editors."""

from __future__ import annotations

from clusterctl.cli import screen


def schema() -> None:
    """Print the JSON schema of job files, for editors that complete and check YAML. Save it with
    `clusterctl schema > job.schema.json` and write `# yaml-language-server: $schema=job.schema.json` as the first line
    of the job file."""
    from clusterctl.jobs.schema import job_schema

    screen.show_json(job_schema())
