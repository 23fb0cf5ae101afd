"""The parts of a job for other programs that manage machines: what `clusterctl submit` asks each of them for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from clusterctl.inventory.cluster import KINDS, MAX_DEVICES
from clusterctl.wire.fields import Checked, Problem, setting

# Minutes, minutes:seconds, hours:minutes:seconds, and days-hours with any of them.
TIME = re.compile(r"[0-9]+|[0-9]+:[0-9]{1,2}|[0-9]+:[0-9]{1,2}:[0-9]{1,2}|[0-9]+-[0-9]+(?::[0-9]{1,2}){0,2}")
# A word of a line of a batch file: no space and no line break can begin another option.
WORD = re.compile(r"[^\s#'\"\\]+")
LINE = re.compile(r"[^\n]*")


def word() -> str:
    """Return the setting of one word of a batch file's option; empty texts leave the cluster's default."""
    found: str = setting("", pattern=WORD, noun="one word", example="leave out spaces and quotes")
    return found


def lines() -> tuple[str, ...]:
    """Return the setting of a list of lines."""
    found: tuple[str, ...] = setting((), pattern=LINE, noun="one line of text", example="a list of lines")
    return found


@dataclass(frozen=True)
class QueueOptions(Checked):
    """What a job asks a batch system for; empty texts leave the cluster's default."""

    nodes: int = setting(1, least=1)
    """How many nodes."""
    time: str = setting(
        "",
        pattern=TIME,
        noun="a time",
        example="as in 90 (minutes), 12:00:00 or 2-00",
        form={"type": ["string", "integer"]},
    )
    """Time limit: minutes, hours:minutes:seconds or days-hours."""
    requeue: bool = setting(True)
    """Save and wait for nodes again before the time limit or on preemption."""
    signal: int = setting(120, least=0)
    """Seconds before the time limit at which the run saves. The batch system may be up to a minute early."""
    extra: tuple[str, ...] = lines()
    """More options of the batch file, one per line."""
    setup: tuple[str, ...] = lines()
    """Shell lines of the batch file before the run starts: module load cann."""


def extra_problems(
    part: str,
    program: str,
    extra: tuple[str, ...],
    option: re.Pattern[str],
    keys: Mapping[str, str],
    needed: Collection[str],
    example: str,
) -> Iterator[Problem]:
    """Yield what is wrong in `extra`: what is no option, what is a key of the part, and what the run sets itself."""
    for text in extra:
        name = option.match(text)
        if name is None:
            yield "extra", f"{text[:80]!r} is not an option of {program}", f"as in {example}"
        elif name[0] in keys:
            yield "extra", f"{text[:80]!r} is a key of this part", f"{part}: {{{keys[name[0]]}: ...}}"
        elif name[0] in needed:
            yield "extra", f"{text[:80]!r}: the run needs its own {name[0]}", "leave it out"


def minutes_of(time: str) -> float:
    """Return the minutes of a time."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return (int(days) * 24 + hours) * 60 + minutes + seconds / 60
    if len(parts) == 3:
        return parts[0] * 60 + parts[1] + parts[2] / 60
    return parts[0] + (parts[1] / 60 if len(parts) == 2 else 0)


# One kind of devices: NAME, NAME:COUNT or NAME:TYPE:COUNT, and others after a comma.
GRES = re.compile(
    r"[\w-]+(?::[\w.-]+)?(?::[0-9]+[KMG]?)?(?:,[\w-]+(?::[\w.-]+)?(?::[0-9]+[KMG]?)?)*\Z", re.ASCII
)
DEVICES = ("gpu", "npu")
# Options of sbatch that are keys of this part, or of the job, and those that the run itself needs.
GIVEN = {
    **dict.fromkeys(("--nodes", "-N"), "nodes"),
    **dict.fromkeys(("--partition", "-p"), "partition"),
    **dict.fromkeys(("--account", "-A"), "account"),
    **dict.fromkeys(("--qos", "-q"), "qos"),
    **dict.fromkeys(("--constraint", "-C"), "constraint"),
    **dict.fromkeys(("--exclude", "-x"), "exclude"),
    **dict.fromkeys(("--cpus-per-task", "-c"), "cpus"),
    **dict.fromkeys(("--time", "-t"), "time"),
    **dict.fromkeys(("--requeue", "--no-requeue"), "requeue"),
    "--gres": "gres",
    "--reservation": "reservation",
    "--signal": "signal",
}
NEEDED = {
    "--job-name",
    "-J",
    "--output",
    "-o",
    "--open-mode",
    "--ntasks-per-node",
    "--ntasks",
    "-n",
    "--array",
    "-a",
}
NEEDED |= {"--wrap", "--test-only", "--parsable"}
LONG_OPTION = re.compile(r"--[a-z-]+|-[A-Za-z]")


@dataclass(frozen=True)
class SlurmOptions(QueueOptions):
    """What a job asks Slurm for; empty texts leave the cluster's default."""

    partition: str = word()
    """Partition. Default: the cluster's."""
    account: str = word()
    """Account that is charged."""
    qos: str = word()
    """Quality of service."""
    gres: str = word()
    """Devices of each node in Slurm's words: npu:8, gpu:4."""
    constraint: str = word()
    """Features that the nodes must have."""
    reservation: str = word()
    """Reservation to use."""
    exclude: str = word()
    """Nodes to leave out: node[3-4]."""
    cpus: int | None = setting(None, least=1)
    """Processor cores of each node. Default: the cluster's."""
    extra: tuple[str, ...] = lines()
    """More options of sbatch: --mem=0, --exclusive."""

    def problems(self) -> Iterator[Problem]:
        if fault := _gres_fault(self.gres):
            yield "gres", fault, "NAME:COUNT, as in npu:8 or gpu:a100:4"
        yield from extra_problems(
            "slurm", "sbatch", self.extra, LONG_OPTION, GIVEN, NEEDED, "--mem=0 or --exclusive"
        )


