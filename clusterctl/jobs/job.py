"""Read job.yaml or a bare command into a Job, and check it against the nodes of a Cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from clusterctl import document as documents
from clusterctl.document import Document, Section
from clusterctl.errors import Fault, InputFaults, UsageError, did_you_mean
from clusterctl.inventory.cluster import (
    Cluster,
    Node,
    named_devices,
    parse_devices,
)
from clusterctl.inventory.container import ContainerOptions, read_container
from clusterctl.inventory.setup import Setup, require_files, take_setup
from clusterctl.jobs.launchers import fill, reader
from clusterctl.jobs.overrides import with_overrides
from clusterctl.jobs.parts.data_source import take_data_store, take_data_there, take_storage
from clusterctl.jobs.parts.engine_file import with_engine_file
from clusterctl.jobs.parts.interconnect import NetworkOptions, read_network
from clusterctl.jobs.parts.log_limit import LOG_LIMIT, take_log_limit
from clusterctl.jobs.parts.notify import FORMS, problem_of
from clusterctl.jobs.parts.own_table import take_rank_table
from clusterctl.jobs.parts.pods import (
    KubernetesOptions,
    ModelArtsOptions,
    code_in_image,
    read_kubernetes,
    read_modelarts,
)
from clusterctl.jobs.parts.read_restart import read_restart, take_seconds
from clusterctl.jobs.parts.slurm import SlurmOptions, read_slurm
from clusterctl.jobs.parts.step_pattern import compiled
from clusterctl.jobs.parts.workdir import WORKDIR_CHOICES, work_folder
from clusterctl.jobs.restarts import Restart
from clusterctl.storage.address import StoreOptions, is_address

COLLECT_CHOICES = ("checkpoints", "profile", "work")
ENV_STYLES = ("torchrun", "mindspore", "mpi")
PROCESS_CHOICES = ("auto", "device", "node", "launcher")
DEVICE_ID_CHOICES = ("visible", "physical")
# Keys that people write next to `train:` by mistake.
TRAIN_KEYS = [
    "model",
    "optimizer",
    "engine",
    "deepspeed",
    "parallel",
    "zero",
    "precision",
    "steps",
    "length",
    "micro_batch",
    "global_batch",
    "recompute",
    "save",
    "eval",
    "tune",
    "init",
    "hardware",
    "native",
    "profile",
    "tensorboard",
    "seed",
]
# Letters and digits of any script.
RUN_NAME = re.compile(r"(?!last$)[^\W_][\w.-]{0,40}")


@dataclass(frozen=True)
class Job:
    """A job: a program or the embedded trainer, to be run on some devices of some nodes."""

    name: str
    command: tuple[str, ...] = ()
    """The program and its arguments; empty if `train` is given."""
    train: dict[str, object] | None = field(default=None, hash=False)
    nodes: str | None = None
    devices: tuple[int, ...] | None = None
    """The devices to use on each node, in the order of the ranks; None means all."""
    device_ids: str = "visible"
    """The value of DEVICE_ID on NPUs: the position among the visible devices, or the physical id."""
    code: Path | None = None
    """A local folder that is pushed; the processes start in it."""
    workdir: str = "new"
    """The folder in which a program starts: a new one for each run, or one that all runs of the job's name keep."""
    data: Path | None = None
    """A local folder with training data that is pushed."""
    trainer: bool = False
    """Push the embedded trainer as the code, for a command that uses it."""
    data_there: str = ""
    """A folder with training data that every node already has; it is compared, not pushed."""
    data_store: str = ""
    """The object store from which each node fetches the training data: `data: s3://...` or `obs://...`."""
    storage: StoreOptions = field(default_factory=StoreOptions)
    """How object stores are reached: endpoint, region, and a file with keys."""
    processes: str = "auto"
    """What gets a process: each device; each node; or each node because the command, or a program that it starts, is a
    launcher that starts a rank for each device. auto: launcher if one such as torchrun is found, else device."""
    env: dict[str, str] = field(default_factory=dict, hash=False)
    """More environment variables; placeholders such as `{node.address}` are filled for each rank."""
    setup: Setup | None = None
    """What the shell of each node runs before the ranks start: `source set_env.sh`, `module load`, a venv."""
    env_style: str = "torchrun"
    """The launcher whose variables the ranks get in addition to those of torch.distributed."""
    forward: tuple[str, ...] = ()
    """Names of variables that are copied from the environment of the launcher."""
    rank_table: str = "auto"
    """Whether the run gets a rank table; auto: if all devices are NPUs. Else the path of a table to use."""
    master_port: int = 0
    """Port of the rendezvous; 0 lets the first node choose a free port."""
    grace: float = 30.0
    """Seconds between SIGTERM and SIGKILL, for a last checkpoint."""
    log_limit: int = LOG_LIMIT
    """Bytes of the disk that each log of a rank may take, on its node and here; 0 means no limit."""
    collect: tuple[str, ...] = ()
    """What is copied back at the end, in addition to logs and metrics."""
    share_devices: bool = False
    """Whether other runs may use the same NPUs or GPUs at the same time."""
    restart: Restart | None = None
    """What to do after a failure; None means that the run ends."""
    hang_after: float | None = None
    """Seconds without a step after which a training counts as hung; 0 means never. None: three times the 99th
    percentile of its steps, at least 30. For a program that reports no steps: seconds without output; None: never."""
    progress: str = ""
    """For a program: a pattern that finds its steps in its output; "" for the known formats, "off" for none."""
    notify: str = ""
    """A command or a webhook that is called when the run ends, fails, restarts or stalls."""
    network: NetworkOptions = field(default_factory=NetworkOptions)
    slurm: SlurmOptions | None = None
    """What `submit slurm` asks Slurm for."""
    kubernetes: KubernetesOptions | None = None
    """What `submit k8s` asks Kubernetes for."""
    modelarts: ModelArtsOptions | None = None
    """What `submit modelarts` asks ModelArts for."""
    container: ContainerOptions | None = None
    """The container that the ranks run in, unless their node sets one."""
    source: str = ""
    document: Document | None = field(default=None, repr=False, compare=False)

    def work_on(self, run_dir: str) -> str:
        """Return the working folder of a program on a node; "" for the trainer, which writes into the run's folder."""
        if not self.command or self.trainer:
            return ""
        return work_folder(run_dir, self.name if self.workdir == "keep" else "")

    @property
    def prepares_work(self) -> bool:
        """Whether commands of the setup run in the working folder, where they may build something."""
        return self.setup is not None and bool(self.setup.run) and bool(self.work_on(""))

    @property
    def per_node(self) -> bool:
        """Whether each node gets one process, which uses all of its devices."""
        return self.processes in ("node", "launcher") or self.fills_launcher

    @property
    def only_reads_model(self) -> bool:
        """Whether this is a run of `generate`, `serve` or `eval`, which writes no checkpoints."""
        return self.trainer and self.train is None

    @property
    def fills_launcher(self) -> bool:
        """Whether the command is a launcher whose open options are filled in."""
        return self.processes != "device" and fill.direct(self.command) is not None


