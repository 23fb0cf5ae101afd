"""`init`: write a commented cluster.yaml."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import flag, option
from clusterctl.document import parse_document
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.hostfile.node_lists import FILES
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.inventory.cluster import Cluster
from clusterctl.settings import Settings, load_settings

if TYPE_CHECKING:
    from clusterctl.hostfile.detect import Source as NodeSource
    from clusterctl.migrate.found import Found
    from clusterctl.migrate.translation import Translation


OUTPUT = Path("cluster.yaml")
# The host of a node that is reached without SSH: its devices are asked.
THIS_MACHINE = ("local",)
# Without the name --hostfile that other commands have for it.
Source = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="COMMAND|FILE|DIR",
        help="Write a job from another trainer's command, script or yaml, or to fine-tune the model of DIR.",
    ),
]


def init(
    hosts: str | None = option("Names or addresses of the nodes: node[1-4], 10.0.0.[1-8].", metavar="SET"),
    hostfile: Path | None = option(f"Take the nodes from a {FILES}; slots become devices.", metavar="FILE"),
    devices: str | None = option(
        'Devices per node where the file does not say: 4, "[0,4)", 0,3. Default: 8.', metavar="RANGE"
    ),
    kind: str | None = option("Kind of the devices: cpu, cuda or npu. Default: npu.", metavar="KIND"),
    output: Path = option("The file to write.", "--output", "-o", default=OUTPUT, metavar="FILE"),
    job: str | None = option("Write NAME.yaml instead: a commented job that trains a model.", metavar="NAME"),
    source: Source = None,
    ask: bool = flag("Ask the nodes for the kind and number of their devices."),
    cluster: Path | None = option(
        "The inventory with the default kind and number of devices, for --hosts and --job.",
        "--cluster",
        "-c",
        metavar="FILE",
    ),
    force: options.Force = False,
    dry_run: options.DryRun = False,
) -> None:
    """Write a commented cluster.yaml as a start. Never overwrites a file without --force."""
    if source is not None:
        if hosts is not None or hostfile is not None:
            raise UsageError("--from writes a job; --hosts and --hostfile describe nodes", "leave them out")
        _write_from(source, job, force, dry_run)
    elif job is not None:
        if nodes := [
            name for name, value in (("--hosts", hosts), ("--hostfile", hostfile)) if value is not None
        ]:
            raise UsageError(f"--job writes a job; {nodes[0]} describes nodes", "write one after the other")
        if output != OUTPUT:
            raise UsageError(
                f"--job {job}: the file gets this name, so -o {output} is unused", "leave out -o"
            )
        _write_job(job, cluster, force, dry_run)
    elif hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile can't be given together", "one of them names the nodes")
    elif ask and hosts is None and hostfile is None:
        raise UsageError("--ask needs nodes to ask", "name them: --hosts node[1-4], or --hostfile FILE")
    else:
        if hostfile is None and not ask and hosts not in THIS_MACHINE:
            known = _devices_of(cluster)
            kind, devices = kind or _kind_of_settings() or known[0], devices or known[1]
        _write_nodes(
            hostfile if hosts is None else hosts, devices, kind, output, ask=ask, force=force, dry_run=dry_run
        )


def _write_nodes(
    where: str | Path | None,
    devices: str | None,
    kind: str | None,
    output: Path,
    *,
    ask: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Write the nodes of a node set or of a file."""
    from clusterctl.hostfile import detect
    from clusterctl.hostfile import init as hostfile_init

    if not isinstance(where, Path):
        ask = ask or (not kind and not devices and where in THIS_MACHINE)
        kind = kind or _kind_of_settings()
        cluster = hostfile_init.from_hosts(where, devices, kind, output.stem)
        cluster = _asked(cluster, kind, keep_devices=bool(devices)) if ask else cluster
        _write(cluster, "", output, force, dry_run)
        _say_what_is_assumed(cluster, kind, ask=ask or where is None)
        return
    nodes = detect.read(where)
    if nodes.cluster is None:
        kind = kind or _kind_of_settings()
    cluster = hostfile_init.from_file(nodes, devices, kind, output.stem)
    has_devices = bool(devices) or not hostfile_init.unsaid(nodes)
    cluster = _asked(cluster, kind, keep_devices=has_devices) if ask else cluster
    _write(cluster, where.name, output, force, dry_run)
    _say_what_is_assumed(cluster, kind, ask=ask)
    if not ask:
        _say_what_is_not_the_files(nodes, devices)


def _devices_of(inventory: Path | None) -> tuple[str | None, str | None]:
    """Return the kind and the number of the devices of an inventory's first node; None if there is none."""
    # The default file may be wrong, and is to be replaced then.
    with suppress(*(() if inventory else (ClusterctlError,))):
        if inventory or choices.has_inventory():
            node = choices.cluster_of(inventory).nodes[0]
            return node.kind, str(len(node.devices)) if node.devices else None
    return None, None


def _kind_of_settings() -> str | None:
    """Return the kind of the devices in the settings; None if it is the default."""
    kind = load_settings().kind
    return kind if kind != Settings.kind else None


def _say_what_is_assumed(cluster: Cluster, kind: str | None, *, ask: bool) -> None:
    """Report the kind of the devices if no option names it."""
    kinds = {node.kind for node in cluster.nodes}
    if not ask and kind is None and kinds == {"npu"}:
        screen.log("kind npu is assumed: --ask asks the nodes, --kind cpu or --kind cuda names another")
        screen.log("(without a cluster.yaml, nodes of a hostfile count as cpu: their devices are not known)")