def _gres_fault(gres: str) -> str:
    """Return what is wrong with the devices that a job asks for; "" if nothing is."""
    if not gres:
        return ""
    if not GRES.match(gres):
        return f"{gres[:80]!r} names no devices of Slurm"
    name, *rest = gres.partition(",")[0].split(":")
    if rest and rest[-1].isdecimal() and not int(rest[-1]):
        return f"{gres[:80]!r} asks for no device"
    # The plan needs the number of ranks.
    counted = not rest or rest[-1].isdecimal()
    return f"{gres[:80]!r} gives no number of devices" if name in DEVICES and not counted else ""


OPTION = re.compile(r"-[A-Za-z_]+")


@dataclass(frozen=True)
class HostOptions(QueueOptions):
    """What a job asks a batch system for that names the hosts of a job, and not their devices."""

    queue: str = word()
    """Queue. Default: the cluster's."""
    project: str = word()
    """Project that is charged."""
    devices: int = setting(1, least=1, most=MAX_DEVICES)
    """Devices of each node, so ranks of each node. `resources` asks for them."""
    kind: str = setting("cpu", choices=KINDS)
    """Kind of the devices: cpu, cuda or npu."""
    resources: str = word()
    """What each node must have, in the words of the batch system."""


@dataclass(frozen=True)
class SgeOptions(HostOptions):
    """What a job asks Grid Engine for."""

    pe: str = word()
    """Parallel environment, with control_slaves TRUE. `qconf -spl` lists them; needed for more than one node."""
    slots: int = setting(1, least=1)
    """Slots of each node: the allocation_rule of the parallel environment."""
    extra: tuple[str, ...] = lines()
    """More options of qsub: -p -100."""

    def problems(self) -> Iterator[Problem]:
        if self.nodes > 1 and not self.pe:
            yield "pe", f"{self.nodes} nodes need a parallel environment", "pe: NAME; `qconf -spl` lists them"
        keys = {"-pe": "pe", "-q": "queue", "-P": "project", "-l": "resources", "-r": "requeue"}
        needed = {"-N", "-o", "-e", "-j", "-cwd", "-wd", "-V", "-notify", "-t", "-terse", "-sync", "-S", "-w"}
        yield from extra_problems("sge", "qsub", self.extra, OPTION, keys, needed, "-p -100")


@dataclass(frozen=True)
class PbsOptions(HostOptions):
    """What a job asks PBS for."""

    extra: tuple[str, ...] = lines()
    """More options of qsub: -p 100."""

    def problems(self) -> Iterator[Problem]:
        keys = {"-q": "queue", "-P": "project", "-r": "requeue"}
        needed = {"-N", "-o", "-e", "-j", "-V", "-J", "-W", "-z", "-I", "-S"}
        yield from extra_problems("pbs", "qsub", self.extra, OPTION, keys, needed, "-p 100")


@dataclass(frozen=True)
class LsfOptions(HostOptions):
    """What a job asks LSF for."""

    extra: tuple[str, ...] = lines()
    """More options of bsub: -x."""

    def problems(self) -> Iterator[Problem]:
        keys = {"-n": "nodes", "-q": "queue", "-P": "project", "-R": "resources", "-W": "time"}
        keys |= {"-r": "requeue", "-rn": "requeue"}
        needed = {"-J", "-o", "-oo", "-e", "-eo", "-I", "-Is", "-K", "-cwd"}
        yield from extra_problems("lsf", "bsub", self.extra, OPTION, keys, needed, "-x")


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


@dataclass(frozen=True, kw_only=True)
class Platforms(Checked):
    """The keys of a job for batch systems and platforms; each has the name of its backend or platform."""

    slurm: SlurmOptions | None = setting(None)
    """What `clusterctl submit slurm` asks Slurm for."""
    sge: SgeOptions | None = setting(None)
    """What `clusterctl submit sge` asks Grid Engine for."""
    pbs: PbsOptions | None = setting(None)
    """What `clusterctl submit pbs` asks PBS for."""
    lsf: LsfOptions | None = setting(None)
    """What `clusterctl submit lsf` asks LSF for."""
    kubernetes: KubernetesOptions | None = setting(None)
    """What `clusterctl submit k8s` asks Kubernetes for."""
    modelarts: ModelArtsOptions | None = setting(None)
    """What `clusterctl submit modelarts` asks ModelArts for."""

    @property
    def in_pods(self) -> bool:
        """Whether the job can be submitted to a platform that starts its pods."""
        return bool(self.kubernetes or self.modelarts)

    @property
    def in_image(self) -> bool:
        """Whether `code` is a folder of the image of the pods."""
        return self.kubernetes is not None and self.kubernetes.code == "image"


def has_code_in_image(raw: Mapping[str, object]) -> bool:
    """Return whether a job file says that `code` is a folder of the image, which this machine need not have."""
    part = raw.get("kubernetes")
    return isinstance(part, Mapping) and part.get("code") == "image"
