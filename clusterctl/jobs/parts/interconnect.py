"""Read the `network` part of a job, and return the variables that turn RDMA on or off in NCCL and HCCL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clusterctl.document import Section
from clusterctl.errors import did_you_mean
from clusterctl.inventory.cluster import Cluster

RDMA_CHOICES = ("auto", "on", "off")


@dataclass(frozen=True)
class Tuning:
    """One setting of RDMA: its key, the variables of NCCL and HCCL, and the values that both take."""

    key: str
    nccl: str
    hccl: str
    least: int
    most: int
    text: str


TUNING = (
    Tuning("traffic_class", "NCCL_IB_TC", "HCCL_RDMA_TC", 0, 252, "Traffic class, a multiple of 4."),
    Tuning("service_level", "NCCL_IB_SL", "HCCL_RDMA_SL", 0, 7, "Service level."),
    Tuning("timeout", "NCCL_IB_TIMEOUT", "HCCL_RDMA_TIMEOUT", 5, 22, "Retry time: 4.096 us x 2^timeout."),
    Tuning("retries", "NCCL_IB_RETRY_CNT", "HCCL_RDMA_RETRY_CNT", 1, 7, "Retries of a message."),
)


@dataclass(frozen=True)
class NetworkOptions:
    """Settings of the network between the ranks; 0 leaves a setting to NCCL or HCCL."""

    rdma: str = "auto"
    """auto: the library decides; on: NCCL fails without it; off: NCCL uses TCP."""
    settings: tuple[tuple[str, int], ...] = ()
    """Keys of TUNING with their values."""

    def environment(self, kind: str) -> dict[str, str]:
        """Return the variables for ranks on devices of this kind."""
        given = dict(self.settings)
        if kind == "npu":
            return {row.hccl: str(given[row.key]) for row in TUNING if row.key in given}
        if kind != "cuda":
            return {}
        chosen = {
            "on": {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"},
            "off": {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"},
        }.get(self.rdma, {})
        return {**chosen, **{row.nccl: str(given[row.key]) for row in TUNING if row.key in given}}


def read_network(top: Section) -> NetworkOptions:
    """Return the `network` part of a job."""
    inner = top.section("network")
    rdma = _word(inner.value.get("rdma"))
    inner.taken.append("rdma")
    if rdma not in RDMA_CHOICES:
        inner.fault("rdma", f"unknown {rdma!r}", did_you_mean(rdma, RDMA_CHOICES) or "auto, on or off")
        rdma = "auto"
    settings = []
    for row in TUNING:
        value = inner.take(row.key, int)
        if value is None:
            continue
        if not row.least <= value <= row.most or (row.key == "traffic_class" and value % 4):
            multiple = ", a multiple of 4" if row.key == "traffic_class" else ""
            inner.fault(row.key, f"{value} is not a possible value", f"{row.least} to {row.most}{multiple}")
        settings.append((row.key, value))
    if rdma == "off" and settings:
        inner.fault(settings[0][0], "is a setting of RDMA, and rdma is off", "leave it out")
    inner.done()
    return NetworkOptions(rdma, tuple(settings))


def _word(value: object) -> str:
    """Return a choice; YAML programs may have read `on` and `off` as true and false."""
    if value is None:
        return "auto"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def network_faults(options: NetworkOptions, cluster: Cluster) -> Iterator[tuple[str, str, str]]:
    """Yield key, problem and remedy of each setting that does not fit the nodes' devices."""
    kinds = {node.kind for node in cluster.nodes}
    if "cpu" in kinds and (options.rdma == "on" or options.settings):
        key = "rdma" if options.rdma == "on" else options.settings[0][0]
        yield key, "CPU ranks exchange by gloo, which has no RDMA", "leave `network` out"
    if "npu" in kinds and options.rdma == "off" and len(cluster.nodes) > 1:
        problem = "HCCL has no other way between nodes than the NPUs' own RDMA ports"
        yield "rdma", problem, "rdma: auto"
