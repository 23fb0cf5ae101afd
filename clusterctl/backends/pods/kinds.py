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
    group: str
    version: str
    plural: str
    write: Callable[[PodRequest], list[JsonObject]]
    done: tuple[str, ...]
    """The condition, or the phase, of a job that has succeeded."""
    failed: tuple[str, ...]


def manifests_of(request: PodRequest) -> list[JsonObject]:
    """Return all objects of a job, in the order in which they are created; the job itself is the last."""
    return [manifests.config_map(request), *KINDS[request.kind].write(request)]


def _job(request: PodRequest) -> list[JsonObject]:
    spec = manifests.pod_spec(request, manifests.container(request, "node"))
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": manifests.metadata(request),
        "spec": {
            **_indexed(request),
            "template": manifests.pod_template(request, {**spec, "subdomain": request.service}),
        },
    }
    return [manifests.service(request), job]


def _indexed(request: PodRequest) -> JsonObject:
    """Return how an Indexed Job runs one pod for each node, all of them at once."""
    count = request.options.nodes
    return {"completionMode": "Indexed", "completions": count, "parallelism": count, "backoffLimit": 0}


def _jobset(request: PodRequest) -> list[JsonObject]:
    set_name = [{"name": "JOBSET_NAME", "value": request.name}]
    spec = manifests.pod_spec(request, manifests.container(request, "node", set_name))
    replicated = {
        "name": "node",
        "replicas": 1,
        "template": {"spec": {**_indexed(request), "template": manifests.pod_template(request, spec)}},
    }
    failure = {"maxRestarts": request.options.retries, "restartStrategy": "BlockingRecreate"}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": manifests.metadata(request),
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": failure,
                "replicatedJobs": [replicated],
            },
        }
    ]


def _trainjob(request: PodRequest) -> list[JsonObject]:
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
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": manifests.metadata(request),
            "spec": {"runtimeRef": reference, "trainer": trainer, "runtimePatches": [patch]},
        }
    ]


def _vcjob(request: PodRequest) -> list[JsonObject]:
    options = request.options
    spec = manifests.pod_spec(request, manifests.container(request, "node"))
    again = "RestartJob" if options.retries else "AbortJob"
    policies = [
        {"event": "PodFailed", "action": again},
        {"event": "PodEvicted", "action": again},
        {"event": "TaskCompleted", "action": "CompleteJob"},
    ]
    task = {"name": "worker", "replicas": options.nodes, "template": manifests.pod_template(request, spec)}
    return [
        {
            "apiVersion": "batch.volcano.sh/v1alpha1",
            "kind": "Job",
            "metadata": manifests.metadata(request),
            "spec": {
                "schedulerName": "volcano",
                "queue": options.queue,
                # All pods are scheduled together, or none.
                "minAvailable": options.nodes,
                "maxRetry": options.retries or 1,
                "plugins": {"svc": ["--publish-not-ready-addresses=true"], "env": []},
                "policies": policies,
                "tasks": [task],
            },
        }
    ]


def _acjob(request: PodRequest) -> list[JsonObject]:
    options = request.options
    spec = _ascend_pod(request)
    on_npus = options.kind == "npu"
    template = manifests.pod_template(request, spec, RING if on_npus else None)
    replicas: JsonObject = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": template}}
    if options.nodes > 1:
        replicas["Worker"] = {"replicas": options.nodes - 1, "restartPolicy": "Never", "template": template}
    described = manifests.metadata(request)
    described["labels"] |= {"framework": "pytorch", **(RING if on_npus else {})}
    if options.retries:
        again = {
            "fault-scheduling": "grace",
            "fault-retry-times": str(options.retries),
            "pod-rescheduling": "on",
        }
        described["labels"] |= again
    if on_npus and options.chip == "a3":
        # The number of chips that all pods request together.
        described["annotations"] = {"sp-block": str(options.nodes * options.devices)}
    job = {
        "apiVersion": "mindxdl.gitee.com/v1",
        "kind": "AscendJob",
        "metadata": described,
        "spec": {
            "schedulerName": "volcano",
            "runPolicy": {"schedulingPolicy": {"minAvailable": options.nodes, "queue": options.queue}},
            "successPolicy": "AllWorkers",
            "replicaSpecs": replicas,
        },
    }
    return [*([_rank_table(request)] if on_npus else []), job]


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


def _rank_table(request: PodRequest) -> JsonObject:
    """Return the ConfigMap that the operator fills with the rank table; it must exist before the job."""
    described = manifests.metadata(request, f"rings-config-{request.name}")
    described["labels"] |= RING
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": described,
        "data": {TABLE_FILE: '{"status": "initializing"}'},
    }


_ROWS = (
    Kind("job", "batch", "v1", "jobs", _job, ("Complete",), ("Failed",)),
    Kind("jobset", "jobset.x-k8s.io", "v1alpha2", "jobsets", _jobset, ("Completed",), ("Failed",)),
    Kind("trainjob", "trainer.kubeflow.org", "v1alpha1", "trainjobs", _trainjob, ("Complete",), ("Failed",)),
    Kind("vcjob", "batch.volcano.sh", "v1alpha1", "jobs", _vcjob, ("Completed",), ("Failed", "Aborted", "Terminated")),
    Kind("acjob", "mindxdl.gitee.com", "v1", "ascendjobs", _acjob, ("Succeeded",), ("Failed",)),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _ROWS}
