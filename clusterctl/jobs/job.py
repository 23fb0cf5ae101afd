"""job.yaml (or a bare command) read into a Job: what the user asks to run, checked against a Cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterctl import document as documents
from clusterctl.agent.frames import SILENCE
from clusterctl.document import Document, Key, Section
from clusterctl.errors import ClusterctlError, Fault, InputFaults, UsageError, did_you_mean
from clusterctl.inventory.cluster import (
    Cluster,
    Node,
    named_devices,
    parse_devices,
)
from clusterctl.jobs.restarts import Restart
from clusterctl.settings import duration, environment

RANK_TABLE_CHOICES = ("auto", "always", "never")
COLLECT_CHOICES = ("checkpoints", "profile")
GROW_CHOICES = ("restart", "checkpoint")
# In the train part: the folder that `data` names, wherever it lies on that machine.
DATA = "{data}"


@dataclass(frozen=True)
class Job:
    """What the user asks to run: a program, or the embedded trainer, on some devices of some nodes."""

    name: str
    command: tuple[str, ...] = ()
    """The program, a list from here to the node; empty when `train` is given."""
    train: dict[str, Any] | None = field(default=None, hash=False)
    """The embedded trainer's configuration, as its own `check` accepts it."""
    nodes: str | None = None
    devices: tuple[int, ...] | None = None
    """Which devices of each node; all where nothing is said."""
    code: Path | None = None
    """A folder that the processes start in; pushed."""
    data: Path | None = None
    """A folder with training data; pushed."""
    data_there: str = ""
    """A folder of the nodes with training data that lies on all of them already; compared, not pushed."""
    env: dict[str, str] = field(default_factory=dict, hash=False)
    """More environment; `{node.address}` and the like are filled a node at a time."""
    forward: tuple[str, ...] = ()
    """Variables of the launcher's own environment that travel."""
    rank_table: str = "auto"
    """Whether the run gets a rank table: auto = where devices are NPUs."""
    master_port: int = 0
    """0 lets the first node choose a free one."""
    grace: float = 30.0
    """Seconds between SIGTERM and SIGKILL, for a last checkpoint."""
    collect: tuple[str, ...] = ()
    """What is brought home at the end beside logs and metrics."""
    share_devices: bool = False
    """Whether the devices may be in use by another run; of NPUs and GPUs a run has its own otherwise."""
    restart: Restart | None = None
    """What follows a failure; nothing where the job says nothing."""
    hang_after: float | None = None
    """Seconds without a step after which a training counts as hung; 0 = never. None: three times the 99th percentile
    of its steps, 30 at least. Of a program that tells no steps: seconds without a line of any rank; None is never."""
    source: str = ""
    document: Document | None = field(default=None, repr=False, compare=False)


def load(
    path: Path, overrides: Sequence[str] = (), further: Callable[[Job], Sequence[Fault]] = lambda job: ()
) -> Job:
    """Read and check a job file; all its faults at once, with those that `further` finds in what could be read."""
    document = documents.load_document(path)
    document = _with_overrides(document, overrides)
    top = Section(document)
    job = _read(top, path)
    top.done()
    if bool(job.command) == (job.train is not None):
        top.fault(
            "",
            "a job has either a `command` or a `train` part",
            "command: [python, train.py], or train: {model: gpt-tiny, ...}",
        )
    job = replace(job, document=document)
    if top.faults:
        raise InputFaults([*top.faults, *further(job)])
    return job


def _read(top: Section, path: Path) -> Job:
    name = top.take_text("name", path.stem)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", name):
        top.fault(
            "name", f"{name!r} can't name a run's folder", "letters, digits, '.', '_' and '-', at most 41"
        )
    return Job(
        name=name,
        command=_words(top, "command"),
        train=top.take("train", dict),
        nodes=top.take("nodes", str),
        devices=_devices(top),
        code=_folder(top, "code", path),
        data=_folder(top, "data", path),
        data_there=_data_there(top),
        env=top.take_env("env"),
        forward=_words(top, "forward"),
        rank_table=_choice(top, "rank_table", RANK_TABLE_CHOICES, "auto"),
        master_port=_port(top),
        grace=top.take("grace", float, 30.0) or 0.0,
        collect=_known_words(top, "collect", COLLECT_CHOICES),
        share_devices=top.take("share_devices", bool, False) or False,
        restart=_restart(top),
        hang_after=_seconds(top, "hang_after", None),
        source=str(path),
    )


