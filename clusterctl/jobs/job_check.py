"""Check a job against the nodes of a cluster, before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from clusterctl.document import Key
from clusterctl.errors import Fault, InputFaults
from clusterctl.inventory.cluster import (
    Cluster,
    bytes_of,
)
from clusterctl.jobs import launchers, placeholders
from clusterctl.jobs.ask_trainer import ask_trainer
from clusterctl.jobs.job import Job, devices_on
from clusterctl.jobs.parts.interconnect import network_faults
from clusterctl.jobs.parts.own_table import file_of
from clusterctl.jobs.parts.saving import saving_faults, saving_of
from clusterctl.jobs.parts.table_problems import table_problems
from clusterctl.jobs.program_files import missing_script
from clusterctl.jobs.train_summary import Rehearsal, TrainCheck, TrainFault, TrainSummary, read_check
from clusterctl.json_types import JsonObject
from clusterctl.typed_json import decode


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
    # Without a folder to push, an image may have the script.
    images = job.container or job.kubernetes or job.modelarts or any(node.container for node in cluster.nodes)
    missing = missing_script(job.command, job.code) if job.code or not images else None
    if missing:
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
