"""Submit, follow and delete a job in a Kubernetes cluster, through its official Python client."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl import extras
from clusterctl.backends.pods.kinds import KINDS, manifests_of
from clusterctl.backends.pods.manifests import JOB_LABEL, RESOURCES
from clusterctl.backends.pods.request import PodRequest
from clusterctl.environment import environment
from clusterctl.errors import ClusterctlError, Fault, InputFaults, RunFailed, UsageError
from clusterctl.json_types import JsonObject

# Seconds between two queries of a job.
POLL = 2.0
# Seconds for the API server to connect, and between two pieces of its answer.
ANSWER_LIMIT = 60.0
# Bytes of a pod's log; by default a kubelet keeps 10 MB of it.
MOST_LOG = 256 << 20
# Reasons of a waiting container for which waiting longer does not help.
NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
NOT_RUNNABLE = ("CreateContainerError", "CreateContainerConfigError", "RunContainerError", "StartError")
PARTS = "the image needs Python 3.10 with clusterctl on the path; a training also needs clusterctl[train]"
# Exit codes of a container whose command does not exist or cannot be run.
NO_COMMAND = (126, 127, 128)


@dataclass(frozen=True)
class PodState:
    """The state of one pod in the API."""

    name: str
    phase: str
    reason: str = ""
    """Why it waits, or why it ended."""
    exit_code: int | None = None
    fatal: bool = False
    """Whether waiting longer does not help."""

    def describe(self) -> str:
        """Return the state in one line."""
        code = f", exit code {self.exit_code}" if self.exit_code else ""
        return f"{self.name}: {self.phase}{code}" + (f" ({self.reason})" if self.reason else "")


class KubernetesError(ClusterctlError):
    """The API server refused a request, or could not be reached."""

    exit_code = 3

    def __init__(self, message: str, hint: str = "", status: int = 0) -> None:
        super().__init__(message, hint)
        self.status = status


def connect() -> Any:
    """Return a client of the cluster that kubectl uses here, or of the one that this pod runs in."""
    try:
        import kubernetes
    except ImportError:
        hint = f"{extras.command('kubernetes')}\nor hand the output of --print to kubectl apply -f -"
        raise UsageError("the Kubernetes client is not installed here", hint) from None
    config: Any = kubernetes.config
    # The client reads this variable once, when it is imported.
    file = environment().get("KUBECONFIG")
    try:
        # Its own choice between the two prints a warning to standard output.
        if file or Path("~/.kube/config").expanduser().exists():
            config.load_kube_config(**({"config_file": file} if file else {}))
        else:
            config.load_incluster_config()
    except (config.ConfigException, OSError) as problem:
        reason = (
            f"{file}: {problem}" if file else f"there is no ~/.kube/config, and this is no pod ({problem})"
        )
        remedy = "set KUBECONFIG to the file that kubectl uses, or hand the output of --print to kubectl apply -f -"
        raise UsageError(f"no Kubernetes cluster is configured: {reason}", remedy) from None
    # The client logs nothing by itself; its retries would hide a server that is down.
    settings = kubernetes.client.Configuration.get_default_copy()
    settings.retries = False
    if environment().get("no_proxy"):
        settings.no_proxy = environment()["no_proxy"]

    class Client(kubernetes.client.ApiClient):
        """The Kubernetes client with a timeout for each request; by default it waits forever."""

        def call_api(self, *arguments: Any, **options: Any) -> Any:
            options["_request_timeout"] = options.get("_request_timeout") or ANSWER_LIMIT
            return super().call_api(*arguments, **options)

    return Client(settings)


@contextlib.contextmanager
def _explained(subject: str) -> Iterator[None]:
    """Convert errors of the client into ours, with the request, the server's answer and a remedy."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as refused:
        raise KubernetesError(
            f"{subject}: {_message(refused)}", _remedy(refused.status), refused.status
        ) from None
    except HTTPError as problem:
        raise KubernetesError(
            f"{subject}: the API server does not answer: {problem}", "kubectl get nodes"
        ) from None


def _message(refused: Any) -> str:
    try:
        body = json.loads(refused.body or "{}")
        return str(body.get("message") or refused.reason)
    except (ValueError, AttributeError):
        return str(refused.reason)


