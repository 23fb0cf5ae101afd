"""Write a job as the body of ModelArts' API (POST /v2/{project_id}/training-jobs)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from clusterctl.backends.pods.request import saved_name
from clusterctl.document import Document
from clusterctl.errors import InputFaults
from clusterctl.jobs.job import Job
from clusterctl.jobs.parts.platforms import ModelArtsOptions
from clusterctl.wire import contract

# The folder to which ModelArts copies the code.
CODE_FOLDER = "/home/ma-user/modelarts/user-job-dir"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
# Variables that ModelArts sets itself.
RESERVED = "MA_"
MAX_VARIABLES = 100


def training_job(job: Job, job_file: Path, image: str = "") -> dict[str, object]:
    """Return the request that starts a job; raise InputFaults with all settings that ModelArts would refuse."""
    options = job.modelarts or ModelArtsOptions()
    image = image or options.image or (job.container.image if job.container else "")
    _check(job, options, image)
    algorithm: dict[str, object] = {
        "engine": {"image_url": image},
        "code_dir": _path(options.code),
        "local_code_dir": CODE_FOLDER,
        "working_dir": CODE_FOLDER,
        "command": shlex.join(
            ["clusterctl", "launch", f"{CODE_FOLDER}/{_last(options.code)}/{job_file.name}"]
        ),
        "environments": {
            **dict(job.env),
            **({contract.SAVED_AS: saved} if (saved := saved_name(job)) else {}),
        },
        "inputs": _folders("data", options.inputs),
        "outputs": _folders("output", options.outputs),
    }
    resource: dict[str, object] = {"flavor_id": options.flavor, "node_count": options.nodes}
    if options.pool:
        resource["pool_id"] = options.pool
    spec: dict[str, object] = {"resource": resource}
    if options.log:
        spec["log_export_path"] = {"obs_url": _path(options.log)}
    return {
        "kind": "job",
        "metadata": {"name": job.name.replace(".", "-"), "description": "written by clusterctl"},
        "algorithm": {key: value for key, value in algorithm.items() if value},
        "spec": spec,
    }


def _check(job: Job, options: ModelArtsOptions, image: str) -> None:
    document = job.document or Document(job.source, {}, {(): 1})
    faults = []
    if job.modelarts is None:
        remedy = "modelarts: {flavor: ..., nodes: 2, code: obs://bucket/code/}"
        faults.append(document.fault((), "the job has no `modelarts` part", remedy))
    if not image:
        problem, remedy = "no image is given", "modelarts: {image: group/train:1}, or --image"
        faults.append(document.fault(("modelarts", "image"), problem, remedy))
    if not NAME.match(job.name.replace(".", "-")):
        faults.append(
            document.fault(("name",), f"{job.name!r} has more than 64 characters", "a shorter name")
        )
    for name in (*job.env, *job.forward):
        if name.startswith(RESERVED):
            problem = f"{name}: ModelArts sets the variables that begin with {RESERVED}"
            faults.append(document.fault(("env", name), problem, "choose another name"))
        if name in job.forward:
            problem = f"{name} would be in the request, where everybody in the project can read it"
            faults.append(document.fault(("forward",), problem, "read it from a file of an input folder"))
    if len(job.env) > MAX_VARIABLES:
        problem = f"{len(job.env)} variables, and ModelArts takes {MAX_VARIABLES}"
        faults.append(document.fault(("env",), problem, "put them into a file"))
    if job.data is not None:
        problem = f"{job.data} is a folder of this machine"
        faults.append(document.fault(("data",), problem, "modelarts: {inputs: {/data: obs://bucket/data/}}"))
    if faults:
        raise InputFaults(faults)


def _path(url: str) -> str:
    """Return a folder of OBS as the API writes it: /bucket/folder/."""
    return "/" + url.removeprefix("obs://").strip("/") + "/"


def _last(url: str) -> str:
    """Return the last folder of a path: ModelArts copies the folder itself, not only its content."""
    return _path(url).strip("/").rpartition("/")[2]


def _folders(prefix: str, folders: Mapping[str, str]) -> list[dict[str, object]]:
    return [
        {"name": f"{prefix}_{number}", "local_dir": folder, "remote": {"obs": {"obs_url": _path(url)}}}
        for number, (folder, url) in enumerate(folders.items())
    ]
