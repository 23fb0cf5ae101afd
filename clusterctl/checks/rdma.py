"""Check the RDMA adapters that NCCL finds on a node. NPUs have their own ports, which checks/devices.py checks."""

from __future__ import annotations

from collections.abc import Iterator

from clusterctl.checks.answers import NodeAnswers
from clusterctl.finding import Finding
from clusterctl.text import plural

SHOW = "rdma link show"


def findings(reply: NodeAnswers) -> Iterator[Finding]:
    """Yield doctor's findings about RDMA on a node with GPUs."""
    node, ports = reply.node, reply.found.rdma
    if node.kind != "cuda":
        return
    active = [port for port in ports if port.state == "ACTIVE"]
    down = [port for port in ports if port.state != "ACTIVE"]
    if active:
        listed = ", ".join(f"{port.name} {port.rate} ({port.link})" for port in active)
        yield Finding("ok", node.name, f"RDMA by {plural(len(active), 'port')}: {listed}", check="rdma")
    if down:
        listed = ", ".join(f"{port.name} is {port.state or 'unknown'}" for port in down)
        remedy = "connect or enable it; or leave it out with NCCL_IB_HCA in the node's `env`"
        yield Finding("warning" if not active else "note", node.name, f"RDMA: {listed}", remedy, "rdma", SHOW)
    if not ports:
        yield Finding("note", node.name, "no RDMA adapter: NCCL uses TCP between nodes", check="rdma")


def before_launch(reply: NodeAnswers, rdma: str) -> Iterator[Finding]:
    """Yield why a job with `network: {rdma: on}` cannot run on a node."""
    node = reply.node
    if rdma != "on" or node.kind != "cuda" or any(port.state == "ACTIVE" for port in reply.found.rdma):
        return
    has = ", ".join(f"{port.name} {port.state}" for port in reply.found.rdma) or "no adapter"
    text = f"the job asks for RDMA (network.rdma: on), and no RDMA port is active here: {has}"
    yield Finding("bad", node.name, text, "rdma: auto, or other nodes", "rdma", SHOW)