def _remedy(status: int) -> str:
    return {
        401: "the credentials of the kubeconfig were refused: log in again",
        403: "ask for a role that may do this in the namespace",
        404: "is the kind installed in this cluster (kubectl api-resources)?",
        409: "it exists already: give another --name, or delete it with --delete",
    }.get(status, "")


class JobApi:
    """One job in a cluster."""

    def __init__(self, client: Any, kind: str, namespace: str, name: str) -> None:
        from kubernetes import client as api

        self.kind, self.namespace, self.name = KINDS[kind], namespace, name
        # The client's own types name objects, and we send plain values.
        self._core: Any = api.CoreV1Api(client)
        self._jobs: Any = api.CustomObjectsApi(client)

    @property
    def _path(self) -> tuple[str, str, str, str]:
        return self.kind.group, self.kind.version, self.namespace, self.kind.plural

    def require_room(self, request: PodRequest) -> str:
        """Raise InputFaults if the cluster has too few nodes; return a note if this user may not list them."""
        options = request.options
        resource = RESOURCES.get(options.kind)
        try:
            with _explained("nodes"):
                nodes = self._core.list_node().items
        except KubernetesError as error:
            if error.status == 403:
                return "the nodes may not be listed, so it was not checked whether the job fits"
            raise
        free = [
            node for node in nodes if not node.spec.unschedulable and _selected(node, options.node_selector)
        ]
        sizes = [int((node.status.allocatable or {}).get(resource, 0)) for node in free] if resource else None
        fitting = len(free) if sizes is None else sum(size >= options.devices for size in sizes)
        if fitting >= options.nodes:
            return ""
        demand = f"{options.nodes} nodes" + (f" with {options.devices} {resource}" if resource else "")
        has = f"{fitting} of {len(nodes)} nodes can be used"
        fault = Fault("kubernetes.nodes", f"the job asks for {demand}, and {has}", "fewer nodes or devices")
        raise InputFaults([fault])

    def submit(self, request: PodRequest) -> list[str]:
        """Create all objects of a job; if one is refused, delete those that were created. Return their names."""
        created: list[str] = []
        try:
            for manifest in manifests_of(request):
                name = f"{manifest['kind']} {manifest['metadata']['name']}"
                with _explained(name):
                    self._create(manifest)
                created.append(name)
        except BaseException:
            self._delete_named(created)
            raise
        return created

    def _create(self, manifest: JsonObject) -> None:
        if manifest["apiVersion"] == "v1" and manifest["kind"] == "ConfigMap":
            self._core.create_namespaced_config_map(self.namespace, manifest)
        elif manifest["apiVersion"] == "v1":
            self._core.create_namespaced_service(self.namespace, manifest)
        else:
            self._jobs.create_namespaced_custom_object(*self._path, manifest)

    def delete(self) -> list[str]:
        """Delete the job, its pods and all objects that were created for it; return the deleted objects."""
        label = f"{JOB_LABEL}={self.name}"
        with _explained(f"the objects of {self.name}"):
            maps = self._core.list_namespaced_config_map(self.namespace, label_selector=label).items
            services = self._core.list_namespaced_service(self.namespace, label_selector=label).items
        named = [f"{self.kind.name} {self.name}"]
        named += [f"ConfigMap {entry.metadata.name}" for entry in maps]
        named += [f"Service {entry.metadata.name}" for entry in services]
        return self._delete_named(named)

    def _delete_named(self, names: Sequence[str]) -> list[str]:
        deleted = []
        for entry in names:
            kind, _, name = entry.partition(" ")
            try:
                with _explained(entry):
                    if kind == "ConfigMap":
                        self._core.delete_namespaced_config_map(name, self.namespace)
                    elif kind == "Service":
                        self._core.delete_namespaced_service(name, self.namespace)
                    else:
                        # Foreground: the pods are gone before the job is.
                        self._jobs.delete_namespaced_custom_object(
                            *self._path, name, propagation_policy="Foreground"
                        )
                deleted.append(entry)
            except KubernetesError as error:
                if error.status != 404:
                    raise
        return deleted

    def pods(self) -> list[PodState]:
        """Return the pods of the job in the order of their names."""
        with _explained(f"the pods of {self.name}"):
            found = self._core.list_namespaced_pod(self.namespace, label_selector=f"{JOB_LABEL}={self.name}")
        return sorted((_pod_state(pod) for pod in found.items), key=lambda pod: pod.name)

    def ended(self) -> tuple[str, str]:
        """Return `done` or `failed` and the platform's reason; two empty texts while the job runs."""
        with _explained(f"{self.kind.name} {self.name}"):
            job = self._jobs.get_namespaced_custom_object(*self._path, self.name)
        status = job.get("status") or {}
        phase = (
            str((status.get("state") or {}).get("phase", "")) if isinstance(status.get("state"), dict) else ""
        )
        conditions = {
            str(entry.get("type")): str(entry.get("message") or entry.get("reason") or "")
            for entry in status.get("conditions") or ()
            if entry.get("status") == "True"
        }
        if phase:
            conditions[phase] = str(status["state"].get("message") or "")
        for outcome, names in (("failed", self.kind.failed), ("done", self.kind.done)):
            for name in names:
                if name in conditions:
                    return outcome, conditions[name]
        return "", ""

    def log_lines(self, pod: str, after: str) -> list[tuple[str, str]]:
        """Return the lines of a pod since the time of the last known line, each with its time."""
        from kubernetes.client.exceptions import ApiException

        try:
            text = self._core.read_namespaced_pod_log(
                pod, self.namespace, timestamps=True, limit_bytes=MOST_LOG
            )
        except ApiException as refused:
            if refused.status in (400, 404):
                # The container has not started yet, or the pod is gone.
                return []
            raise KubernetesError(f"the log of {pod}: {_message(refused)}", _remedy(refused.status)) from None
        lines = [line.partition(" ") for line in str(text).splitlines()]
        return [(stamp, words) for stamp, _, words in lines if stamp > after]


