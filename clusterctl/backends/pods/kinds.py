"""Write the manifest of each kind of job that Kubernetes clusters have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clusterctl.backends.pods import manifests
from clusterctl.backends.pods.request import PodRequest
from clusterctl.json_types import JsonObject
from clusterctl.wire import contract

# The path at which ascend-operator's table must be mounted, and the key of its ConfigMap.
TABLE_FOLDER = "/user/serverid/devindex/config"
TABLE_FILE = "hccl.json"
# Labels of nodes by the Ascend hardware, as mind-cluster sets them.
ACCELERATORS = {"a2": "module-910b-8", "a3": "module-a3-16-super-pod"}
RING = {"ring-controller.atlas": "ascend-910b"}


@dataclass(frozen=True)
class Kind:
    """A kind of job: its API path, its manifest, and how its status reports the end."""

    name: str
    title: str
    group: str
    version: str
    plural: str
    spec: Callable[[PodRequest], dict[str, object]]
    done: tuple[str, ...]
    """The condition, or the phase, of a job that has succeeded."""
    failed: tuple[str, ...]
    others: Callable[[PodRequest], list[JsonObject]] = lambda request: []
    """Objects that must exist before the job."""
    metadata: Callable[[PodRequest], JsonObject] = manifests.metadata


def manifests_of(request: PodRequest) -> list[JsonObject]:
    """Return all objects of a job, in the order in which they are created; the job itself is the last."""
    kind = KINDS[request.kind]
    job = {
        "apiVersion": f"{kind.group}/{kind.version}",
        "kind": kind.title,
        "metadata": kind.metadata(request),
        "spec": kind.spec(request),
    }
    return [manifests.config_map(request), *kind.others(request), job]


def _job(request: PodRequest) -> dict[str, object]:
    spec = manifests.pod_spec(request, manifests.container(request, "node"))
    return {
        **_indexed(request),
        "template": manifests.pod_template(request, {**spec, "subdomain": request.service}),
    }


def _indexed(request: PodRequest) -> dict[str, object]:
    """Return how an Indexed Job runs one pod for each node, all of them at once."""
    count = request.options.nodes
    return {"completionMode": "Indexed", "completions": count, "parallelism": count, "backoffLimit": 0}


def _jobset(request: PodRequest) -> dict[str, object]:
    set_name = [{"name": "JOBSET_NAME", "value": request.name}]
    spec = manifests.pod_spec(request, manifests.container(request, "node", set_name))
    replicated = {
        "name": "node",
        "replicas": 1,
        "template": {"spec": {**_indexed(request), "template": manifests.pod_template(request, spec)}},
    }
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": request.options.retries, "restartStrategy": "BlockingRecreate"},
        "replicatedJobs": [replicated],
    }


def _trainjob(request: PodRequest) -> dict[str, object]:
    """Return a TrainJob; settings of the pods that it cannot express are a patch of its runtime."""
    options = request.options
    spec = manifests.pod_spec(request, {})
    patched = {
        key: value
        for key, value in spec.items()
        if key not in ("restartPolicy", "automountServiceAccountToken", "containers")
    }
    patched["containers"] = [{"name": "node", "volumeMounts": manifests.mounts(request)}]
    labelled = {"labels": manifests.labels(request)}
    inner = {"name": "node", "template": {"spec": {"template": {"metadata": labelled, "spec": patched}}}}
    trainer: JsonObject = {
        "numNodes": options.nodes,
        "numProcPerNode": options.devices,
        "image": request.image,
        "command": list(manifests.COMMAND),
        "env": manifests.environment(request, peers=False),
    }
    resources = manifests.resources(request)
    if resources:
        trainer["resourcesPerNode"] = resources
    patch = {
        "manager": "clusterctl.io/submit",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [inner]}}},
    }
    reference = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": options.runtime,
    }
    return {"runtimeRef": reference, "trainer": trainer, "runtimePatches": [patch]}


def _vcjob(request: PodRequest) -> dict[str, object]:
    options = request.options
    spec = manifests.pod_spec(request, manifests.container(request, "node"))
    again = "RestartJob" if options.retries else "AbortJob"
    policies = [
        {"event": "PodFailed", "action": again},
        {"event": "PodEvicted", "action": again},
        {"event": "TaskCompleted", "action": "CompleteJob"},
    ]
    task = {"name": "worker", "replicas": options.nodes, "template": manifests.pod_template(request, spec)}
    return {
        "schedulerName": "volcano",
        "queue": options.queue,
        # All pods are scheduled together, or none.
        "minAvailable": options.nodes,
        "maxRetry": options.retries or 1,
        "plugins": {"svc": ["--publish-not-ready-addresses=true"], "env": []},
        "policies": policies,
        "tasks": [task],
    }


def _acjob(request: PodRequest) -> dict[str, object]:
    options = request.options
    labels = RING if options.kind == "npu" else None
    template = manifests.pod_template(request, _ascend_pod(request), labels)
    replicas: JsonObject = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": template}}
    if options.nodes > 1:
        replicas["Worker"] = {"replicas": options.nodes - 1, "restartPolicy": "Never", "template": template}
    return {
        "schedulerName": "volcano",
        "runPolicy": {"schedulingPolicy": {"minAvailable": options.nodes, "queue": options.queue}},
        "successPolicy": "AllWorkers",
        "replicaSpecs": replicas,
    }


def _ascend_metadata(request: PodRequest) -> JsonObject:
    options, described = request.options, manifests.metadata(request)
    on_npus = options.kind == "npu"
    described["labels"] |= {"framework": "pytorch", **(RING if on_npus else {})}
    if options.retries:
        described["labels"] |= {
            "fault-scheduling": "grace",
            "fault-retry-times": str(options.retries),
            "pod-rescheduling": "on",
        }
    if on_npus and options.chip == "a3":
        # The number of chips that all pods request together.
        described["annotations"] = {"sp-block": str(options.nodes * options.devices)}
    return described


def _ascend_pod(request: PodRequest) -> JsonObject:
    """Return the pod of an AscendJob; the operator knows the container by its name."""
    if request.options.kind != "npu":
        holder = manifests.container(request, "ascend")
        holder["ports"] = [{"name": "ascendjob-port", "containerPort": 2222}]
        return manifests.pod_spec(request, holder)
    # The annotation has the name of the resource.
    path = f"metadata.annotations['{manifests.RESOURCES['npu']}']"
    visible = {"name": "ASCEND_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": path}}}
    table = {"name": contract.RANK_TABLE_FILE, "value": f"{TABLE_FOLDER}/{TABLE_FILE}"}
    holder = manifests.container(request, "ascend", [visible, table])
    holder["ports"] = [{"name": "ascendjob-port", "containerPort": 2222}]
    holder["volumeMounts"].append({"name": "rank-table", "mountPath": TABLE_FOLDER})
    spec = manifests.pod_spec(request, holder)
    spec["volumes"].append({"name": "rank-table", "configMap": {"name": f"rings-config-{request.name}"}})
    chosen = {"accelerator-type": ACCELERATORS[request.options.chip], **spec.get("nodeSelector", {})}
    return {**spec, "nodeSelector": chosen}


def _rank_table(request: PodRequest) -> list[JsonObject]:
    """Return the ConfigMap that the operator fills with the rank table of NPUs."""
    described = manifests.metadata(request, f"rings-config-{request.name}")
    described["labels"] |= RING
    data = {TABLE_FILE: '{"status": "initializing"}'}
    table = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": described, "data": data}
    return [table] if request.options.kind == "npu" else []


_ROWS = (
    Kind("job", "Job", "batch", "v1", "jobs", _job, ("Complete",), ("Failed",),
         others=lambda request: [manifests.service(request)]),
    Kind("jobset", "JobSet", "jobset.x-k8s.io", "v1alpha2", "jobsets", _jobset, ("Completed",), ("Failed",)),
    Kind("trainjob", "TrainJob", "trainer.kubeflow.org", "v1alpha1", "trainjobs", _trainjob, ("Complete",),
         ("Failed",)),
    Kind("vcjob", "Job", "batch.volcano.sh", "v1alpha1", "jobs", _vcjob, ("Completed",),
         ("Failed", "Aborted", "Terminated")),
    Kind("acjob", "AscendJob", "mindxdl.gitee.com", "v1", "ascendjobs", _acjob, ("Succeeded",), ("Failed",),
         others=_rank_table, metadata=_ascend_metadata),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _ROWS}
