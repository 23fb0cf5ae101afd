"""Check a job before it is submitted to Kubernetes, and collect the files, environment and names for its pods."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.backends.backend import PLATFORMS, QUEUES
from clusterctl.document import Document
from clusterctl.errors import Fault, InputFaults
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import Job
from clusterctl.jobs.parts.own_table import file_of
from clusterctl.jobs.parts.platforms import LABEL, KubernetesOptions
from clusterctl.jobs.parts.saving import saving_of
from clusterctl.jobs.run_folder import new_run_id
from clusterctl.transfer.manifest import make_manifest

KINDS = ("job", "jobset", "trainjob", "vcjob", "acjob")
# A label of DNS, so the host name of a pod.
MAX_NAME = 63
# A reference of an image has no spaces; its registry decides about the rest.
IMAGE = re.compile(r"\w[\w.:/@+-]*", re.ASCII)
# A ConfigMap may hold 1 MiB; a tenth is left for names and the job itself.
MAX_CODE = 900_000
# Seconds beyond the job's grace for the agent and the runtime to end.
MARGIN = 30
# Where a pod finds its job and its code.
JOB_FOLDER = "/etc/clusterctl"
CODE_FOLDER = f"{JOB_FOLDER}/code"
# Parts of a job that only its submission needs.
LEFT_OUT = (
    *QUEUES,
    *(verb.part for verb in PLATFORMS.values()),
    "container",
    "nodes",
    "restart",
    "forward",
    "notify",
)


@dataclass(frozen=True)
class PodRequest:
    """A job that has been checked, as its manifests need it."""

    name: str
    kind: str
    image: str
    options: KubernetesOptions
    grace: int
    job_file: str
    """The text of the job file in the pods."""
    code: Mapping[str, bytes]
    """The files of the code by their path; empty if the image has it."""
    secrets: tuple[str, ...] = ()
    """Variables that come from the Secret."""
    saved_as: str = ""
    """The name under which all pods save together, if they save to a store or a shared disk: that of the run."""

    @property
    def service(self) -> str:
        """The headless service, which gives each pod a name."""
        return self.name

    @property
    def peers(self) -> list[str]:
        """The names of the pods in order, where they are known before the pods exist."""
        middle = {"job": "", "jobset": "-node-0", "trainjob": "-node-0"}.get(self.kind)
        if middle is None:
            return []
        return [f"{self.name}{middle}-{index}.{self.service}" for index in range(self.options.nodes)]


def request_for(
    job: Job, kind: str, image: str = "", name: str = "", upload_seconds: float = 0.0
) -> PodRequest:
    """Return what the manifests of a job need; raise InputFaults with everything that is wrong.

    `upload_seconds` is the planned time of the upload of the last checkpoint to a store.
    """
    options = job.kubernetes or KubernetesOptions()
    image = image or options.image or (job.container.image if job.container else "")
    name = name or re.sub(r"[._]+", "-", job.name.lower()).strip("-")
    faults = [*_faults(job, options, kind, name, image), *_grace_faults(job, options, upload_seconds)]
    code: dict[str, bytes] = {}
    if job.code is not None and options.code == "configmap":
        code, problems = _code_of(job, job.code)
        faults += problems
    if faults:
        raise InputFaults(faults)
    grace = options.grace or _pod_grace(job, upload_seconds)
    text = _job_text(job, options)
    return PodRequest(name, kind, image, options, grace, text, code, job.forward, saved_name(job))


def saved_name(job: Job) -> str:
    """Return a new name under which all pods of a job save together; "" if they save to no store and no shared disk."""
    saving = saving_of(job.train)
    return new_run_id(job.name) if saving.to or saving.dir else ""


def imagined(options: KubernetesOptions) -> Cluster:
    """Return the pods as an inventory, to plan and check the job for them."""
    nodes = [
        Node(name=f"pod{number}", host=f"pod{number}", address=f"pod{number}", kind=options.kind,
             devices=tuple(range(options.devices)))
        for number in range(options.nodes)
    ]  # fmt: skip
    return Cluster("pods", tuple(nodes), source="the job's `kubernetes` part")


def for_pods(job: Job) -> Job:
    """Return a job without the settings that the platform decides."""
    return replace(job, nodes=None, restart=None, notify="")


def _at(job: Job, key: tuple[str, ...], problem: str, remedy: str) -> Fault:
    document = job.document or Document(job.source, {}, {(): 1})
    return document.fault(key, problem, remedy)


def _faults(job: Job, options: KubernetesOptions, kind: str, name: str, image: str) -> Iterator[Fault]:
    """Yield what Kubernetes would refuse, or would only fail later."""
    if not image:
        yield _at(
            job, ("kubernetes", "image"), "no image is given", "image: registry.example/train:1, or --image"
        )
    elif not IMAGE.fullmatch(image):
        problem = f"{image!r} is not the name of an image"
        yield _at(job, ("kubernetes", "image"), problem, "as in registry.example/train:1, or --image")
    if not LABEL.match(name):
        problem = f"{name!r} cannot name objects of Kubernetes"
        yield _at(job, ("name",), problem, "small letters, digits and '-', or --name")
    suffix = _longest_suffix(kind, options.nodes)
    if len(name) + suffix > MAX_NAME:
        problem = f"{name!r} has {len(name)} characters, and {kind} adds {suffix}: more than {MAX_NAME}"
        yield _at(job, ("name",), problem, f"a name of at most {MAX_NAME - suffix} characters, or --name")
    if kind == "job" and options.retries:
        problem = "a Job starts single pods again, and a training needs all of them"
        yield _at(job, ("kubernetes", "retries"), problem, "--kind jobset, vcjob or acjob")
    if kind == "trainjob" and options.retries:
        problem = "a TrainJob takes the number of restarts from its runtime"
        yield _at(job, ("kubernetes", "retries"), problem, "set maxRestarts in the runtime, or --kind jobset")
    if job.data is not None:
        problem = f"{job.data} is a folder of this machine, which no pod has"
        yield _at(
            job, ("data",), problem, "data_there: FOLDER, on a claim: kubernetes: {claims: {data: /data}}"
        )
    if file_of(job.rank_table):
        problem = "a table that is made before the pods cannot name their devices"
        yield _at(job, ("rank_table",), problem, "rank_table: auto, with --kind acjob")
    if job.forward and not options.secret:
        problem = f"the values of {', '.join(job.forward)} would have to be in the manifest"
        yield _at(job, ("forward",), problem, "kubernetes: {secret: NAME}, a Secret with these keys")
    if job.storage.credentials:
        problem = f"{job.storage.credentials} is a file of this machine, which no pod has"
        remedy = "forward: [AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY], and kubernetes: {secret: NAME}"
        yield _at(job, ("storage", "credentials"), problem, remedy)


def _longest_suffix(kind: str, nodes: int) -> int:
    """Return how many characters a kind adds to a name at most: to the names of its pods, jobs and files."""
    index = len(str(nodes - 1))
    # Job controllers add five random characters to a pod's name.
    random = 6
    return {
        "job": 1 + index + random,
        "jobset": len("-node-0-") + index + random,
        "trainjob": len("-node-0-") + index + random,
        "vcjob": len("-worker-") + index,
        "acjob": max(len("-worker-") + index, len("rings-config-")),
    }[kind]


def _pod_grace(job: Job, upload_seconds: float) -> int:
    """Return the seconds that a pod has to end: for the ranks, an upload, and the rest."""
    return int(job.grace + 1.5 * upload_seconds) + MARGIN


def _grace_faults(job: Job, options: KubernetesOptions, upload_seconds: float) -> Iterator[Fault]:
    """Yield times that would cut off the last checkpoint, or its upload."""
    if options.grace and options.grace < job.grace + upload_seconds + 5:
        upload = f" and the upload of about {upload_seconds:.0f} s are" if upload_seconds else " is"
        problem = f"{options.grace} s end the pod before the job's grace of {job.grace:g} s{upload} over"
        remedy = f"grace: {_pod_grace(job, upload_seconds)}, or leave it out"
        yield _at(job, ("kubernetes", "grace"), problem, remedy)


def _code_of(job: Job, root: Path) -> tuple[dict[str, bytes], list[Fault]]:
    """Return the files of the code, and why they cannot be sent along."""
    manifest = make_manifest(root)
    faults = []
    # Base64 makes binary files larger by a third.
    if manifest.size * 4 / 3 > MAX_CODE:
        problem = f"{root} has {manifest.size / 1e6:.1f} MB, and a ConfigMap holds 1 MiB"
        remedy = "build it into the image and write kubernetes: {code: image}, or leave out files: .clusterctlignore"
        faults.append(_at(job, ("code",), problem, remedy))
        return {}, faults
    links = [entry.path for entry in manifest.entries if entry.kind == "l"]
    if links:
        faults.append(_at(job, ("code",), f"a ConfigMap has no links: {', '.join(links[:3])}", "code: image"))
    return {entry.path: (root / entry.path).read_bytes() for entry in manifest.files}, faults


def _job_text(job: Job, options: KubernetesOptions) -> str:
    """Return the job file of the pods: the user's with the overrides of the command line, without other platforms."""
    value = dict(job.document.value) if job.document else {}
    content = {key: part for key, part in value.items() if key not in LEFT_OUT}
    content["name"] = job.name
    if job.code is not None and options.code == "configmap":
        content["code"] = CODE_FOLDER
    # JSON is YAML that no reader takes for another type.
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
