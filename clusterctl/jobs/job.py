"""Read job.yaml or a bare command into a Job, and check it against the nodes of a Cluster."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl import document as documents
from clusterctl.document import Document, take_env
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.inventory.cluster import (
    Cluster,
    Node,
    bytes_of,
    named_devices,
    read_devices,
)
from clusterctl.inventory.container import ContainerOptions
from clusterctl.inventory.setup import PLACE, TEXTS, Setup, take_setup
from clusterctl.jobs.launchers import fill, reader
from clusterctl.jobs.overrides import with_engine_file, with_overrides
from clusterctl.jobs.parts import own_table
from clusterctl.jobs.parts.interconnect import NetworkOptions
from clusterctl.jobs.parts.notify import FORMS, problem_of
from clusterctl.jobs.parts.own_table import take_rank_table
from clusterctl.jobs.parts.platforms import Platforms, has_code_in_image
from clusterctl.jobs.restarts import Restart
from clusterctl.settings import a_time
from clusterctl.storage.address import StoreOptions, address_fault, is_address
from clusterctl.wire.fields import Problem, own, setting, shown

# Names of groups that a pattern may have.
NAMES = (
    "step", "steps", "loss", "eval_loss", "lr", "grad_norm", "tokens", "tokens_per_second", "samples_per_second",
    "step_seconds", "step_ms",
)  # fmt: skip


def compiled(pattern: str) -> re.Pattern[str]:
    """Return the pattern; raise ValueError with the reason if it cannot be used."""
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    names = set(found.groupindex)
    if "step" not in names:
        raise ValueError("it has no group (?P<step>...)")
    if unknown := sorted(names - set(NAMES)):
        raise ValueError(f"unknown group {unknown[0]!r}; known: {', '.join(NAMES)}")
    return found


# Bytes of each stream of a rank, on its node and on the launching machine: 64 ranks take at most 32 GB here.
LOG_LIMIT = 256 << 20
# A smaller log would lose lines before they are copied.
LEAST = 16_000_000


def limit_of(value: object) -> int:
    """Return the bytes of a size such as 1GB, 0 for off; raise ValueError for anything else."""
    # YAML reads `off` as false.
    if value in (False, "off"):
        return 0
    limit = int(bytes_of(str(value)))
    if limit < LEAST:
        raise ValueError(f"{value!r} is no size of at least 16 MB", "as in 500MB or 2GB; off for no limit")
    return limit


def work_folder(run_dir: str, kept_name: str = "") -> str:
    """Return the folder on a node in which the ranks of a program start: one per run, for all nodes on the same disk.

    `run_dir` is the run's folder there. With a name, it is the folder that all runs of a job share.
    """
    runs, run_id = posixpath.split(posixpath.dirname(run_dir))
    return posixpath.join(posixpath.dirname(runs), "work", kept_name or run_id)


ENV_STYLES = ("torchrun", "mindspore", "mpi")
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


DEVICES = {"type": ["string", "integer", "array"]}
WORDS = {"type": "array", "items": {"type": ["string", "number", "boolean"]}}
VALUES = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
PATTERN = r"as in 'step (?P<step>\d+)/(?P<steps>\d+) loss (?P<loss>\S+)'"


def words_of(value: object) -> tuple[str, ...]:
    """Return the words of a list; raise ValueError for anything else."""
    if not isinstance(value, list):
        raise ValueError(f"must be a list, not {shown(value)}", "as in [a, b]")
    for number, word in enumerate(value, 1):
        if isinstance(word, (dict, list)) or word is None:
            raise ValueError(f"word {number} is not text", "quote it")
    return tuple("true" if word is True else "false" if word is False else str(word) for word in value)


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"must be a mapping, not {shown(value)}", "as in {key: value}")
    return value


def _progress(value: object) -> str:
    # YAML reads `off` as false.
    if value in ("", False, "off"):
        return "off" if value in (False, "off") else ""
    try:
        compiled(str(value))
    except ValueError as error:
        raise ValueError(f"{value!r}: {error}", PATTERN) from None
    return str(value)


def _notify(value: object) -> str:
    if problem := problem_of(value) if isinstance(value, str) else f"must be text, not {shown(value)}":
        raise ValueError(problem, FORMS)
    return str(value)


@dataclass(frozen=True)
class Job(Platforms):
    """A job: a program or the embedded trainer, to be run on some devices of some nodes."""

    name: str = setting(
        "",
        pattern=RUN_NAME,
        noun="a name for the folder of a run",
        example="letters, digits, '.', '_' and '-', at most 41; `last` means the newest run",
        form={"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$"},
    )
    """Name of the runs. Default: the name of the file."""
    command: tuple[str, ...] = setting((), read=words_of, form=WORDS)
    """Your own program, as a list of words. A job has either `command` or `train`."""
    train: dict[str, object] | None = setting(None, read=_mapping, form={"type": "object"}, hashed=False)
    """The configuration of the embedded trainer."""
    nodes: str | None = setting(None)
    """Node set of the run: node[1-4], @group. Default: all nodes."""
    devices: tuple[int, ...] | None = setting(None, read=read_devices, form=DEVICES)
    """Devices to use on each node, in the order of the ranks, for example [0,4). Each device gets one rank."""
    device_ids: str = setting("visible", choices=("visible", "physical"))
    """DEVICE_ID on NPUs. visible: index in ASCEND_RT_VISIBLE_DEVICES. physical: physical id, without that list."""
    code: Path | None = setting(None)
    """Folder to push. The ranks start in a copy of it."""
    workdir: str = setting("new", choices=("new", "keep"))
    """Folder in which a program starts. new: one for each run, which `resume` uses again. keep: one for all runs of
    this name; pushed files that changed are replaced in it."""
    data: Path | None = setting(None)
    """Folder with data to push, or s3://BUCKET/FOLDER or obs://BUCKET/FOLDER, which each node fetches. `{data}` in the
    job is its path on each node."""
    trainer: bool = own(False)
    """Push the embedded trainer as the code, for a command that uses it."""
    data_there: str = setting(
        "", pattern=PLACE, noun="an absolute path", example="as in /data/wiki or ~/wiki"
    )
    """Folder with data that is on all nodes already. It is compared, not pushed."""
    data_store: str = own("")
    """The object store from which each node fetches the training data: `data: s3://...` or `obs://...`."""
    storage: StoreOptions = setting(factory=StoreOptions)
    """How object stores are reached. Access keys come from the environment or a file and are never recorded."""
    processes: str = setting("auto", choices=("auto", "device", "node", "launcher"))
    """What gets a process: each device; each node; each node, where a launcher starts the ranks. auto: launcher if one
    such as torchrun is found in the command or its scripts, else device."""
    env: dict[str, str] = setting(factory=dict, take=take_env, form=VALUES)
    """Environment variables of the ranks. {node.address} and the like are replaced for each rank."""
    setup: Setup | None = setting(None, take=take_setup, form=TEXTS, long=Setup)
    """What each node's shell runs before the ranks start, such as `source set_env.sh`: a file to source, commands, or a
    mapping of both."""
    env_style: str = setting("torchrun", choices=ENV_STYLES)
    """Launcher whose variables are also set, next to RANK, WORLD_SIZE, MASTER_ADDR and the like."""
    forward: tuple[str, ...] = setting((), read=words_of, form=WORDS)
    """Variables of the launcher's environment to pass on to the ranks."""
    rank_table: str = setting("auto", take=take_rank_table, form=own_table.FORM)
    """Whether the run gets a rank table. auto: programs on NPUs. Or a table to use: ./table.json."""
    master_port: int = setting(
        0, least=0, most=65535, example="1024 to 65535, or 0 to let the first node choose"
    )
    """Port of the rendezvous. 0: any free port."""
    grace: float = setting(30.0, least=0)
    """Seconds between SIGTERM and SIGKILL, for a last checkpoint. Default: 30, and for a training at least 1.5 times
    the planned step and save; fewer than these are refused, except 0."""
    log_limit: int = setting(LOG_LIMIT, read=limit_of, form={"type": ["string", "boolean"]})
    """Size of each log of a rank, on its node and here, such as 2GB. Beyond it, the middle is dropped. Default: 256
    MiB; off: no limit."""
    collect: tuple[str, ...] = setting((), choices=("checkpoints", "profile", "work"))
    """What to fetch from the nodes in addition to logs and metrics."""
    share_devices: bool = setting(False)
    """Allow devices that another run is using."""
    restart: Restart | None = setting(None)
    """Restart the run after a failure."""
    hang_after: float | None = a_time(None)
    """Treat the run as hung after this long without a step (or output, for your own program); 0: never. Default: for a
    training three times the 99th percentile of its steps, at least 30 seconds; never for your own program."""
    progress: str = setting("", read=_progress, form={"type": ["string", "boolean"]})
    """For a program: a regular expression with groups step, steps, loss, ... that finds its steps; or off."""
    notify: str = setting("", read=_notify, form={"type": "string"})
    """Command or https:// address to call at the end, a failure, a restart, a stall or a NaN; or $NAME, a variable that
    holds it."""
    network: NetworkOptions = setting(factory=NetworkOptions)
    """How ranks on different nodes communicate."""
    container: ContainerOptions | None = setting(None)
    """The container for the ranks, unless their node sets one."""
    source: str = own("")
    document: Document | None = own(None, repr=False, compare=False)

    def problems(self) -> Iterator[Problem]:
        for key, folder in (("code", self.code), ("data", self.data)):
            if folder is not None and not folder.is_dir():
                yield key, f"no folder {folder}", "a path is relative to the job file"
        if self.data_there and (self.data is not None or self.data_store):
            remedy = "data: a local folder, pushed; data_there: a folder on every node"
            yield "data_there", "`data` is given too", remedy
        moves = [key for key in ("spare_nodes", "min_nodes") if getattr(self.restart, key, None)]
        if moves and own_table.file_of(self.rank_table):
            problem = f"restart.{moves[0]} changes the nodes, and the table of a file names fixed ones"
            yield "rank_table", problem, "rank_table: auto builds one for each attempt"
        for path in self.setup.relative if self.setup is not None else ():
            if self.code is not None and not (self.code / path).is_file():
                yield "setup", f"{self.code} has no file {path}", "a relative path is in the pushed code"
            elif self.code is None and self.train is None and not self.in_image:
                remedy = "give the job `code`, or name a file of the node: /path or ~/path"
                yield "setup", f"{path!r} is not an absolute path", remedy

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
    def has_image(self) -> bool:
        """Return whether the ranks run in an image, which may have the program's files."""
        return bool(self.container) or self.in_pods

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
    faults = list[Fault]()
    job = _read(document, path, faults)
    is_read = isinstance(document.value, dict | None) and not _is_named(faults, "command", "train")
    if bool(job.command) == (job.train is not None) and is_read:
        remedy = "command: [python, train.py], or train: {model: gpt-tiny, ...}"
        faults.append(document.fault((), "a job has either a `command` or a `train` part", remedy))
    train, document = with_engine_file(job.train, document, path)
    job = with_launcher(replace(job, train=train, document=document))
    if faults:
        raise InputFaults([*faults, *further(job)])
    return job


