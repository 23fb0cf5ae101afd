"""The `sge`, `pbs` and `lsf` parts of a job: what `clusterctl submit` asks these batch systems for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from clusterctl.inventory.cluster import KINDS, MAX_DEVICES
from clusterctl.jobs.parts.queue import QueueOptions, extra_problems, lines, word
from clusterctl.wire.fields import Problem, setting

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