def _asked(cluster: Cluster, kind: str | None, *, keep_devices: bool) -> Cluster:
    """Return the cluster with the devices that its nodes report; `--kind` takes precedence."""
    from clusterctl.checks.kinds import as_reported, ask_devices
    from clusterctl.inventory import nodeset
    from clusterctl.transport.fanout import values

    with choices.connected(cluster) as connections:
        answers = values(ask_devices(cluster.nodes, connections))
    groups: dict[str, list[str]] = {}
    nodes = []
    for node in cluster.nodes:
        reported = answers[node.name]
        groups.setdefault(reported.text(), []).append(node.name)
        node = as_reported(node, reported, keep_devices=keep_devices)
        node = replace(node, devices=(0,)) if not (reported.devices or keep_devices) else node
        nodes.append(replace(node, kind=kind) if kind else node)
    for text, names in groups.items():
        screen.log(f"{nodeset.fold(names)}: {'no NPU and no GPU' if text == '0 cpu' else text}")
    return replace(cluster, nodes=tuple(nodes))


def _write(cluster: Cluster, origin: str, output: Path, force: bool, dry_run: bool) -> None:
    from clusterctl.files import save_new
    from clusterctl.hostfile import init as hostfile_init

    text = hostfile_init.commented(cluster, origin)
    # Refuse to write a file that could not be read again.
    inventory_cluster.parse(text, output)
    if dry_run:
        screen.write(text)
    elif save_new(output, text, force=force):
        screen.log(f"wrote {output}; check the result: clusterctl nodes -c {output}")
    else:
        screen.log(f"{output}: has this content already")


def _write_job(name: str, inventory: Path | None, force: bool, dry_run: bool) -> None:
    """Write a commented job; its precision and batch fit the nodes of the inventory, if there is one."""
    from clusterctl.files import save_new
    from clusterctl.jobs.job_template import job_text

    path = _job_path(name)
    kind, devices = "cpu", 1
    if inventory or choices.has_inventory():
        cluster = choices.cluster_of(inventory)
        kind, devices = cluster.nodes[0].kind, sum(len(node.devices) for node in cluster.nodes)
    text = job_text(path.stem, path.name, kind, devices)
    if dry_run:
        screen.write(text)
    elif save_new(path, text, force=force):
        screen.log(
            f"wrote {path}; the comment at its top shows how to build the data; next: clusterctl plan {path}"
        )
    else:
        screen.log(f"{path}: has this content already")


def _job_path(name: str) -> Path:
    from clusterctl.jobs.job import RUN_NAME

    path = Path(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if not RUN_NAME.fullmatch(path.stem):
        raise UsageError(f"--job {name}: not a name", "letters, digits, '.', '_' and '-', at most 41")
    return path


def _write_from(source: str, job: str | None, force: bool, dry_run: bool) -> None:
    """Write the job for another program's training or for a folder of weights; print the command for other verbs."""
    from clusterctl.files import save_new
    from clusterctl.migrate import read, write
    from clusterctl.migrate.commands import command_text

    # Path("") would be the current folder.
    # A command can be longer than any path, for which pathlib raises.
    if source and os.path.isdir(source):
        result = _tuning_of(Path(source))
        found = result.found
    else:
        found = read.read(source)
        if found.choice:
            screen.log(
                f"warning: {found.choice}; for another one, give it alone: --from 'COMMAND'", style="yellow"
            )
        if found.verb != "job":
            screen.write(command_text(found))
            return
        result = _translated(found, source)
    if job is not None:
        found.name = _job_path(job).stem
    path = _job_path(job or found.name)
    text = write.job_text(result)
    # What is written is understood.
    parse_document(text, str(path))
    if dry_run:
        screen.write(text)
        return
    if not save_new(path, text, force=force):
        screen.log(f"{path}: has this content already")
        return
    missing = f", {len(result.unmapped)} not (at its end, with the reasons)" if result.unmapped else ""
    mapped = f": {len(result.mapped)} options mapped{missing}" if result.mapped else ""
    screen.log(f"wrote {path}{mapped}; then: clusterctl plan {path}")


def _translated(found: Found, source: str) -> Translation:
    from clusterctl.migrate.translate import translate

    result = translate(found)
    # A script of GLM describes a complete training without any option.
    if not result.mapped and found.family != "ascend-glm":
        raise UsageError(
            f"--from {source}: none of its options is known",
            "name a command, script or configuration of Megatron, DeepSpeed, MindFormers, OneFlow or GLM",
        )
    return result


def _tuning_of(folder: Path) -> Translation:
    """Return the job that fine-tunes the model of a folder."""
    from clusterctl.jobs.ask_trainer import ask_trainer
    from clusterctl.migrate.fine_tuning import tuned
    from clusterctl.wire.results import Weights
    from clusterctl.wire.typed_json import decode

    return tuned(folder, ask_trainer(partial(decode, Weights), ["weights-model", str(folder)]))


def _say_what_is_not_the_files(source: NodeSource, devices: str | None) -> None:
    from clusterctl.hostfile import convert
    from clusterctl.hostfile import init as hostfile_init
    from clusterctl.inventory import nodeset

    unsaid = hostfile_init.unsaid(source)
    if unsaid and not devices:
        count, names = hostfile_init.USUAL_DEVICES, nodeset.fold(unsaid)
        screen.log(
            f"{source.path} does not say which devices {names} have: {count} each are written; --devices changes that"
        )
    for fault in convert.losses(source, "cluster"):
        screen.log(f"lost: {fault.where}: {fault.what}", style="yellow")
