"""Read job.yaml or a bare command into a Job, and check it against the nodes of a Cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from clusterctl import document as documents
from clusterctl.document import Document, Key, Section
from clusterctl.errors import Fault, InputFaults, UsageError, did_you_mean
from clusterctl.inventory.cluster import (
    Cluster,
    Node,
    bytes_of,
    named_devices,
    parse_devices,
)
from clusterctl.inventory.container import ContainerOptions, read_container
from clusterctl.inventory.setup import Setup, require_files, take_setup
from clusterctl.jobs import launchers, placeholders
from clusterctl.jobs.ask_trainer import ask_trainer
from clusterctl.jobs.overrides import with_overrides
from clusterctl.jobs.parts.data_source import take_data_store, take_data_there, take_storage
from clusterctl.jobs.parts.engine_file import with_engine_file
from clusterctl.jobs.parts.interconnect import NetworkOptions, network_faults, read_network
from clusterctl.jobs.parts.own_table import file_of, table_problems, take_rank_table
from clusterctl.jobs.parts.pods import (
    KubernetesOptions,
    ModelArtsOptions,
    code_in_image,
    read_kubernetes,
    read_modelarts,
)
from clusterctl.jobs.parts.read_restart import read_restart, take_seconds
from clusterctl.jobs.parts.saving import saving_faults, saving_of
from clusterctl.jobs.parts.slurm import SlurmOptions, read_slurm
from clusterctl.jobs.parts.step_pattern import compiled
from clusterctl.jobs.program_files import missing_script
from clusterctl.jobs.restarts import Restart
from clusterctl.jobs.train_summary import Rehearsal, TrainCheck, TrainFault, TrainSummary, read_check
from clusterctl.json_types import JsonObject
from clusterctl.storage.address import StoreOptions, is_address
from clusterctl.typed_json import decode

COLLECT_CHOICES = ("checkpoints", "profile")
ENV_STYLES = ("torchrun", "mindspore", "mpi")
PROCESS_CHOICES = ("auto", "device", "node")
DEVICE_ID_CHOICES = ("visible", "physical")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")


@dataclass(frozen=True)
class Job:
    """What the user wants to run: a program, or the embedded trainer, on some devices of some nodes."""

    name: str
    command: tuple[str, ...] = ()
    """The program and its arguments; empty if `train` is given."""
    train: JsonObject | None = field(default=None, hash=False)
    """The configuration of the embedded trainer."""
    nodes: str | None = None
    devices: tuple[int, ...] | None = None
    """The devices to use on each node, in the order of the ranks; None means all."""
    device_ids: str = "visible"
    """What DEVICE_ID is on NPUs: the position among the visible devices, or the physical id."""
    code: Path | None = None
    """A local folder that is pushed; the processes start in it."""
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
    """Whether each device or each node gets a process; auto: a node if the command is a launcher such as torchrun."""
    env: dict[str, str] = field(default_factory=dict, hash=False)
    """More environment variables; placeholders such as `{node.address}` are filled for each rank."""
    setup: Setup | None = None
    """What the shell of each node runs before the ranks start: `source set_env.sh`, `module load`, a venv."""
    env_style: str = "torchrun"
    """Which launcher's variables the ranks get, in addition to those of torch.distributed."""
    forward: tuple[str, ...] = ()
    """Names of variables that are copied from the environment of the launcher."""
    rank_table: str = "auto"
    """Whether the run gets a rank table; auto: if all devices are NPUs. Else the path of a table to use."""
    master_port: int = 0
    """0 lets the first node choose a free port."""
    grace: float = 30.0
    """Seconds between SIGTERM and SIGKILL, for a last checkpoint."""
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
    """The container that the ranks run in, unless their node has one of its own."""
    source: str = ""
    document: Document | None = field(default=None, repr=False, compare=False)

    @property
    def per_node(self) -> bool:
        """Whether each node gets one process, which uses all of its devices."""
        return self.processes == "node" or self.fills_launcher

    @property
    def fills_launcher(self) -> bool:
        """Whether the command is a launcher whose open options are filled in."""
        return self.processes != "device" and launchers.recognise(self.command) is not None


def load(
    path: Path, overrides: Sequence[str] = (), further: Callable[[Job], Sequence[Fault]] = lambda job: ()
) -> Job:
    """Read and check a job file; raise InputFaults with all of its faults and those that `further` finds."""
    document = documents.load_document(path, f"clusterctl init --job {path.stem}")
    document = with_overrides(document, overrides)
    top = Section(document)
    job = _read(top, path)
    require_files(top, job.setup, job.code)
    top.done()
    if bool(job.command) == (job.train is not None):
        top.fault(
            "",
            "a job has either a `command` or a `train` part",
            "command: [python, train.py], or train: {model: gpt-tiny, ...}",
        )
    train, document = with_engine_file(job.train, document, path)
    job = replace(job, train=train, document=document)
    if top.faults:
        raise InputFaults([*top.faults, *further(job)])
    return job


