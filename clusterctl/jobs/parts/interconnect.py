"""The `network` part of a job: the variables that turn RDMA on or off in NCCL and HCCL, and tune it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clusterctl.inventory.cluster import Cluster
from clusterctl.wire.fields import Checked, Problem, setting

# The variables of NCCL and HCCL for each key.
VARIABLES = {
    "traffic_class": ("NCCL_IB_TC", "HCCL_RDMA_TC"),
    "service_level": ("NCCL_IB_SL", "HCCL_RDMA_SL"),
    "timeout": ("NCCL_IB_TIMEOUT", "HCCL_RDMA_TIMEOUT"),
    "retries": ("NCCL_IB_RETRY_CNT", "HCCL_RDMA_RETRY_CNT"),
}


def _word(value: object) -> str:
    """Return a choice; YAML programs may have read `on` and `off` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class NetworkOptions(Checked):
    """Settings of the network between the ranks; None leaves a setting to NCCL or HCCL."""

    rdma: str = setting("auto", choices=("auto", "on", "off"), read=_word)
    """auto: NCCL and HCCL decide. on: NCCL fails where it finds no RDMA. off: NCCL uses TCP."""
    traffic_class: int | None = setting(None, least=0, most=252, example="0 to 252, a multiple of 4")
    """Traffic class, a multiple of 4. Sets NCCL_IB_TC or HCCL_RDMA_TC."""
    service_level: int | None = setting(None, least=0, most=7)
    """Service level. Sets NCCL_IB_SL or HCCL_RDMA_SL."""
    timeout: int | None = setting(None, least=5, most=22)
    """Retry time: 4.096 us x 2^timeout. Sets NCCL_IB_TIMEOUT or HCCL_RDMA_TIMEOUT."""
    retries: int | None = setting(None, least=1, most=7)
    """Retries of a message. Sets NCCL_IB_RETRY_CNT or HCCL_RDMA_RETRY_CNT."""

    @property
    def given(self) -> dict[str, int]:
        """Return the keys that tune RDMA, with their values."""
        return {key: value for key in VARIABLES if (value := getattr(self, key)) is not None}

    def environment(self, kind: str) -> dict[str, str]:
        """Return the variables for ranks on devices of this kind."""
        if kind not in ("cuda", "npu"):
            return {}
        tuned = {VARIABLES[key][kind == "npu"]: str(value) for key, value in self.given.items()}
        chosen = {
            "on": {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"},
            "off": {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"},
        }.get(self.rdma if kind == "cuda" else "", {})
        return {**chosen, **tuned}

    def problems(self) -> Iterator[Problem]:
        if (self.traffic_class or 0) % 4:
            problem = f"{self.traffic_class} is not a possible value"
            yield "traffic_class", problem, "0 to 252, a multiple of 4"
        if self.rdma == "off" and self.given:
            yield next(iter(self.given)), "is a setting of RDMA, and rdma is off", "leave it out"


def network_faults(options: NetworkOptions, cluster: Cluster) -> Iterator[Problem]:
    """Yield key, problem and remedy of each setting that does not fit the nodes' devices."""
    kinds = {node.kind for node in cluster.nodes}
    if "cpu" in kinds and (options.rdma == "on" or options.given):
        key = "rdma" if options.rdma == "on" else next(iter(options.given))
        yield key, "CPU ranks exchange by gloo, which has no RDMA", "leave `network` out"
    if "npu" in kinds and options.rdma == "off" and len(cluster.nodes) > 1:
        problem = "HCCL has no other way between nodes than the NPUs' own RDMA ports"
        yield "rdma", problem, "rdma: auto"
