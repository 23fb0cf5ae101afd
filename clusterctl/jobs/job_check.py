"""Check a job against the nodes of a cluster, before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from clusterctl.environment import inherited
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.inventory import nodeset
from clusterctl.inventory.cluster import (
    Cluster,
    bytes_of,
)
from clusterctl.jobs import placeholders
from clusterctl.jobs.ask_trainer import ask_trainer
from clusterctl.jobs.job import Job, devices_on, rank_table_wanted
from clusterctl.jobs.launchers import fill
from clusterctl.jobs.launchers.options import Shape
from clusterctl.jobs.parts.interconnect import network_faults
from clusterctl.jobs.parts.notify import program_problem
from clusterctl.jobs.parts.own_table import file_of
from clusterctl.jobs.parts.saving import grace_problems, saving_faults, saving_of
from clusterctl.jobs.parts.table_problems import table_problems
from clusterctl.jobs.program_files import missing_script
from clusterctl.wire.fields import Key
from clusterctl.wire.schema import schema_of
from clusterctl.wire.train_summary import Rehearsal, TrainCheck, TrainFault, TrainSummary
from clusterctl.wire.typed_json import decode

Problem = tuple[Key, str, str]
"""The key of the job that is wrong, why, and a remedy."""


def check(job: Job, cluster: Cluster) -> TrainSummary | None:
    """Check a job against its nodes before anything starts; return the trainer's summary, None for a command.

    Raise InputFaults with all errors. The program of `notify` must be on this machine: remove `notify` from the job if
    the controller of the run will be on another machine.
    """
    world = sum(len(devices_on(job, node)) for node in cluster.nodes)
    in_train = list(_placeholder_problems(job, {"train": job.train}, placeholders.OF_NODE))
    problems = [*_problems(job, cluster), *in_train]
    if not world and not problems:
        problems.append((("devices",), "no device is left to run on", "give `devices`, or more nodes"))
    summary = None
    if job.train is not None and not in_train:
        answer = check_train(replace(job, train=train_part(job, cluster)), max(world, 1))
        problems += _train_problems(answer.faults)
        summary = answer.summary
        problems += grace_problems(job, summary)
    if problems:
        raise InputFaults(_faults(job, problems))
    return summary


def check_without_nodes(job: Job) -> list[Fault]:
    """Return the errors of a job's training that do not depend on its nodes, for a job whose nodes are wrong."""
    problems = list(_placeholder_problems(job, {"train": job.train}, placeholders.OF_NODE))
    in_train = bool(problems)
    problems += _notify_problems(job)
    if job.train is not None and not in_train:
        # Errors that depend on the number of ranks differ between the two numbers, and are dropped.
        few, many = (check_train(job, world).faults for world in (1, 8))
        problems += _train_problems(fault for fault in few if fault in many)
    return _faults(job, problems)


def _faults(job: Job, problems: Iterable[Problem]) -> list[Fault]:
    """Return problems with the lines of the job file."""
    if job.document is None:
        return [Fault(job.source, problem, remedy) for _, problem, remedy in problems]
    return [job.document.fault(*problem) for problem in problems]


def _problems(job: Job, cluster: Cluster) -> Iterator[Problem]:
    """Yield the errors outside of the training's configuration."""
    yield from _device_problems(job, cluster)
    # A command without a job file may be code with braces of its own.
    parts = {"command": job.command, "env": job.env} if job.document else {}
    yield from _placeholder_problems(job, parts, placeholders.OF_RANK)
    yield from _command_problems(job, cluster)
    yield from _notify_problems(job)
    if file := file_of(job.rank_table):
        places = [(node, devices_on(job, node)) for node in cluster.nodes]
        for problem, remedy in table_problems(file, places):
            yield ("rank_table",), problem, remedy
    if job.train is not None and job.processes == "node":
        problem = "'node' does not fit the embedded trainer, which has a rank for each device"
        yield ("processes",), problem, "leave out processes"
    if job.train is not None and job.device_ids == "physical":
        problem = "'physical' does not fit the embedded trainer, which counts the visible devices"
        yield ("device_ids",), problem, "device_ids: visible"
    kinds = dict.fromkeys(node.kind for node in cluster.nodes)
    if job.train is not None and len(kinds) > 1:
        of = {
            kind: nodeset.fold([node.name for node in cluster.nodes if node.kind == kind]) for kind in kinds
        }
        problem = f"its ranks would be on {' and '.join(f'{kind} ({names})' for kind, names in of.items())}"
        yield ("train",), problem, "choose nodes of one kind: -n NODES"
    yield from saving_faults(job.train, len(cluster.nodes))
    if job.setup is not None and (job.container or any(node.container for node in cluster.nodes)):
        problem = "`setup` prepares the node, and the ranks run in a container"
        yield ("setup",), problem, "do it in the image, or in its entry point"
    own_roles = job.fills_launcher or "MS_ROLE" in job.env
    if job.env_style == "mindspore" and not own_roles and not rank_table_wanted(job, cluster):
        problem = "no process would be MindSpore's scheduler, for which its workers wait without a rank table"
        yield (
            ("env_style",),
            problem,
            "start the program by msrun, which starts a scheduler: launch -- msrun PROGRAM",
        )
    for key, problem, remedy in network_faults(job.network, cluster):
        yield ("network", key), problem, remedy


