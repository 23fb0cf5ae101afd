"""`submit k8s` and `submit modelarts`: submit a job to a platform that starts its pods."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.cli.declared import option
from clusterctl.cli.launch.submit import JobFile, Overrides, Print
from clusterctl.errors import UsageError, did_you_mean

Image = Annotated[str, typer.Option("--image", metavar="IMAGE", help="Override the image of the job file.")]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the objects. Default: the job's.")]
Follow = Annotated[bool, typer.Option("--follow", help="Submit nothing; follow what was submitted before.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Return when the job is submitted.")]
Delete = Annotated[bool, typer.Option("--delete", help="Delete the job and all that was created for it.")]


def k8s(
    job: JobFile,
    *,
    kind: str = option(
        "Kind of the object: job (default), jobset, trainjob, vcjob or acjob.", default="job", metavar="KIND"
    ),
    image: Image = "",
    name: Name = "",
    overrides: Overrides = None,
    only_print: Print = False,
    detach: Detach = False,
    follow_only: Follow = False,
    delete: Delete = False,
) -> None:
    """Submit a job to Kubernetes and follow it. The job's `kubernetes` part says what to ask for. Ctrl-C leaves it
    running; --follow follows it again."""
    from clusterctl.backends.pods import request as requests
    from clusterctl.backends.pods import submission

    if kind not in requests.KINDS:
        near = did_you_mean(kind, requests.KINDS) or f"one of {', '.join(requests.KINDS)}"
        raise UsageError(f"--kind {kind}: unknown", near)
    if follow_only and delete:
        raise UsageError("--follow and --delete cannot be given together", "use one after the other")
    loaded, made = submission.request_of(job, kind, image, name, overrides or [])
    if only_print:
        screen.write(submission.yaml_of(made))
        return
    from clusterctl.backends.pods import kube_api

    api = kube_api.JobApi(kube_api.connect(), kind, made.options.namespace, made.name)
    if delete:
        for deleted in api.delete():
            screen.log(f"deleted {deleted}")
        return
    if not follow_only:
        if note := api.require_room(made):
            screen.log(f"note: {note}", "yellow")
        name = submission.submitted(api, loaded, made, options.runs_folder(), screen.log)
        screen.log(f"it is a run: clusterctl status {name}, logs -f {name}, stop {name}")
    if detach:
        screen.write(f"{made.name}\n")
        return
    for line in kube_api.follow(api):
        screen.write(f"{line}\n")


def modelarts(
    job: JobFile, *, image: Image = "", overrides: Overrides = None, only_print: Print = False
) -> None:
    """Print a job as a request of ModelArts' API. The job's `modelarts` part says what to ask for."""
    from clusterctl.backends.pods import modelarts as platform
    from clusterctl.backends.pods import request as requests
    from clusterctl.jobs import job as jobs
    from clusterctl.jobs import job_check
    from clusterctl.jobs.parts.pods import KubernetesOptions, ModelArtsOptions

    loaded = jobs.load(job, overrides or ())
    body = platform.training_job(loaded, job, image)
    wanted = loaded.modelarts or ModelArtsOptions()
    pods = KubernetesOptions(nodes=wanted.nodes, devices=wanted.devices, kind="npu")
    job_check.check(requests.for_pods(loaded), requests.imagined(pods))
    if not only_print:
        hint = "add --print, and send it: POST /v2/{project_id}/training-jobs, with a token of yours"
        raise UsageError("clusterctl has no credentials of ModelArts, and only prints the request", hint)
    screen.write(json.dumps(body, indent=2) + "\n")
