"""Ask nodes which devices they have: npu-smi knows Ascend NPUs, nvidia-smi NVIDIA GPUs; without either, CPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.backends.backend import of_node
from clusterctl.checks.answers import Commands
from clusterctl.checks.query import Question, tool_paths
from clusterctl.checks.remedies import remedy_for
from clusterctl.errors import UsageError
from clusterctl.finding import Finding
from clusterctl.inventory.cluster import MAX_DEVICES
from clusterctl.ranktable.devices import VENDOR_SMI, parse_chips
from clusterctl.text import device_text
from clusterctl.transport.fanout import values

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections, Outcome

NVIDIA = ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]


@dataclass(frozen=True)
class ReportedDevices:
    """The devices that a node reports."""

    kind: str
    devices: tuple[int, ...]
    chip: str = ""
    """The name of the first device."""
    complaint: str = ""
    """The error of a driver's tool that is there and shows no device."""

    def text(self) -> str:
        """Return a text such as `8 npu (Ascend 910B3)`."""
        return f"{len(self.devices)} {self.kind}" + (f" ({self.chip})" if self.chip else "")


def ask_devices(nodes: Sequence[Node], connections: Connections) -> list[Outcome[ReportedDevices]]:
    """Ask all nodes in parallel; return an outcome for each."""
    return connections.on_each(nodes, ask_node)


def ask_node(node: Node, link: Connection) -> ReportedDevices:
    """Return the devices that one node reports."""
    questions = {
        "npu": Question([[tool, "info", "-m"] for tool in tool_paths(node, "npu-smi", VENDOR_SMI)]),
        "cuda": Question([NVIDIA]),
    }
    commands = {name: asdict(question) for name, question in questions.items()}
    found = link.ask(Commands, "examine", {"commands": commands}).commands
    npu, cuda = found.get("npu"), found.get("cuda")
    if npu is not None and npu.succeeded and (chips := sorted(parse_chips(npu.out))):
        name = re.search(r"Ascend\s?\w+", npu.out)
        return ReportedDevices("npu", _bounded(chips), name[0] if name else "")
    rows = [line.split(",", 1) for line in cuda.out.splitlines()] if cuda and cuda.succeeded else []
    gpus = [(int(row[0]), row[1].strip()) for row in rows if len(row) == 2 and row[0].strip().isdecimal()]
    if gpus:
        return ReportedDevices("cuda", _bounded([number for number, _ in gpus]), gpus[0][1])
    failed = {"npu-smi": npu, "nvidia-smi": cuda}.items()
    complaints = (f"{tool}: {done.last_line()}" for tool, done in failed if done and not done.succeeded)
    return ReportedDevices("cpu", (), complaint=next(complaints, ""))


def _bounded(devices: Sequence[int]) -> tuple[int, ...]:
    return tuple(device for device in devices if device < MAX_DEVICES)


def as_reported(node: Node, reported: ReportedDevices, *, keep_devices: bool = False) -> Node:
    """Return the node with the kind and the devices that it reports; a node of CPUs keeps its devices."""
    keeps = keep_devices or not reported.devices
    return replace(node, kind=reported.kind, devices=node.devices if keeps else reported.devices)


def completed(cluster: Cluster, connections: Connections) -> Cluster:
    """Return the cluster with the kinds and devices that its nodes report, where the inventory does not name them."""
    answers = values(ask_devices([node for node in cluster.nodes if node.is_asked], connections))
    nodes = (with_named(node, answers[node.name]) if node.is_asked else node for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def with_named(node: Node, reported: ReportedDevices) -> Node:
    """Return a node with what it reports, where the inventory does not name it; raise UsageError if both differ."""
    if "kind" not in node.unnamed and reported.kind != node.kind:
        found = reported.text() if reported.devices else reported.complaint or "no NPU and no GPU"
        tool = "npu-smi info" if node.kind == "npu" else "nvidia-smi"
        remedy = f"check `{tool}` on the node, or write `devices` into the inventory"
        raise UsageError(
            f"{node.name}: the inventory says kind {node.kind} and names no devices, and the node reports {found}",
            remedy_for(reported.complaint, remedy, "")[0],
        )
    return replace(as_reported(node, reported), unnamed=())


def checked(cluster: Cluster, connections: Connections) -> tuple[Cluster, list[Finding]]:
    """Return the completed cluster, and findings about nodes without devices; unreachable nodes stay as they are."""
    outcomes = ask_devices([node for node in cluster.nodes if node.is_asked], connections)
    reported = {outcome.node.name: outcome.get() for outcome in outcomes if outcome.ok}
    nodes: list[Node] = []
    findings: list[Finding] = []
    for node in cluster.nodes:
        try:
            after = with_named(node, reported[node.name]) if node.name in reported else node
        except UsageError as error:
            nodes.append(node)
            findings.append(Finding("bad", node.name, _reason(node, error), error.hint, "devices"))
            continue
        nodes.append(after)
        if node.is_asked and not after.unnamed:
            text = f"the inventory does not name its {' and '.join(node.unnamed)}; it reports"
            text = f"{text} {device_text(after.devices)} {after.kind}"
            findings.append(Finding("ok", node.name, text, check="devices"))
        elif not node.is_asked and not node.devices and node.kind != "cpu":
            text = "the inventory gives it no devices: no rank can start there"
            findings.append(Finding("warning", node.name, text, "name its `devices`", "devices"))
    return replace(cluster, nodes=tuple(nodes)), findings


def _reason(node: Node, error: UsageError) -> str:
    return error.message.removeprefix(f"{node.name}: ")


def unexpected(cluster: Cluster, connections: Connections) -> list[Finding]:
    """Return a warning for each node that has NPUs or GPUs, and that the inventory does not give a kind."""
    guessed = [node for node in cluster.nodes if cluster.assumed or node.unnamed == ("kind",)]
    findings = []
    for outcome in ask_devices(guessed, connections):
        if outcome.ok and (complaint := outcome.get().complaint):
            remedy, fix = remedy_for(complaint, "repair the driver; `kind: cpu` says that CPUs are meant", "")
            text = f"its ranks run as on CPUs, because {complaint}"
            findings.append(Finding("warning", outcome.node.name, text, remedy, "kind", fix))
        if outcome.ok and outcome.get().kind != "cpu":
            kind = outcome.get().kind
            text = (
                f"it has {outcome.get().text()}, and {cluster.source} does not tell: its ranks run as on CPUs"
            )
            remedy = f"--kind {kind}, or once for all: clusterctl init --hostfile {cluster.source} --ask"
            if outcome.node.unnamed:
                remedy = f"write `kind: {kind}` into it; `kind: cpu` says that CPUs are meant"
            if outcome.node.allocation:
                backend = of_node(outcome.node)
                remedy = f"ask {backend.title} for them: {backend.ask_for(kind)}"
            findings.append(Finding("warning", outcome.node.name, text, remedy, "kind"))
    return findings