def _notify_problems(job: Job) -> Iterator[Problem]:
    if problem := program_problem(job.notify):
        yield ("notify",), *problem


def _placeholder_problems(job: Job, parts: Mapping[str, object], known: tuple[str, ...]) -> Iterator[Problem]:
    """Yield each placeholder that is unknown, or needs data that the job does not name."""
    # `--set data=null` plans a job without its data.
    no_data = not (job.data or job.data_there or job.data_store) and ("data",) not in (
        job.document.flags if job.document else ()
    )
    for path, name in placeholders.used_in(dict(parts)):
        if name not in known:
            yield path, placeholders.describe_unknown(name), placeholders.remedy_for(name, known)
        elif name == "data" and no_data:
            yield path, "{data} is used, but the job has no data", "data: FOLDER"


def train_part(job: Job, cluster: Cluster) -> dict[str, object] | None:
    """Return the train part with the kind and number of devices from the inventory, unless the job has its own."""
    hardware = (job.train or {}).get("hardware") or {}
    if job.train is None or not isinstance(hardware, dict) or not cluster.nodes:
        return job.train
    most = max(len(devices_on(job, node)) for node in cluster.nodes)
    known: dict[str, object] = {"kind": cluster.nodes[0].kind, "devices_per_node": most}
    disks = [node.disk for node in cluster.nodes if node.disk]
    if disks and not saving_of(job.train).dir:
        known["disk"] = min(disks, key=bytes_of)
    return {**job.train, "hardware": {**known, **hardware}}


def _train_problems(faults: Iterable[TrainFault]) -> Iterator[Problem]:
    """Yield the errors that the trainer found."""
    return ((_path(fault.key), fault.what, fault.remedy) for fault in faults)


def _path(key: str) -> Key:
    """Return the keys and indexes in a path such as `train.data.blend[1].prefix`."""
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key))


def _device_problems(job: Job, cluster: Cluster) -> Iterator[Problem]:
    alike: dict[tuple[str, str], list[str]] = {}
    for node in cluster.nodes:
        missing = ", ".join(str(device) for device in job.devices or () if device not in node.devices)
        if missing:
            have = ", ".join(map(str, node.devices)) or "none"
            alike.setdefault((missing, have), []).append(node.name)
    for (missing, have), names in alike.items():
        single = len(names) == 1
        lack, they = (f"{names[0]} has", "it has") if single else (f"{nodeset.fold(names)} have", "they have")
        problem = f"{lack} no device {missing}; {they} {have} ({cluster.source})"
        yield ("devices",), problem, "ask for fewer devices, or add them to the inventory"
    unknown = [node.name for node in cluster.nodes if node.is_asked and not devices_on(job, node)]
    if unknown:
        problem = (
            f"{cluster.source} does not name the devices of {nodeset.fold(unknown)}, and no node is contacted"
        )
        yield (
            ("devices",),
            problem,
            "write them into it: `clusterctl nodes --ask` shows them; `launch` asks the nodes",
        )
    for node in cluster.nodes:
        used = devices_on(job, node)
        if node.kind == "npu" and job.device_ids == "visible" and list(used) != sorted(used):
            problem = f"{node.name}: the devices {','.join(map(str, used))} are not in ascending order"
            ordered = ",".join(map(str, sorted(used)))
            remedy = f'write "{ordered}": CANN takes ASCEND_RT_VISIBLE_DEVICES in ascending order only'
            yield ("devices",), problem, remedy


def launcher_shapes(job: Job, cluster: Cluster, master_port: int, hostfile: str = "hostfile") -> list[Shape]:
    """Return, for each node, the facts that a launcher in the job's command needs."""
    nodes, devices = cluster.nodes, [devices_on(job, node) for node in cluster.nodes]
    counts, names = tuple(map(len, devices)), tuple(node.name for node in nodes)
    return [
        Shape(
            node_rank=number,
            devices=counts,
            names=(nodes[0].name, nodes[0].host),
            master=nodes[0].address,
            master_port=master_port,
            hostfile=hostfile,
            first_rank=first,
            kind=node.kind,
            first_device=devices[number][0] if devices[number] else 0,
            node_names=names,
        )
        for number, (node, first) in enumerate(zip(nodes, accumulate(counts, initial=0), strict=False))
    ]


