"""Find the checkpoint for `generate`, `serve` and `eval` on this machine or on nodes, and start their runs there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl import extras
from clusterctl.cli import choices, options, screen
from clusterctl.errors import UsageError
from clusterctl.text import plural, size

if TYPE_CHECKING:
    from clusterctl.checkpoints.checkpoint import Checkpoint, CheckpointList
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.run_folder import RunDir


@dataclass(frozen=True)
class OnNodes:
    """Nodes, and the checkpoint's folder there; `local`: a folder here that is pushed first."""

    cluster: Cluster
    folder: str = ""
    local: Path | None = None

    @property
    def name(self) -> str:
        """Return the name of the checkpoint's folder."""
        return Path(self.folder or str(self.local)).name


def here(where: str) -> Path:
    """Return the folder of a checkpoint on this machine; fetch the newest one of a run if only its nodes have it."""
    return _loading(_here(where))


def _loading(folder: Path) -> Path:
    """Say on a terminal which checkpoint is loaded, which takes some seconds, and return it."""
    if screen.error_console().is_terminal:
        screen.log(f"loading {folder}")
    return folder


def _here(where: str) -> Path:
    from clusterctl.checkpoints import find

    if find.is_folder(where):
        folder = folder_of(where)
        extras.require_trainer()
        return folder
    run = options.run_with_results(where, trains=True)
    # Before anything is fetched.
    extras.require_trainer()
    local = newest(run.checkpoints)
    if local is not None:
        return local
    with options.connected_to(run) as connections:
        return _fetched(run, find.of_run(run, connections))


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a local folder."""
    found = [path for path in folder.glob("step-*") if (path / "manifest.json").is_file()]
    return max(found, key=lambda path: path.name, default=None)


def folder_of(where: str) -> Path:
    """Return a local checkpoint: the folder itself, or the newest in it."""
    path = Path(where)
    if (path / "manifest.json").is_file():
        return path
    found = newest(path)
    if found is None:
        raise UsageError(
            f"{where}: not a checkpoint: it has no manifest.json", "name a step-... folder, or a run"
        )
    return found


def _fetched(run: RunDir, found: CheckpointList) -> Path:
    from clusterctl.checkpoints.pull import plan_pull, pull
    from clusterctl.cli.views.progress_bar import bar

    checkpoint = found.newest()
    target = (run.checkpoints / checkpoint.name).absolute()
    made = plan_pull(checkpoint, checkpoint.manifest(), target)
    with bar("pull") as drawn:
        pull(made, drawn.of)
    names = ", ".join(part.holding.holder.name for part in made.fetches)
    screen.log(f"fetched {checkpoint.name} ({size(made.bytes)}) from {names} to {target}")
    return target


def on_nodes(where: str, on: str | None, inventory: Path | None) -> OnNodes:
    """Return the nodes that load a checkpoint: those named, else one that has it, else the first of the inventory."""
    from clusterctl.checkpoints import find

    if find.is_folder(where):
        cluster = options.with_devices(_chosen(choices.cluster_of(inventory, on), on))
        folder = folder_of(where)
        screen.log(f"{folder} is pushed to {', '.join(cluster.names)}")
        return OnNodes(cluster, local=folder)
    run = options.run_with_results(where, trains=True)
    with options.connected_to(run) as connections:
        found = find.of_run(run, connections)
        whole = _whole_on(found.newest())
        cluster = choices.cluster_of(inventory, on) if on or inventory else run.read_record().cluster
        if not on:
            cluster = cluster.select(
                next((name for name in whole if name in cluster.names), cluster.names[0])
            )
        cluster = options.with_devices(_chosen(cluster, on))
        name = cluster.nodes[0].name
        # Its folder has another name on each node.
        if name in whole and len(cluster.nodes) == 1:
            screen.log(f"using {whole[name]} on {name}")
            return OnNodes(cluster, whole[name])
        local = newest(run.checkpoints)
        if local is None or local.name != found.newest().name:
            local = _fetched(run, found)
    screen.log(f"{local} is pushed to {', '.join(cluster.names)}")
    return OnNodes(cluster, local=local)


@dataclass(frozen=True)
class RankPlaces:
    """The processes that a command starts on each node."""

    per_device: bool = False
    """Whether each device gets a process and is used by no other run; else each node gets one process, for its CPU."""
    devices: tuple[int, ...] | None = None
    """The devices of each node; None: all."""


def ranks_of(cluster: Cluster, device: str | None, tensor: int = 0, pipeline: int = 0) -> RankPlaces:
    """Return where the processes run: on the nodes' GPUs or NPUs, or one on each node if `device` or the nodes say cpu.

    With both `tensor` and `pipeline`, as many devices as these need are used, the first ones of each node.
    """
    kinds = sorted({device or node.kind for node in cluster.nodes})
    if len(kinds) > 1:
        raise UsageError(
            f"the nodes have devices of the kinds {' and '.join(kinds)}, which cannot compute together",
            "name nodes of one kind with --on, or use --device cpu",
        )
    if kinds == ["cpu"]:
        _check_parts(len(cluster.nodes), tensor, pipeline)
        return RankPlaces()
    wrong = [node for node in cluster.nodes if node.kind != kinds[0]]
    if wrong:
        raise UsageError(
            f"--device {kinds[0]}: {wrong[0].name} has the kind {wrong[0].kind}",
            f"use --device {wrong[0].kind} or cpu, or correct `kind` in cluster.yaml",
        )
    nodes, wanted = len(cluster.nodes), tensor * pipeline
    if not wanted:
        return RankPlaces(per_device=True)
    fewest = min(len(node.devices) for node in cluster.nodes)
    if wanted % nodes or wanted > nodes * fewest:
        raise UsageError(
            f"--tensor {tensor} x --pipeline {pipeline} are {wanted} ranks, "
            f"and the {nodes} nodes have {fewest} devices each",
            "choose numbers whose product is a multiple of the nodes, at most all devices",
        )
    return RankPlaces(True, cluster.nodes[0].devices[: wanted // nodes])


def _check_parts(nodes: int, tensor: int, pipeline: int) -> None:
    """Refuse `--tensor` and `--pipeline` that do not fit one process per node; 0 means computed from the nodes."""
    wanted = max(1, tensor) * max(1, pipeline)
    if (tensor and pipeline and wanted != nodes) or nodes % wanted:
        given = " x ".join(
            f"--{name} {parts}" for name, parts in (("tensor", tensor), ("pipeline", pipeline)) if parts
        )
        raise UsageError(
            f"{given} is {plural(wanted, 'rank')}, but {plural(nodes, 'node')} of kind cpu "
            f"{'has' if nodes == 1 else 'have'} one each",
            f"name {plural(wanted, 'node')} with --on, or choose numbers whose product is {nodes}",
        )


def job_on(
    target: OnNodes, verb: str, arguments: list[str], ranks: RankPlaces, inputs: Path | None = None
) -> Job:
    """Return a job that runs a command of the trainer with a checkpoint, with processes as `ranks` says.

    inputs: a folder that is pushed and has the checkpoint, unless that is on the node, and what else is read.
    """
    from clusterctl.jobs.job import Job

    folder = target.folder or ("{data}/checkpoint" if inputs else "{data}")
    return Job(
        name=f"{verb}-{target.name}"[:41],
        command=("python", "-u", "-m", "trainer", verb, "--checkpoint", folder, *arguments),
        data=inputs or target.local,
        trainer=True,
        processes="device" if ranks.per_device else "node",
        devices=ranks.devices,
        share_devices=not ranks.per_device,
        rank_table="auto" if ranks.per_device else "never",
        source=f"clusterctl {verb}",
    )


def answer_of(
    target: OnNodes, verb: str, arguments: list[str], files: Mapping[str, Path | bytes], ranks: RankPlaces
) -> str:
    """Run a command of the trainer on nodes to its end; return what rank 0 wrote on stdout.

    files: what the command reads at `{data}/NAME`, next to the checkpoint.
    """
    from clusterctl.cli.launch.run import launch_job
    from clusterctl.client.attempts import Target
    from clusterctl.jobs.run_folder import new_run

    run = new_run(job_on(target, verb, arguments, ranks).name, options.runs_folder())
    inputs = run.root / "inputs"
    for name, content in files.items():
        _put(content, inputs / name)
    for file in target.local.rglob("*") if target.local else ():
        if target.local and file.is_file():
            _put(file, inputs / "checkpoint" / file.relative_to(target.local))
    job = job_on(target, verb, arguments, ranks, inputs if inputs.is_dir() else None)
    launch_job(Target(job, target.cluster), run=run, quiet=True)
    record = run.read_record()
    log = run.log(record.cluster.nodes[0].name, 0, "out", record.attempt)
    return log.read_text(encoding="utf-8", errors="replace")


def _put(content: Path | bytes, target: Path) -> None:
    """Write or link a file among the inputs of a run."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        target.write_bytes(content)
        return
    try:
        os.link(content.resolve(), target)
    except OSError:
        shutil.copyfile(content, target)


def _whole_on(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the nodes that have every file of a checkpoint, with its folder on each."""
    from clusterctl.checkpoints.holder import HERE

    return {
        holding.holder.name: holding.entry.path
        for holding in checkpoint.holdings
        if holding.holder.name != HERE
        and holding.entry.digest
        and len(holding.entry.have) == holding.entry.count
    }


def _chosen(cluster: Cluster, on: str | None) -> Cluster:
    """Return the named nodes, or the first one."""
    return cluster if on else cluster.select(cluster.names[0])
