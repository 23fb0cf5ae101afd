"""The `kubernetes` and `modelarts` parts of a job: what `clusterctl submit` asks these platforms for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from clusterctl.document import Section
from clusterctl.errors import did_you_mean
from clusterctl.inventory.cluster import KINDS, MAX_DEVICES

CHIPS = ("a2", "a3")
CODE_CHOICES = ("configmap", "image")
# A quantity of Kubernetes, such as 32, 500m, 64Gi.
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?\Z")
# A label of DNS (RFC 1123), as names of objects are.
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")


@dataclass(frozen=True)
class KubernetesOptions:
    """What a job asks a Kubernetes cluster for."""

    nodes: int = 1
    """Number of pods, each on another node."""
    devices: int = 1
    """Devices of each pod, and so ranks."""
    kind: str = "cpu"
    """cpu, cuda or npu."""
    chip: str = "a2"
    """Ascend hardware, for node labels: a2 or a3."""
    namespace: str = "default"
    image: str = ""
    """Default: the image of `container`."""
    cpus: str = ""
    """Processors of each pod, such as 32."""
    memory: str = ""
    """Memory of each pod, such as 256Gi."""
    shared_memory: str = "16Gi"
    """Size of /dev/shm, through which the ranks of a pod exchange data."""
    grace: int = 0
    """Seconds between SIGTERM and SIGKILL of a pod. Default: 30 more than the job's `grace`."""
    retries: int = 0
    """How often all pods are started again after a failure; not with kind `job`."""
    queue: str = "default"
    """Queue of Volcano."""
    code: str = "configmap"
    """Where the code comes from: configmap (below 1 MiB), or image (`code` is a folder of the image)."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime of a TrainJob."""
    service_account: str = ""
    secret: str = ""
    """The Secret with a key for each variable of `forward`: no value of it is written into a manifest."""
    pull_secret: str = ""
    """The Secret for the registry of the image."""
    claims: Mapping[str, str] = field(default_factory=dict, hash=False)
    """PersistentVolumeClaims and where they are mounted."""
    node_selector: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class ModelArtsOptions:
    """What a job asks ModelArts for."""

    nodes: int = 1
    devices: int = 8
    """Devices of a node of this flavor."""
    flavor: str = ""
    """Such as modelarts.bm.npu.arm.8snt9b.d."""
    pool: str = ""
    """Id of a dedicated resource pool; "" uses the public one."""
    image: str = ""
    """Path of the image in SWR. Default: the image of `container`."""
    code: str = ""
    """OBS folder with the code and the job file: obs://bucket/code/"""
    outputs: Mapping[str, str] = field(default_factory=dict, hash=False)
    """OBS folders for results, by the folder of the container."""
    inputs: Mapping[str, str] = field(default_factory=dict, hash=False)
    """OBS folders with data, by the folder of the container."""
    log: str = ""
    """OBS folder for logs."""


def read_kubernetes(top: Section) -> KubernetesOptions | None:
    """Return the `kubernetes` part of a job, or None if it has none."""
    inner = top.section("kubernetes")
    if top.value.get("kubernetes") is None:
        return None
    found = KubernetesOptions(**_values(inner, KubernetesOptions()))  # type: ignore[arg-type]
    _check_counts(inner, found.nodes, found.devices)
    for key, choices in (("kind", KINDS), ("chip", CHIPS), ("code", CODE_CHOICES)):
        value = getattr(found, key)
        if value not in choices:
            near = did_you_mean(value, choices) or f"one of {', '.join(choices)}"
            inner.fault(key, f"unknown {key} {value!r}", near)
    for key in ("cpus", "memory", "shared_memory"):
        value = getattr(found, key)
        if value and not QUANTITY.match(value):
            inner.fault(key, f"{value!r} is not a quantity", "as in 32 or 64Gi")
    for key in ("namespace", "service_account", "secret", "pull_secret", "queue", "runtime"):
        value = getattr(found, key)
        if value and not LABEL.match(value):
            inner.fault(key, f"{value!r} is not a name of Kubernetes", "small letters, digits and '-'")
    for claim, folder in found.claims.items():
        if not LABEL.match(claim) or not folder.startswith("/"):
            inner.fault("claims", f"{claim}: {folder} is not a claim and a folder", "as in data: /data")
    inner.done()
    return found


def code_in_image(top: Section) -> bool:
    """Return whether `code` is a folder of the image, which this machine need not have."""
    part = top.value.get("kubernetes")
    found = isinstance(part, dict) and part.get("code") == "image"
    if found:
        top.take_text("code")
    return found


def read_modelarts(top: Section) -> ModelArtsOptions | None:
    """Return the `modelarts` part of a job, or None if it has none."""
    inner = top.section("modelarts")
    if top.value.get("modelarts") is None:
        return None
    found = ModelArtsOptions(**_values(inner, ModelArtsOptions()))  # type: ignore[arg-type]
    _check_counts(inner, found.nodes, found.devices)
    for key in ("flavor", "code"):
        if not getattr(found, key):
            example = "modelarts.bm.npu.arm.8snt9b.d" if key == "flavor" else "obs://bucket/code/"
            inner.fault(key, f"{key!r} is missing", f"as in {example}")
    for key in ("code", "log"):
        value = getattr(found, key)
        if value and not value.startswith("obs://"):
            inner.fault(key, f"{value!r} is not a folder of OBS", "as in obs://bucket/folder/")
    for key in ("inputs", "outputs"):
        for folder, url in getattr(found, key).items():
            if not folder.startswith("/") or not url.startswith("obs://"):
                inner.fault(key, f"{folder}: {url}", "as in /data: obs://bucket/data/")
    inner.done()
    return found


def _check_counts(inner: Section, nodes: int, devices: int) -> None:
    if not 1 <= nodes <= 10_000:
        inner.fault("nodes", f"{nodes} nodes", "1 to 10,000")
    if not 1 <= devices <= MAX_DEVICES:
        inner.fault("devices", f"{devices} devices", f"1 to {MAX_DEVICES}")


def _values(inner: Section, plain: object) -> dict[str, object]:
    """Return the value of each field, of the type of its default."""
    found: dict[str, object] = {}
    for each in fields(plain):  # type: ignore[arg-type]
        default = getattr(plain, each.name)
        if isinstance(default, int):
            found[each.name] = inner.take(each.name, int, default)
        elif isinstance(default, str):
            found[each.name] = inner.take_text(each.name, default)
        else:
            part = inner.section(each.name)
            found[each.name] = {name: part.take_text(name) for name in part.value}
    return found