def load(
    path: Path, overrides: Sequence[str] = (), further: Callable[[Job], Sequence[Fault]] = lambda job: ()
) -> Job:
    """Read and check a job file; raise InputFaults with all of its faults and those that `further` finds."""
    document = documents.load_document(path, f"clusterctl init --job {path.stem}")
    document = with_overrides(document, overrides)
    top = Section(document)
    job = _read(top, path)
    require_files(top, job.setup, job.code)
    top.done({key: f"`{key}:` belongs under `train:`" for key in TRAIN_KEYS})
    # One that cannot be read has its own error.
    unread = any(fault.where.rpartition(" ")[2].startswith(("command", "train")) for fault in top.faults)
    if (
        bool(job.command) == (job.train is not None)
        and not unread
        and isinstance(document.value, dict | None)
    ):
        top.fault(
            "",
            "a job has either a `command` or a `train` part",
            "command: [python, train.py], or train: {model: gpt-tiny, ...}",
        )
    train, document = with_engine_file(job.train, document, path)
    job = with_launcher(replace(job, train=train, document=document))
    if top.faults:
        raise InputFaults([*top.faults, *further(job)])
    return job


def _read(top: Section, path: Path) -> Job:
    name = top.take_text("name", path.stem)
    if not RUN_NAME.fullmatch(name):
        problem = f"{name!r} can't name a run's folder"
        wanted = "letters, digits, '.', '_' and '-', at most 41; `last` means the newest run"
        top.fault("name", problem, wanted)
    return Job(
        name=name,
        command=_words(top, "command"),
        train=top.take("train", dict),
        nodes=top.take("nodes", str),
        devices=_devices(top),
        device_ids=_choice(top, "device_ids", DEVICE_ID_CHOICES, "visible"),
        code=None if code_in_image(top) else _folder(top, "code", path),
        workdir=_choice(top, "workdir", WORKDIR_CHOICES, "new"),
        data=None if is_address(top.value.get("data")) else _folder(top, "data", path),
        data_there=take_data_there(top),
        data_store=take_data_store(top),
        storage=take_storage(top, path),
        processes=_choice(top, "processes", PROCESS_CHOICES, "auto"),
        env=top.take_env("env"),
        setup=take_setup(top),
        env_style=_choice(top, "env_style", ENV_STYLES, "torchrun"),
        forward=_words(top, "forward"),
        rank_table=take_rank_table(top, path),
        master_port=_port(top),
        grace=_grace(top),
        log_limit=take_log_limit(top),
        collect=_known_words(top, "collect", COLLECT_CHOICES),
        share_devices=top.take("share_devices", bool, False) or False,
        restart=read_restart(top),
        hang_after=take_seconds(top, "hang_after", None),
        progress=_progress(top),
        notify=_take_notify(top),
        network=read_network(top),
        slurm=read_slurm(top),
        kubernetes=read_kubernetes(top),
        modelarts=read_modelarts(top),
        container=read_container(top),
        source=str(path),
    )