def _data_there(top: Section) -> str:
    folder = top.take_text("data_there")
    if folder and not folder.startswith(("/", "~/")):
        top.fault("data_there", f"{folder!r} is no folder of a node", "as in /data/wiki, or ~/wiki")
    if folder and top.value.get("data") is not None:
        top.fault(
            "data_there", "`data` is given too", "data: a folder here, pushed; data_there: one on every node"
        )
    return folder


def _restart(top: Section) -> Restart | None:
    """The job's `restart` part; its presence asks for restarts."""
    inner = top.section("restart")
    if top.value.get("restart") is None:
        return None
    plain = Restart()
    found = Restart(
        max=_at_least(inner, "max", 0, plain.max),
        backoff=_seconds(inner, "backoff", plain.backoff) or 0.0,
        spare_nodes=inner.take("spare_nodes", str),
        min_nodes=_at_least(inner, "min_nodes", 1, 0) or None,
        node_lost_after=_seconds(inner, "node_lost_after", plain.node_lost_after) or 0.0,
        grow=_choice(inner, "grow", GROW_CHOICES, plain.grow),
    )
    if found.node_lost_after <= SILENCE:
        what = f"{found.node_lost_after:g} s: a link's silence alone takes {SILENCE:g} s to notice"
        inner.fault("node_lost_after", what, f"{plain.node_lost_after:g}s, or more")
    inner.done()
    return found


def _at_least(section: Section, key: str, least: int, default: int) -> int:
    value = section.take(key, int, default)
    if value is not None and value < least and section.value.get(key) is not None:
        section.fault(key, f"{value} is too small", f"{least} or more")
    return value or 0


def _seconds(section: Section, key: str, default: float | None) -> float | None:
    """A time: a number of seconds, or `90s`, `10m`, `off`."""
    section.taken.append(key)
    value = section.value.get(key)
    if value is None:
        return default
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    try:
        return duration(value if isinstance(value, str) else "?")
    except UsageError:
        section.fault(key, f"{value!r} is no time", "as in 10, 90s, 10m, or off")
        return default


def from_command(
    argv: Sequence[str],
    code: Path | None,
    devices: str | None = None,
    env: Mapping[str, str] | None = None,
    restarts: int = 0,
) -> Job:
    """A bare command as a job; its name is the program's, or the script's."""
    words = [Path(word).stem for word in argv[:2] if not word.startswith("-")]
    raw = (
        words[-1] if words and re.match(r"python|(ba|z)?sh$", words[0]) else words[0] if words else "command"
    )
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
    words = _words(top, key)
    for word in words:
        if word not in known:
            top.fault(key, f"unknown {word!r}", did_you_mean(word, known) or f"known: {', '.join(known)}")
    return words


def _choice(top: Section, key: str, known: Sequence[str], default: str) -> str:
    value = top.take_text(key, default)
    if value not in known:
        top.fault(key, f"unknown {value!r}", did_you_mean(value, known) or f"one of {', '.join(known)}")
    return value


def _port(top: Section) -> int:
    port = top.take("master_port", int, 0) or 0
    if not 0 <= port < 65536:
        top.fault("master_port", f"{port} is no port", "1024 to 65535, or 0 to let the first node choose")
    return port


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


def _with_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """`train.steps=100` laid over the file, read by the same rules as the file itself."""
    faults = []
    value = json.loads(json.dumps(document.value or {}))
    flags = set[tuple[str | int, ...]]()
    for text in overrides:
        name, equals, given = text.partition("=")
        keys = name.split(".")
        if not equals or not all(keys):
            faults.append(Fault(f"--set {text}", "must be KEY=VALUE", "as in --set train.steps=100"))
            continue
        place = value
        for key in keys[:-1]:
            inner = place.setdefault(key, {})
            if not isinstance(inner, dict):
                faults.append(Fault(f"--set {text}", f"{key!r} is not a mapping in {document.source}"))
                break
            place = inner
        else:
            place[keys[-1]] = documents.parse_document(given, f"--set {name}").value
            flags.add(tuple(keys))
    if faults:
        raise InputFaults(faults)
    return Document(document.source, value, document.lines, frozenset(flags))


# -- against a cluster --------------------------------------------------------------------------------------


def devices_on(job: Job, node: Node) -> tuple[int, ...]:
    """The devices of a node that a job uses, one rank each."""
    return job.devices if job.devices is not None else node.devices


