"""A sweep: one job with several values of some keys; each combination is a variant with its own run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.files import replace_file
from clusterctl.inventory.cluster import Cluster
from clusterctl.jobs.job import Job, devices_on
from clusterctl.jobs.parts.notify import masked
from clusterctl.wire.typed_json import BadValue, decode, encode, parse

MOST_VARIANTS = 200
# The beginning of the name of a sweep's folder among the runs.
PREFIX = "sweep-"
FILE = "sweep.json"
EXAMPLE = "as in --sweep train.optimizer.lr=1e-4,3e-4"
OPEN, CLOSED = "[{(", "]})"


@dataclass(frozen=True)
class Variant:
    """One combination of values, and its run."""

    label: str
    settings: tuple[str, ...]
    """KEY=VALUE, as for `--set`."""
    run: str = ""
    """The id of its run; empty before its first start."""
    phase: str = "waiting"
    problem: str = ""
    """Why it failed, in one line."""
    place: int | None = None
    """If variants run side by side: the index of its part of the devices, which a further attempt uses again."""


@dataclass(frozen=True)
class SweepRequest:
    """The request of a sweep's command line."""

    job: str
    """The job file."""
    cluster: str | None = None
    nodes: str | None = None
    exclude: str | None = None
    include: str | None = None
    devices: str | None = None
    settings: tuple[str, ...] = ()
    """`--set` of all variants."""
    each: str | None = None
    restarts: int | None = None
    hang_after: str | None = None
    share: bool = False
    notify: str | None = None
    no_checks: bool = False


@dataclass(frozen=True)
class SweepRecord:
    """The content of a sweep's file, from which another process can continue the sweep."""

    request: SweepRequest
    variants: tuple[Variant, ...]
    format: int = 1

    def with_variant(self, number: int, variant: Variant) -> SweepRecord:
        changed = [variant if place == number else entry for place, entry in enumerate(self.variants)]
        return replace(self, variants=tuple(changed))


def variants_of(texts: Sequence[str]) -> tuple[Variant, ...]:
    """Return the variants for `KEY=V1,V2` texts: every combination; raise InputFaults with all errors."""
    faults, axes = [], []
    for text in texts:
        key, equals, values = text.partition("=")
        found = _values(values)
        if not equals or not key or not all(found):
            faults.append(Fault(f"--sweep {text}", "must be KEY=V1,V2", EXAMPLE))
        elif len(set(found)) < len(found):
            faults.append(Fault(f"--sweep {text}", "has a value twice", "leave out one of them"))
        else:
            axes.append([(key, value) for value in found])
    keys = [axis[0][0] for axis in axes]
    faults += [
        Fault(
            f"--sweep {key}", "is given twice", "write all its values into one --sweep, with commas between"
        )
        for key in dict.fromkeys(key for key in keys if keys.count(key) > 1)
    ]
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST_VARIANTS:
        faults.append(
            Fault("--sweep", f"{count} variants are more than {MOST_VARIANTS}", "give fewer values")
        )
    if faults:
        raise InputFaults(faults)
    short = [key.rpartition(".")[2] for key in keys]
    names = short if len(set(short)) == len(short) else keys
    return tuple(
        Variant(
            " ".join(f"{name}={value}" for name, (_, value) in zip(names, pairs, strict=True)),
            tuple(f"{key}={value}" for key, value in pairs),
        )
        for pairs in itertools.product(*axes)
    )


def text_of(value: object) -> str:
    """Return a value as `--sweep` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _values(text: str) -> list[str]:
    """Return the parts of a text between commas; those in brackets and quotes do not count."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in OPEN) - (character in CLOSED) if not quote else 0
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def places_of(cluster: Cluster, job: Job, each: str) -> list[tuple[Cluster, Job]]:
    """Return where variants run side by side: parts of the nodes, or of the devices of each node."""
    key, _, text = each.partition("=")
    if key not in ("nodes", "devices") or not text.isdecimal() or not text.isascii() or not int(text):
        raise UsageError(f"--each {each}: must be nodes=N or devices=N", "as in --each devices=2")
    size = int(text)
    if key == "nodes":
        starts = range(0, len(cluster.nodes) - size + 1, size)
        found = [(replace(cluster, nodes=cluster.nodes[start : start + size]), job) for start in starts]
    else:
        found = [
            (replace(cluster, nodes=(node,)), replace(job, devices=devices[start : start + size]))
            for node in cluster.nodes
            for devices in [devices_on(job, node)]
            for start in range(0, len(devices) - size + 1, size)
        ]
    if not found:
        have = f"{len(cluster.nodes)} nodes" if key == "nodes" else "no node has so many devices"
        raise UsageError(
            f"--each {each}: no place for a variant ({have})", "ask for less, or choose more nodes"
        )
    return found


def is_sweep(runs: Path, name: str) -> bool:
    """Return whether a name on the command line is that of a sweep."""
    return name.startswith(PREFIX) and (runs / name / FILE).is_file()


def write_sweep(folder: Path, record: SweepRecord) -> None:
    """Write the file of a sweep."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    notify = masked(record.request.notify or "") or None
    hidden = replace(record, request=replace(record.request, notify=notify))
    replace_file(folder / FILE, json.dumps(encode(hidden), indent=2) + "\n", 0o600)


def read_sweep(folder: Path) -> SweepRecord:
    """Return the content of a sweep's file; raise a UsageError if it cannot be used."""
    path = folder / FILE
    try:
        return decode(SweepRecord, parse(path.read_bytes()))
    except (OSError, BadValue) as error:
        raise UsageError(f"{path}: unreadable: {error}", "start the sweep again") from None