def from_command(
    argv: Sequence[str],
    code: Path | None,
    devices: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Job:
    """Return a job for a bare command, named after its program or script."""
    refuse_secrets(env or {})
    if argv and reader.ASSIGNMENT.fullmatch(argv[0]):
        # No shell reads the assignments.
        argv = ["env", *argv]
    stems = [Path(word).stem for word in argv[:2] if not word.startswith("-")]
    raw = (
        stems[-1] if stems and re.match(r"python|(ba|z)?sh$", stems[0]) else stems[0] if stems else "command"
    )
    raw = Path(fill.program_of(argv)).stem or raw
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", raw).strip("-.")[:30]
    name = name if RUN_NAME.fullmatch(name) else "command"
    chosen = None if devices is None else named_devices(devices)
    job = Job(
        name=name,
        command=tuple(argv),
        code=code,
        devices=chosen,
        env=dict(env or {}),
        source="the command line",
    )
    return with_launcher(job)


def with_launcher(job: Job) -> Job:
    """Return a job with `processes: launcher` if its command, or a script of the pushed folder, starts a launcher.

    This is decided once: the scripts may change while the run restarts.
    """
    found = job.processes == "auto" and reader.uses(job.command, job.code)
    return replace(job, processes="launcher") if found else job


def refuse_secrets(variables: Mapping[str, str]) -> None:
    """Raise a UsageError if one of the variables looks like a secret: a run's record contains all variables."""
    for name in documents.secrets_in(variables):
        problem, remedy = documents.recorded_secret(name)
        raise UsageError(problem, f"{remedy}; for a command: --env {name}")


def _words(top: Section, key: str) -> tuple[str, ...]:
    value = top.take(key, list, [])
    for index, word in enumerate(value or []):
        if isinstance(word, (dict, list)) or word is None:
            top.fault(key, f"word {index + 1} of {key!r} is not text", "quote it")
    return tuple("true" if word is True else "false" if word is False else str(word) for word in value or [])


def _known_words(top: Section, key: str, known: Sequence[str]) -> tuple[str, ...]:
    names = _words(top, key)
    for word in names:
        if word not in known:
            top.fault(key, f"unknown {word!r}", did_you_mean(word, known) or f"known: {', '.join(known)}")
    return names


def _choice(top: Section, key: str, known: Sequence[str], default: str) -> str:
    value = top.take_text(key, default)
    if value not in known:
        top.fault(key, f"unknown {value!r}", did_you_mean(value, known) or f"one of {', '.join(known)}")
    return value


def _port(top: Section) -> int:
    port = top.take("master_port", int, 0) or 0
    if not 0 <= port < 65536:
        top.fault("master_port", f"{port} is not a port", "1024 to 65535, or 0 to let the first node choose")
    return port


def _grace(top: Section) -> float:
    grace = top.take("grace", float, 30.0) or 0.0
    if grace < 0:
        top.fault("grace", f"{grace:g} seconds are not possible", "0 or more")
    return grace


def _progress(top: Section) -> str:
    top.taken.append("progress")
    # YAML reads `off` as false.
    value = top.value.get("progress")
    if value in (None, "", False, "off"):
        return "off" if value in (False, "off") else ""
    try:
        compiled(str(value))
    except ValueError as error:
        top.fault(
            "progress", f"{value!r}: {error}", r"as in 'step (?P<step>\d+)/(?P<steps>\d+) loss (?P<loss>\S+)'"
        )
    return str(value)


def _devices(top: Section) -> tuple[int, ...] | None:
    top.taken.append("devices")
    value = top.value.get("devices")
    if value is None:
        return None
    try:
        return parse_devices(value)
    except UsageError as error:
        top.fault("devices", error.message, error.hint)
        return None


def _folder(top: Section, key: str, path: Path) -> Path | None:
    value = top.take(key, str)
    if value is None:
        return None
    folder = Path(value).expanduser()
    folder = folder if folder.is_absolute() else path.parent / folder
    if not folder.is_dir():
        top.fault(key, f"no folder {folder}", "a path is relative to the job file")
    return folder.resolve()


def devices_on(job: Job, node: Node) -> tuple[int, ...]:
    """Return the devices of a node that a job uses, one for each rank."""
    return job.devices if job.devices is not None else node.devices


def rank_table_wanted(job: Job, cluster: Cluster) -> bool:
    """Return whether the ranks of this run get a rank table."""
    return job.rank_table not in ("auto", "never") or (
        job.rank_table == "auto" and all(node.kind == "npu" for node in cluster.nodes)
    )


def _take_notify(top: Section) -> str:
    target = top.take("notify", str) or ""
    if problem := problem_of(target):
        top.fault("notify", problem, FORMS)
    return target
