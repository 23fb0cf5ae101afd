"""Submit a job to a platform that starts its pods, and record it as a run of this project."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from clusterctl.backends.pods import backend, modelarts
from clusterctl.backends.pods import request as requests
from clusterctl.backends.pods.kinds import manifests_of
from clusterctl.backends.pods.kube_api import JobApi, connect, follow
from clusterctl.backends.pods.request import PodRequest
from clusterctl.errors import UsageError, did_you_mean
from clusterctl.jobs import job as jobs
from clusterctl.jobs import job_check
from clusterctl.jobs.job import Job
from clusterctl.jobs.parts.platforms import KubernetesOptions, ModelArtsOptions
from clusterctl.jobs.parts.saving import saving_of, upload_seconds, with_grace
from clusterctl.jobs.run_folder import RunDir, make_runs, new_run


@dataclass(frozen=True)
class PodsJob:
    """A checked job, and the values for its manifests; nobody knows it until it is submitted."""

    job: Job
    request: PodRequest

    @classmethod
    def of(
        cls, file: Path, overrides: Sequence[str] = (), *, kind: str = "job", image: str = "", name: str = ""
    ) -> PodsJob:
        """Check a job file for objects of a kind; raise InputFaults with all errors."""
        if kind not in requests.KINDS:
            near = did_you_mean(kind, requests.KINDS) or f"one of {', '.join(requests.KINDS)}"
            raise UsageError(f"--kind {kind}: unknown", near)
        job = jobs.load(file, overrides)
        options = job.kubernetes or KubernetesOptions()
        summary = job_check.check(requests.for_pods(job), requests.imagined(options))
        upload = upload_seconds(summary, saving_of(job.train).to) if summary else 0.0
        return cls(job, requests.request_for(with_grace(job, summary), kind, image, name, upload))

    @cached_property
    def api(self) -> JobApi:
        """The job in the cluster that kubectl uses here."""
        request = self.request
        return JobApi(connect(), request.kind, request.options.namespace, request.name)

    @property
    def text(self) -> str:
        """The manifests as one YAML file, for kubectl."""
        import yaml

        class Plain(yaml.SafeDumper):
            """Writes multi-line texts as blocks, and no anchors."""

            def ignore_aliases(self, data: object) -> bool:
                return True

        def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
            return dumper.represent_scalar("tag:yaml.org,2002:str", value, "|" if "\n" in value else None)

        Plain.add_representer(str, text)
        return yaml.dump_all(manifests_of(self.request), Dumper=Plain, sort_keys=False, allow_unicode=True)

    def submit(self, runs: Path, note: Callable[[str], object] = lambda text: None) -> RunDir:
        """Create the objects of the job, and record it as a run; return the run."""
        if doubt := self.api.require_room(self.request):
            note(f"note: {doubt}")
        # The pods save under the name of the run, so that `checkpoint list` finds their checkpoints.
        saved_as = self.request.saved_as
        run = RunDir(make_runs(runs) / saved_as) if saved_as else new_run(self.job.name, runs)
        backend.write_submitted(run, self.job, self.request)
        try:
            for created in self.api.submit(self.request):
                note(f"created {created}")
        except BaseException:
            # Nothing was submitted, so there is no run.
            shutil.rmtree(run.root)
            raise
        return run

    def follow(self) -> Iterator[str]:
        """Yield changes of the pods and the output of the first one; raise RunFailed if the job fails."""
        return follow(self.api)


def request_text(file: Path, overrides: Sequence[str] = (), image: str = "") -> str:
    """Return the request that starts a job at a service, to which clusterctl has no access."""
    job = jobs.load(file, overrides)
    body = modelarts.training_job(job, file, image)
    wanted = job.modelarts or ModelArtsOptions()
    pods = KubernetesOptions(nodes=wanted.nodes, devices=wanted.devices, kind="npu")
    job_check.check(requests.for_pods(job), requests.imagined(pods))
    return json.dumps(body, indent=2) + "\n"