def _read(top: Section, path: Path) -> Job:
    name = top.take_text("name", path.stem)
    if not RUN_NAME.fullmatch(name):
        problem = f"{name!r} can't name a run's folder"
        top.fault("name", problem, "letters, digits, '.', '_' and '-', at most 41")
    return Job(
        name=name,
        command=_words(top, "command"),
        train=top.take("train", dict),
        nodes=top.take("nodes", str),
        devices=_devices(top),
        device_ids=_choice(top, "device_ids", DEVICE_ID_CHOICES, "visible"),
        code=None if code_in_image(top) else _folder(top, "code", path),
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
        grace=top.take("grace", float, 30.0) or 0.0,
        collect=_known_words(top, "collect", COLLECT_CHOICES),
        share_devices=top.take("share_devices", bool, False) or False,
        restart=read_restart(top),
        hang_after=take_seconds(top, "hang_after", None),
        progress=_progress(top),
        notify=top.take_text("notify"),
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
    restarts: int = 0,
) -> Job:
    """Return a job for a bare command, named after its program or script."""
    stems = [Path(word).stem for word in argv[:2] if not word.startswith("-")]
    raw = (
        stems[-1] if stems and re.match(r"python|(ba|z)?sh$", stems[0]) else stems[0] if stems else "command"
    )
    raw = Path(launchers.program_of(argv)).stem or raw
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", raw).strip("-.")[:30] or "command"
    chosen = None if devices is None else named_devices(devices)
    return Job(
        name=name,
        command=tuple(argv),
        code=code,
        devices=chosen,
        env=dict(env or {}),
        restart=Restart(max=restarts) if restarts else None,
        source="the command line",
    )


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


# -- against a cluster --------------------------------------------------------------------------------------


def devices_on(job: Job, node: Node) -> tuple[int, ...]:
    """Return the devices of a node that a job uses, one for each rank."""
    return job.devices if job.devices is not None else node.devices


def check(job: Job, cluster: Cluster) -> TrainSummary | None:
    """Check a job against its nodes before anything starts; return the trainer's summary, None for a command.

    Raise InputFaults with everything that is wrong.
    """
    # A command without a job file may be code with braces of its own.
    parts = {"command": job.command, "env": job.env} if job.document else {}
    own = _placeholder_faults(job, parts, placeholders.OF_RANK)
    in_train = _placeholder_faults(job, {"train": job.train}, placeholders.OF_NODE)
    faults = [*_device_faults(job, cluster), *own, *in_train, *_command_faults(job, cluster)]
    if file := file_of(job.rank_table):
        places = [(node, devices_on(job, node)) for node in cluster.nodes]
        faults += [_fault(job, ("rank_table",), *problem) for problem in table_problems(file, places)]
    if job.processes == "node" and job.train is not None:
        problem = "'node' does not fit the embedded trainer, which has a rank for each device"
        faults.append(_fault(job, ("processes",), problem, "leave out processes"))
    world = sum(len(devices_on(job, node)) for node in cluster.nodes)
    if not world and not faults:
        faults.append(
            _fault(job, ("devices",), "no device is left to run on", "give `devices`, or more nodes")
        )
    if job.device_ids == "physical" and job.train is not None:
        problem = "'physical' does not fit the embedded trainer, which counts the visible devices"
        faults.append(_fault(job, ("device_ids",), problem, "device_ids: visible"))
    for path, problem, remedy in saving_faults(job.train, len(cluster.nodes)):
        faults.append(_fault(job, path, problem, remedy))
    contained = job.container or next((node.container for node in cluster.nodes if node.container), None)
    if contained and job.setup is not None:
        problem = "`setup` prepares the node, and the ranks run in a container"
        faults.append(_fault(job, ("setup",), problem, "do it in the image, or in its entry point"))
    for key, problem, remedy in network_faults(job.network, cluster):
        faults.append(_fault(job, ("network", key), problem, remedy))
    summary = None
    if job.train is not None and not in_train:
        answer = check_train(replace(job, train=train_part(job, cluster)), max(world, 1))
        faults += train_faults(job, answer.faults)
        summary = answer.summary
    if faults:
        raise InputFaults(faults)
    return summary


def _placeholder_faults(job: Job, parts: Mapping[str, Any], known: tuple[str, ...]) -> list[Fault]:
    """Return a fault for each placeholder that is unknown, or needs data that the job does not name."""
    faults = []
    # `--set data=null` plans a job without its data.
    no_data = not (job.data or job.data_there or job.data_store) and ("data",) not in (
        job.document.flags if job.document else ()
    )
    for path, name in placeholders.used_in(dict(parts)):
        if name not in known:
            problem, remedy = placeholders.describe_unknown(name), placeholders.remedy_for(name, known)
            faults.append(_fault(job, path, problem, remedy))
        elif name == "data" and no_data:
            faults.append(_fault(job, path, "{data} is used, but the job has no data", "data: FOLDER"))
    return faults


