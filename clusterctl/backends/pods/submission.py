"""Submit a job as objects of Kubernetes, and record it as a run of this project."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.backends.pods import pod_runs
from clusterctl.backends.pods import request as requests
from clusterctl.backends.pods.kinds import manifests_of
from clusterctl.jobs import job as jobs
from clusterctl.jobs import job_check
from clusterctl.jobs.parts.grace import upload_seconds, with_grace
from clusterctl.jobs.parts.pods import KubernetesOptions
from clusterctl.jobs.parts.saving import saving_of
from clusterctl.jobs.run_folder import RunDir, make_runs, new_run

if TYPE_CHECKING:
    from clusterctl.backends.pods.kube_api import JobApi
    from clusterctl.backends.pods.request import PodRequest
    from clusterctl.jobs.job import Job


def request_of(
    file: Path, kind: str, image: str, name: str, overrides: Sequence[str]
) -> tuple[Job, PodRequest]:
    """Return a job and the values for its manifests; raise InputFaults with all errors."""
    loaded = jobs.load(file, overrides)
    options = loaded.kubernetes or KubernetesOptions()
    summary = job_check.check(requests.for_pods(loaded), requests.imagined(options))
    upload = upload_seconds(summary, saving_of(loaded.train).to) if summary else 0.0
    return loaded, requests.request_for(with_grace(loaded, summary), kind, image, name, upload)


def submitted(api: JobApi, job: Job, request: PodRequest, runs: Path, note: Callable[[str], object]) -> str:
    """Create the objects of a job, and record it as a run of this project; return the run's name."""
    # The pods save under the name of the run, so that `checkpoint list` finds their checkpoints.
    run = RunDir(make_runs(runs) / request.saved_as) if request.saved_as else new_run(job.name, runs)
    pod_runs.write_submitted(run, job, request)
    try:
        for created in api.submit(request):
            note(f"created {created}")
    except BaseException:
        # Nothing was submitted, so there is no run.
        shutil.rmtree(run.root)
        raise
    return run.run_id


def yaml_of(request: PodRequest) -> str:
    """Return the manifests of a job as one YAML file, for kubectl."""
    import yaml

    class Plain(yaml.SafeDumper):
        """Writes multi-line texts as blocks, and no anchors."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, "|" if "\n" in value else None)

    Plain.add_representer(str, text)
    return yaml.dump_all(manifests_of(request), Dumper=Plain, sort_keys=False, allow_unicode=True)