def check(job: Job, cluster: Cluster) -> dict[str, Any]:
    """Everything that can be known before anything starts; gives the trainer's summary (empty for a command)."""
    faults = list(_device_faults(job, cluster))
    world = sum(len(devices_on(job, node)) for node in cluster.nodes)
    if not world and not faults:
        faults.append(
            _fault(job, ("devices",), "no device is left to run on", "give `devices`, or more nodes")
        )
    summary: dict[str, Any] = {}
    if job.train is not None:
        answer = check_train(replace(job, train=train_part(job, cluster)), max(world, 1))
        faults += train_faults(job, answer["faults"])
        summary = answer.get("summary") or {}
    if faults:
        raise InputFaults(faults)
    return summary


def train_part(job: Job, cluster: Cluster) -> dict[str, Any] | None:
    """The train part with what the inventory knows of devices, the same for all ranks; the job's own word counts."""
    told = (job.train or {}).get("hardware") or {}
    if job.train is None or not isinstance(told, dict) or not cluster.nodes:
        return job.train
    most = max(len(devices_on(job, node)) for node in cluster.nodes)
    known: dict[str, Any] = {"kind": cluster.nodes[0].kind, "devices_per_node": most}
    return {**job.train, "hardware": {**known, **told}}


def train_faults(job: Job, told: Sequence[Mapping[str, str]]) -> list[Fault]:
    """What the trainer found, with the lines of the job's file."""
    return [_fault(job, _path(one["key"]), one["what"], one.get("remedy", "")) for one in told]


def _path(key: str) -> Key:
    """`train.data.blend[1].prefix` as the keys and places that lead there."""
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key))


def _fault(job: Job, path: Key, what: str, remedy: str = "") -> Fault:
    if job.document is None:
        return Fault(job.source, what, remedy)
    return job.document.fault(path, what, remedy)


def _device_faults(job: Job, cluster: Cluster) -> Sequence[Fault]:
    faults = []
    for node in cluster.nodes:
        missing = [device for device in job.devices or () if device not in node.devices]
        if missing:
            have = ", ".join(map(str, node.devices)) or "none"
            what = (
                f"{node.name} has no device {', '.join(map(str, missing))}; it has {have} ({cluster.source})"
            )
            faults.append(
                _fault(job, ("devices",), what, "ask for fewer devices, or add them to the inventory")
            )
    return faults


def check_train(job: Job, world: int) -> dict[str, Any]:
    """What the trainer itself says of a configuration; asked in a process of its own, which needs no torch."""
    question = {
        "train": filled(job.train or {}, str(job.data or job.data_there)),
        "world_size": world,
        "name": job.name,
        "base_dir": str(Path(job.source).parent.resolve()),
        "check_data": job.data is not None and job.data.is_dir(),
    }
    return ask_trainer(["check"], json.dumps(question))


def rehearse(job: Job, cluster: Cluster) -> dict[str, Any]:
    """One rank of the job's layout, built and stepped here by the trainer on tensors without memory."""
    world = sum(len(devices_on(job, node)) for node in cluster.nodes)
    train = filled(train_part(job, cluster), str(job.data or job.data_there))
    return ask_trainer(["rehearse"], json.dumps({"train": train, "world_size": world}))


def ask_trainer(words: Sequence[str], question: str = "") -> dict[str, Any]:
    """Run one of the trainer's verbs here and read its one JSON document."""
    argv = [sys.executable, "-m", "trainer", *words]
    done = subprocess.run(argv, input=question, capture_output=True, text=True, env=environment())
    try:
        answer = json.loads(done.stdout)
        assert isinstance(answer, dict)
        return answer
    except (ValueError, AssertionError):
        last = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        message = next((line for line in last if line.startswith("error: ")), last[-1]).removeprefix(
            "error: "
        )
        hint = next((line.removeprefix("  try: ") for line in last if line.startswith("  try: ")), "")
        kind = UsageError if done.returncode == 2 else ClusterctlError
        raise kind(f"the trainer's {words[0]}: {message}", hint) from None


def filled(value: Any, data: str) -> Any:
    """The train part with `{data}` put in, at any depth."""
    if isinstance(value, dict):
        return {key: filled(inner, data) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, data) for inner in value]
    return value.replace(DATA, data) if isinstance(value, str) else value