def _command_problems(job: Job, cluster: Cluster) -> Iterator[Problem]:
    """Yield the problems of a command with the nodes or the pushed folder, each once."""
    every = launcher_shapes(job, cluster, job.master_port or 29500)
    # Nodes that differ only in their number have the same problems, apart from the first one.
    different = {(shape.node_rank == 0, shape.here, shape.kind, shape.first_device): shape for shape in every}
    found = dict.fromkeys(
        problem
        for shape in different.values()
        if job.processes != "device"
        for problem in fill.problems(job.command, job.code, shape)
    )
    # Without a folder to push, an image may have the script.
    images = job.has_image or any(node.container for node in cluster.nodes)
    missing = missing_script(job.command, job.code) if job.code or not images else None
    if missing:
        found[missing] = None
    return ((("command",), problem.text, problem.remedy) for problem in found)


def check_reported(job: Job, cluster: Cluster, device: str, memory: int) -> TrainCheck:
    """Return the trainer's check of a job on devices that the nodes report under this name, with so many MiB each."""
    world = sum(len(devices_on(job, node)) for node in cluster.nodes)
    return check_train(replace(job, train=train_part(job, cluster), data=None), max(world, 1), device, memory)


def check_train(job: Job, world: int, reported: str | None = None, memory: int = 0) -> TrainCheck:
    """Return the trainer's check of a configuration; it runs in a separate process and imports no torch."""
    question = {
        "reported": reported,
        "reported_memory": memory,
        "train": placeholders.fill_all(job.train or {}, _local_values(job, world), f"{job.source}: train"),
        "world_size": world,
        "name": job.name,
        "base_dir": str(Path(job.source).parent.resolve()),
        "check_data": job.data is not None and job.data.is_dir(),
        "data": str(job.data) if job.data else None,
    }
    return ask_trainer(partial(decode, TrainCheck), ["check"], json.dumps(question))


def _local_values(job: Job, world: int) -> dict[str, str]:
    """Return placeholder values for a check on this machine, where the nodes' own are not known."""
    unknown = {name: f"<{name}>" for name in placeholders.OF_NODE}
    folder = job.data or job.data_there
    known = {
        # Only the nodes know the folder into which they fetch data from a store.
        **({"data": str(folder)} if folder or not job.data_store else {}),
        "world_size": str(world),
        "node_rank": "0",
    }
    return {**unknown, **known, "master_port": str(job.master_port or 29500)}


def corpus_here(job: Job) -> Path | None:
    """Return the path on this machine of the corpus that a job trains on; None if it is not known."""
    data = (job.train or {}).get("data")
    prefix = data.get("prefix") if isinstance(data, dict) else None
    if not isinstance(prefix, str) or not prefix:
        return None
    values = {"data": job.data_store, **_local_values(job, 1)}
    if "{data}" in prefix and not values["data"]:
        return None
    filled = placeholders.fill_all({"prefix": prefix}, values, job.source)["prefix"]
    return Path(job.source).parent.resolve() / str(filled)


def rehearse(job: Job, cluster: Cluster) -> Rehearsal:
    """Build and step one rank of the job's layout here, on tensors without memory; return the trainer's answer."""
    world = sum(len(devices_on(job, node)) for node in cluster.nodes)
    values = _local_values(job, world)
    train = placeholders.fill_all(train_part(job, cluster), values, f"{job.source}: train")
    return ask_trainer(
        partial(decode, Rehearsal), ["rehearse"], json.dumps({"train": train, "world_size": world})
    )


def forwarded(job: Job) -> dict[str, str]:
    """Return the variables that a job forwards from this environment; raise UsageError if some are not set."""
    if missing := missing_variables(job):
        names = ", ".join(missing)
        if job.document is None:
            remedy = f"export it, or give a value: --env {missing[0]}=VALUE"
            raise UsageError(f"--env {names}: it is not set here", remedy)
        raise UsageError(f"{job.source}: forward: {names} is not set here", "set it, or take it off the list")
    return inherited(job.forward)


def missing_variables(job: Job) -> list[str]:
    """Return the names of variables that a job forwards and this process does not have."""
    return [name for name in job.forward if name not in inherited(job.forward)]


def job_schema() -> dict[str, object]:
    """Return the JSON schema of a job file."""
    schema = schema_of(Job)
    schema["properties"]["train"] = ask_trainer(dict, ["schema"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "clusterctl job",
        **schema,
        "oneOf": [{"required": ["command"]}, {"required": ["train"]}],
    }
