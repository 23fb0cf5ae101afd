"""Write the parts of a job's Kubernetes manifests that all kinds share."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from clusterctl.backends.pods.request import CODE_FOLDER, JOB_FOLDER, PodRequest
from clusterctl.json_types import JsonObject
from clusterctl.wire import contract

JOB_LABEL = "clusterctl/job"
# The pods start here; runs are written below it.
WORK_FOLDER = "/clusterctl"
# The name of a device in a pod's resources.
RESOURCES = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
COMMAND = ("clusterctl", "launch", f"{JOB_FOLDER}/job.yaml")
PORT = 29500


def labels(request: PodRequest) -> dict[str, str]:
    """Return the label by which all objects of a job are found."""
    return {JOB_LABEL: request.name}


def metadata(request: PodRequest, name: str = "") -> JsonObject:
    """Return the metadata of an object of a job."""
    return {
        "name": name or request.name,
        "namespace": request.options.namespace,
        "labels": labels(request),
    }


def service(request: PodRequest) -> JsonObject:
    """Return the headless service: it gives each pod a name, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(request),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(request),
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def config_map(request: PodRequest) -> JsonObject:
    """Return the ConfigMap with the job file and the code."""
    texts, binaries = {"job.yaml": request.job_file}, {}
    for key, (_, content) in zip(_code_keys(request), request.code.items(), strict=True):
        try:
            texts[key] = content.decode("utf-8")
        except UnicodeDecodeError:
            binaries[key] = base64.b64encode(content).decode("ascii")
    found: JsonObject = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(request, f"{request.name}-job"),
        "data": texts,
    }
    return {**found, "binaryData": binaries} if binaries else found


def _code_keys(request: PodRequest) -> list[str]:
    """Return the key of each code file: keys have no folders, which the volume adds again."""
    return [f"code-{number}" for number in range(len(request.code))]


def environment(request: PodRequest, *, peers: bool = True) -> list[JsonObject]:
    """Return the environment of a pod: variables that its platform does not set, and names of secrets."""
    options = request.options
    values = {
        contract.POD_PLATFORM: request.kind,
        contract.POD_COUNT: str(options.nodes),
        contract.POD_DEVICES: str(options.devices),
        contract.DEVICE_KIND: options.kind,
    }
    if request.saved_as:
        values[contract.SAVED_AS] = request.saved_as
    if peers and request.peers:
        values[contract.POD_PEERS] = ",".join(request.peers)
    found: list[JsonObject] = [{"name": name, "value": value} for name, value in values.items()]
    for name in request.secrets:
        reference = {"name": options.secret, "key": name}
        found.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return found


def resources(request: PodRequest) -> JsonObject:
    """Return the resources of a pod; requests and limits of devices must be equal."""
    options = request.options
    values: JsonObject = {}
    if options.cpus:
        values["cpu"] = options.cpus
    if options.memory:
        values["memory"] = options.memory
    if options.kind in RESOURCES:
        values[RESOURCES[options.kind]] = str(options.devices)
    return {"requests": dict(values), "limits": dict(values)} if values else {}


def volumes(request: PodRequest) -> list[JsonObject]:
    """Return the volumes of a pod: its job and code, shared memory, a work folder, and claims."""
    items = [{"key": "job.yaml", "path": "job.yaml"}]
    prefix = CODE_FOLDER.removeprefix(f"{JOB_FOLDER}/")
    items += [
        {"key": key, "path": f"{prefix}/{path}"}
        for key, path in zip(_code_keys(request), request.code, strict=True)
    ]
    claims = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(request.options.claims)
    ]
    return [
        {"name": "job", "configMap": {"name": f"{request.name}-job", "items": items}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": request.options.shared_memory}},
        {"name": "work", "emptyDir": {}},
        *claims,
    ]


def mounts(request: PodRequest) -> list[JsonObject]:
    """Return the mounts of the volumes in a container."""
    claims = [
        {"name": f"claim-{number}", "mountPath": folder}
        for number, folder in enumerate(request.options.claims.values())
    ]
    return [
        {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "work", "mountPath": WORK_FOLDER},
        *claims,
    ]


def container(request: PodRequest, name: str, env: Sequence[JsonObject] = ()) -> JsonObject:
    """Return the container of a pod."""
    found: JsonObject = {
        "name": name,
        "image": request.image,
        "command": list(COMMAND),
        "workingDir": WORK_FOLDER,
        "env": [*environment(request), *env],
        "volumeMounts": mounts(request),
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
    }
    limits = resources(request)
    return {**found, "resources": limits} if limits else found


def pod_spec(request: PodRequest, holder: JsonObject) -> JsonObject:
    """Return the specification of a pod with one container; only the launcher decides about restarts."""
    options = request.options
    found: JsonObject = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.grace,
        "automountServiceAccountToken": False,
        "containers": [holder],
        "volumes": volumes(request),
    }
    if options.service_account:
        found["serviceAccountName"] = options.service_account
    if options.pull_secret:
        found["imagePullSecrets"] = [{"name": options.pull_secret}]
    if options.node_selector:
        found["nodeSelector"] = dict(options.node_selector)
    return found


def pod_template(request: PodRequest, spec: JsonObject, more: dict[str, str] | None = None) -> JsonObject:
    """Return the template of a job's pods; each gets a node of its own."""
    apart = {
        "labelSelector": {"matchLabels": labels(request)},
        "topologyKey": "kubernetes.io/hostname",
    }
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    return {
        "metadata": {"labels": {**labels(request), **(more or {})}},
        "spec": {"affinity": affinity, **spec},
    }