def train_part(job: Job, cluster: Cluster) -> JsonObject | None:
    """Return the train part with the kind and number of devices from the inventory, unless the job has its own."""
    hardware = (job.train or {}).get("hardware") or {}
    if job.train is None or not isinstance(hardware, dict) or not cluster.nodes:
        return job.train
    most = max(len(devices_on(job, node)) for node in cluster.nodes)
    known: JsonObject = {"kind": cluster.nodes[0].kind, "devices_per_node": most}
    disks = [node.disk for node in cluster.nodes if node.disk]
    if disks and not saving_of(job.train).dir:
        known["disk"] = min(disks, key=bytes_of)
    return {**job.train, "hardware": {**known, **hardware}}


def train_faults(job: Job, faults: Sequence[TrainFault]) -> list[Fault]:
    """Return the faults that the trainer found, with the lines of the job file."""
    return [_fault(job, _path(fault.key), fault.what, fault.remedy) for fault in faults]


def _path(key: str) -> Key:
    """Return the keys and indexes in a path such as `train.data.blend[1].prefix`."""
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key))


def _fault(job: Job, path: Key, problem: str, remedy: str = "") -> Fault:
    if job.document is None:
        return Fault(job.source, problem, remedy)
    return job.document.fault(path, problem, remedy)


def _device_faults(job: Job, cluster: Cluster) -> Sequence[Fault]:
    faults = []
    for node in cluster.nodes:
        missing = [device for device in job.devices or () if device not in node.devices]
        if missing:
            have = ", ".join(map(str, node.devices)) or "none"
            problem = (
                f"{node.name} has no device {', '.join(map(str, missing))}; it has {have} ({cluster.source})"
            )
            faults.append(
                _fault(job, ("devices",), problem, "ask for fewer devices, or add them to the inventory")
            )
        used = devices_on(job, node)
        if node.kind == "npu" and job.device_ids == "visible" and list(used) != sorted(used):
            problem = f"{node.name}: the devices {','.join(map(str, used))} are not in ascending order"
            ordered = ", ".join(map(str, sorted(used)))
            remedy = f"write [{ordered}]: CANN takes ASCEND_RT_VISIBLE_DEVICES in ascending order only"
            faults.append(_fault(job, ("devices",), problem, remedy))
    return faults


def launcher_shapes(
    job: Job, cluster: Cluster, master_port: int, hostfile: str = "hostfile"
) -> list[launchers.Shape]:
    """Return what a launcher in the job's command needs to know, for each node."""
    devices = [devices_on(job, node) for node in cluster.nodes]
    return launchers.shapes(cluster.nodes, devices, master_port, hostfile)


def _command_faults(job: Job, cluster: Cluster) -> list[Fault]:
    """Return what in a command contradicts the nodes or the pushed folder, each problem once."""
    shapes = launcher_shapes(job, cluster, job.master_port or 29500) if job.fills_launcher else []
    found = dict.fromkeys(problem for shape in shapes for problem in launchers.problems(job.command, shape))
    if missing := missing_script(job.command, job.code):
        found[missing] = None
    return [_fault(job, ("command",), problem.text, problem.remedy) for problem in found]


def check_reported(job: Job, cluster: Cluster, device: str) -> TrainCheck:
    """Return what the trainer says about a job on devices that the nodes report under this name."""
    world = sum(len(devices_on(job, node)) for node in cluster.nodes)
    return check_train(replace(job, train=train_part(job, cluster), data=None), max(world, 1), device)


def check_train(job: Job, world: int, reported: str | None = None) -> TrainCheck:
    """Return what the trainer says about a configuration; it runs in a process of its own and imports no torch."""
    question = {
        "reported": reported,
        "train": placeholders.fill_all(job.train or {}, _local_values(job, world), f"{job.source}: train"),
        "world_size": world,
        "name": job.name,
        "base_dir": str(Path(job.source).parent.resolve()),
        "check_data": job.data is not None and job.data.is_dir(),
    }
    return ask_trainer(read_check, ["check"], json.dumps(question))


def _local_values(job: Job, world: int) -> dict[str, str]:
    """Return placeholder values for a check on this machine, where the nodes' own are not known."""
    unknown = {name: f"<{name}>" for name in placeholders.OF_NODE}
    known = {
        "data": str(job.data or job.data_there or job.data_store),
        "world_size": str(world),
        "node_rank": "0",
    }
    return {**unknown, **known, "master_port": str(job.master_port or 29500)}


def rehearse(job: Job, cluster: Cluster) -> Rehearsal:
    """Build and step one rank of the job's layout here, on tensors without memory; return the trainer's answer."""
    world = sum(len(devices_on(job, node)) for node in cluster.nodes)
    values = _local_values(job, world)
    train = placeholders.fill_all(train_part(job, cluster), values, f"{job.source}: train")
    return ask_trainer(
        partial(decode, Rehearsal), ["rehearse"], json.dumps({"train": train, "world_size": world})
    )