def _selected(node: Any, wanted: Any) -> bool:
    present = node.metadata.labels or {}
    return all(present.get(key) == value for key, value in wanted.items())


def _pod_state(pod: Any) -> PodState:
    status = pod.status
    name, phase = str(pod.metadata.name), str(status.phase)
    for container in status.container_statuses or ():
        waiting, ended = container.state.waiting, container.state.terminated
        if waiting is not None and waiting.reason in (*NO_IMAGE, *NOT_RUNNABLE):
            text = f"{waiting.reason}: {waiting.message}" if waiting.message else str(waiting.reason)
            return PodState(name, phase, text, fatal=True)
        if ended is not None:
            reason = str(ended.message or ended.reason or "").strip()
            return PodState(name, phase, "" if reason == "Completed" else reason[:300], ended.exit_code)
    unscheduled = next(
        (
            str(entry.message)
            for entry in status.conditions or ()
            if entry.type == "PodScheduled" and entry.message
        ),
        "",
    )
    return PodState(name, phase, unscheduled or str(status.reason or ""))


def follow(job: JobApi) -> Iterator[str]:
    """Yield changes of a job and the output of its first pod until the job has ended; raise RunFailed if it failed."""
    shown: dict[str, str] = {}
    stamp = ""
    while True:
        outcome, reason = job.ended()
        pods = job.pods()
        for pod in pods:
            if shown.get(pod.name) != pod.describe():
                shown[pod.name] = pod.describe()
                yield pod.describe()
        if pods:
            lines = job.log_lines(pods[0].name, stamp)
            stamp = lines[-1][0] if lines else stamp
            yield from (f"{pods[0].name} | {text}" for _, text in lines)
        stuck = next((pod for pod in pods if pod.fatal), None)
        if stuck is not None:
            raise RunFailed(f"{stuck.name} cannot start: {stuck.reason}", PARTS)
        if outcome == "failed":
            raise RunFailed(cause_of(pods, reason), _hint(pods))
        if outcome == "done":
            return
        time.sleep(POLL)


def cause_of(pods: Sequence[PodState], reason: str) -> str:
    """Return why a job failed: the first pod with its own exit code, else the platform's reason."""
    failed = [pod for pod in pods if pod.exit_code]
    # 143: ended by SIGTERM, because another one had failed.
    own = [pod for pod in failed if pod.exit_code != 143] or failed
    return own[0].describe() if own else reason or "the platform gave no reason"


def _hint(pods: Sequence[PodState]) -> str:
    return PARTS if any(pod.exit_code in NO_COMMAND for pod in pods) else "kubectl logs shows the other pods"
