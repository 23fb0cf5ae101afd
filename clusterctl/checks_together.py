"""What only several nodes' answers together show: versions that differ, an interface that is not everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clusterctl import nodeset
from clusterctl.checks_ask import Said
from clusterctl.checks_node import MAX_SKEW, versions
from clusterctl.finding import Finding

EVERYWHERE = "all nodes"


def findings(answers: Sequence[Said], quick: bool = False) -> Iterator[Finding]:
    """Of all nodes; a single one is always like itself."""
    if answers:
        yield from same_clock(answers, quick)
    if len(answers) > 1:
        yield from same_versions(answers, quick)
        yield from same_interface(answers, quick)


def same_versions(answers: Sequence[Said], quick: bool = False) -> Iterator[Finding]:
    """Python, libraries, toolkit and driver; a version that differs, or is not there at all."""
    found = {one.node.name: versions(one) for one in answers}
    names = dict.fromkeys(name for one in found.values() for name in one)
    differ = False
    for name in names:
        groups: dict[str, list[str]] = {}
        for node, one in found.items():
            if one:  # its Python does not run: said already
                groups.setdefault(one.get(name, "none"), []).append(node)
        if len(groups) > 1:
            differ = True
            said = "; ".join(f"{nodeset.fold(those)}: {version}" for version, those in groups.items())
            text = f"{name} is not the same everywhere: {said}"
            yield Finding("warning", EVERYWHERE, text, "install the same version on every node", "versions")
    if names and not differ and not quick:
        first = next(one for one in found.values() if one)
        said = ", ".join(f"{name} {version}" for name, version in first.items())
        yield Finding("ok", EVERYWHERE, f"the same everywhere: {said}", check="versions")


def same_clock(answers: Sequence[Said], quick: bool = False) -> Iterator[Finding]:
    """Nodes apart from each other, where none is far from this machine."""
    early, late = min(answers, key=lambda one: one.offset), max(answers, key=lambda one: one.offset)
    error = (early.delay + late.delay) / 2
    near = all(abs(one.offset) <= MAX_SKEW + one.delay / 2 for one in (early, late))
    if near and late.offset - early.offset > MAX_SKEW + error:
        text = f"{early.node.name} and {late.node.name} are {late.offset - early.offset:.1f} s apart"
        yield Finding("warning", EVERYWHERE, text, "run an NTP client on all nodes", "clock")
    elif near and not quick:
        furthest, slowest = max(abs(early.offset), abs(late.offset)), max(one.delay for one in answers)
        text = f"clocks within {furthest:.2f} s of this machine's (round trips of {slowest * 1000:.0f} ms at most)"
        yield Finding("ok", EVERYWHERE, text, check="clock")


def same_interface(answers: Sequence[Said], quick: bool = False) -> Iterator[Finding]:
    """The interface that gloo, NCCL and HCCL are to use: told by the inventory, or the same name everywhere."""
    groups: dict[str, list[str]] = {}
    for one in answers:
        name = one.node.interface or one.found["place"]["interface"]
        if name:
            groups.setdefault(str(name), []).append(one.node.name)
    told = all(one.node.interface for one in answers)
    if len(groups) > 1 and not told:
        said = "; ".join(f"{nodeset.fold(those)}: {name}" for name, those in groups.items())
        text = f"the interface with the nodes' addresses has several names: {said}"
        remedy = "write each node's own as `interface` in the inventory"
        yield Finding("warning", EVERYWHERE, text, remedy, "interface")
    elif groups and not quick:
        alike = len(groups) == 1
        said = "; ".join(name if alike else f"{nodeset.fold(those)}: {name}" for name, those in groups.items())
        yield Finding("ok", EVERYWHERE, f"meet on interface {said}", check="interface")
