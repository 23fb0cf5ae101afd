"""The `kubernetes` and `modelarts` parts of a job: what `clusterctl submit` asks these platforms for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from clusterctl.inventory.cluster import KINDS, MAX_DEVICES
from clusterctl.wire.fields import Checked, Problem, setting

# A quantity of Kubernetes, such as 32, 500m, 64Gi.
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
# A label of DNS (RFC 1123), as names of objects are.
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def quantity(default: str = "") -> str:
    """Return the setting of a quantity."""
    form = {"type": ["string", "number"]}
    found: str = setting(default, pattern=QUANTITY, noun="a quantity", example="as in 32 or 64Gi", form=form)
    return found


def name(default: str = "") -> str:
    """Return the setting of a name of an object."""
    remedy = "small letters, digits and '-'"
    found: str = setting(default, pattern=LABEL, noun="a name of Kubernetes", example=remedy)
    return found


def of_obs(required: bool = False) -> str:
    """Return the setting of a folder in OBS."""
    form = re.compile("obs://.*")
    found: str = setting(
        "", pattern=form, noun="a folder of OBS", example="as in obs://bucket/folder/", required=required
    )
    return found


@dataclass(frozen=True)
class KubernetesOptions(Checked):
    """What a job asks a Kubernetes cluster for."""

    nodes: int = setting(1, least=1, most=10_000)
    """Number of pods, each on another node."""
    devices: int = setting(1, least=1, most=MAX_DEVICES)
    """Devices of each pod, and so ranks."""
    kind: str = setting("cpu", choices=KINDS)
    """Kind of the devices."""
    chip: str = setting("a2", choices=("a2", "a3"))
    """Ascend hardware, for the labels of nodes."""
    namespace: str = name("default")
    """Namespace of the objects."""
    image: str = setting("")
    """Image of the pods. Default: the image of `container`."""
    cpus: str = quantity()
    """Processors of each pod."""
    memory: str = quantity()
    """Memory of each pod: 256Gi."""
    shared_memory: str = quantity("16Gi")
    """Size of /dev/shm, through which the ranks of a pod exchange data."""
    grace: int | None = setting(None, least=1)
    """Seconds between SIGTERM and SIGKILL of a pod. Default: 30 more than the job's grace."""
    retries: int = setting(0, least=0)
    """How often all pods are restarted; not with kind `job`."""
    queue: str = name("default")
    """Queue of Volcano."""
    code: str = setting("configmap", choices=("configmap", "image"))
    """configmap: in a ConfigMap, below 1 MiB. image: `code` is a folder of the image."""
    runtime: str = name("torch-distributed")
    """ClusterTrainingRuntime of a TrainJob."""
    service_account: str = name()
    """ServiceAccount of the pods."""
    secret: str = name()
    """Secret with a key for each variable of `forward`: no value of it is written into a manifest."""
    pull_secret: str = name()
    """Secret for the registry of the image."""
    claims: Mapping[str, str] = setting(factory=dict)
    """PersistentVolumeClaims and where they are mounted: {data: /data}."""
    node_selector: Mapping[str, str] = setting(factory=dict)
    """Labels that the nodes must have."""

    def problems(self) -> Iterator[Problem]:
        for claim, folder in self.claims.items():
            if not LABEL.fullmatch(claim) or not folder.startswith("/"):
                yield "claims", f"{claim}: {folder} is not a claim and a folder", "as in data: /data"


@dataclass(frozen=True)
class ModelArtsOptions(Checked):
    """What a job asks ModelArts for."""

    nodes: int = setting(1, least=1, most=10_000)
    """How many nodes."""
    devices: int = setting(8, least=1, most=MAX_DEVICES)
    """Devices of a node of this flavor."""
    flavor: str = setting("", required=True, example="as in modelarts.bm.npu.arm.8snt9b.d")
    """Flavor of the nodes."""
    pool: str = setting("")
    """Id of a dedicated resource pool. Default: the public one."""
    image: str = setting("")
    """Path of the image in SWR. Default: the image of `container`."""
    code: str = of_obs(required=True)
    """OBS folder with the code and the job file."""
    outputs: Mapping[str, str] = setting(factory=dict)
    """OBS folders for results, by the folder in the container."""
    inputs: Mapping[str, str] = setting(factory=dict)
    """OBS folders with data, by the folder in the container."""
    log: str = of_obs()
    """OBS folder for logs."""

    def problems(self) -> Iterator[Problem]:
        for key in ("inputs", "outputs"):
            for folder, url in getattr(self, key).items():
                if not folder.startswith("/") or not url.startswith("obs://"):
                    yield key, f"{folder}: {url}", "as in /data: obs://bucket/data/"