def _is_named(faults: Sequence[Fault], *keys: str) -> bool:
    """Return whether a fault names one of the keys, or the file as a whole: it has its own error."""
    return any(fault.where.rpartition(" ")[2].partition(".")[0] in keys for fault in faults)


def _read(document: Document, path: Path, faults: list[Fault]) -> Job:
    """Return the job of a file; adds to `faults`."""
    raw, store = document.value if document.value is not None else {}, ""
    if isinstance(raw, dict):
        raw = {key: part for key, part in raw.items() if key != "code" or not has_code_in_image(raw)}
        if is_address(raw.get("data")):
            store = str(raw.pop("data"))
            if (fault := address_fault(store))[0]:
                faults.append(document.fault(("data",), *fault))
    checked = documents.reader(document, faults, path.parent)
    elsewhere = {key: f"`{key}:` belongs under `train:`" for key in TRAIN_KEYS}
    job = checked.read(Job, raw, start=Job(name=path.stem, data_store=store), elsewhere=elsewhere)
    credentials = job.storage.credentials
    if credentials and not credentials.startswith(("/", "~/")):
        credentials = str(path.parent.absolute() / credentials)
    return replace(
        job,
        code=job.code and job.code.resolve(),
        data=job.data and job.data.resolve(),
        storage=replace(job.storage, credentials=credentials),
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


def devices_on(job: Job, node: Node) -> tuple[int, ...]:
    """Return the devices of a node that a job uses, one for each rank."""
    return job.devices if job.devices is not None else node.devices


def rank_table_wanted(job: Job, cluster: Cluster) -> bool:
    """Return whether the ranks of this run get a rank table; the embedded trainer only one that the job asks for.

    torch_npu does not need it: ranks exchange their addresses, and where one rank cannot use its table, it alone does.
    """
    return job.rank_table not in ("auto", "never") or (
        job.rank_table == "auto" and job.train is None and all(node.kind == "npu" for node in cluster.nodes)
    )
