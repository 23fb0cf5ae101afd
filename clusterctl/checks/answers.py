"""Types for the answers of a node to the requests of the checks; each answer is decoded when it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

from clusterctl.checks.job_setup import JobSetupAnswer
from clusterctl.inventory.cluster import Node
from clusterctl.transport.answers import Hello
from clusterctl.transport.setups import SetupResult


@dataclass(frozen=True)
class CommandResult:
    """The exit status and the output of a command on a node."""

    exit_code: int | None = None
    out: str = ""
    err: str = ""
    timed_out: bool = False

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    def last_line(self) -> str:
        """Return the last line of its error output, else of its output, else its exit code."""
        lines = (self.err or self.out).strip().splitlines()
        return lines[-1][:200] if lines else f"it ended with {self.exit_code}"


@dataclass(frozen=True)
class FirstUse:
    """What the first use of a node's devices printed (touch.py)."""

    torch: str
    devices: dict[str, str] = field(hash=False)
    """By device the library's error; "" if it works."""
    sum: str
    """The error of the sum over all of them."""
    seconds: dict[str, float] = field(default_factory=dict, hash=False)
    """By device the time of some large products; 0 if it did not compute them."""


@dataclass(frozen=True)
class Disk:
    """The file system of a path: bytes and inodes for this user."""

    free: int
    total: int
    inodes_free: int
    inodes: int
    device: int
    read_only: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes of memory, with the limit of the login's control group applied."""

    total: int
    available: int


@dataclass(frozen=True)
class Processor:
    """The processor of a node: `x86_64`, its instruction sets by the kernel's names, and `AMD` or `Intel`."""

    machine: str = ""
    instructions: tuple[str, ...] = ()
    maker: str = ""


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    up: bool
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class OwnAddress:
    """The node's view of its address in the inventory."""

    ip: str | None
    """None if the node cannot resolve it."""
    own: bool
    interface: str | None
    reason: str = ""


@dataclass(frozen=True)
class PortHolder:
    """A TCP port in use; the process is known only if this user may see it."""

    port: int
    user: int
    pid: int = 0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid else f"a process of user {self.user}"


@dataclass(frozen=True)
class LiveRun:
    """Living processes of an attempt on the node."""

    run: str
    pids: tuple[int, ...]
    supervised: bool


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA adapter."""

    name: str
    """Adapter and port, as NCCL_IB_HCA takes it: `mlx5_0:1`."""
    state: str
    rate: str = ""
    link: str = ""
    """InfiniBand, or Ethernet for RoCE."""


@dataclass(frozen=True)
class Examined:
    """The state of a node."""

    workdir: str
    disks: dict[str, Disk] = field(hash=False)
    memory: Memory
    limits: dict[str, tuple[int, ...]] = field(hash=False)
    """Soft and hard limit by name; -1 is unlimited."""
    interfaces: dict[str, Interface] = field(hash=False)
    place: OwnAddress
    ports: tuple[PortHolder, ...] = ()
    reserved_ports: str = ""
    ephemeral_ports: str = ""
    rdma: tuple[RdmaPort, ...] = ()
    processor: Processor = Processor()
    runs: tuple[LiveRun, ...] = ()
    stale_agents: tuple[int, ...] = ()
    files: dict[str, str | None] = field(default_factory=dict, hash=False)
    device_files: dict[str, bool] = field(default_factory=dict, hash=False)
    """Whether this login may read and write them."""
    commands: dict[str, CommandResult | None] = field(default_factory=dict, hash=False)
    """None for a program that the node does not have."""


@dataclass(frozen=True)
class Commands:
    """The answer to a request that only runs commands."""

    commands: dict[str, CommandResult | None] = field(hash=False)


@dataclass(frozen=True)
class Knock:
    """Whether a node reached the port of another one."""

    reached: bool
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class OpenedPort:
    """The port that was opened on the master, or why it could not be opened."""

    port: int | None
    reason: str = "no answer"
    holders: tuple[PortHolder, ...] = ()


@dataclass(frozen=True)
class PythonVersions:
    """The ranks' Python: its version, and the installed packages that the trainer needs."""

    python: str
    packages: dict[str, str] = field(hash=False)


@dataclass(frozen=True)
class NodeAnswers:
    """The answers of one node."""

    node: Node
    hello: Hello
    offset: float
    """Seconds by which its clock is ahead of ours."""
    delay: float
    """Seconds of the round trip, which is the largest error of `offset`."""
    found: Examined = field(hash=False)
    setup: SetupResult | None = None
    """The changes of the node's setup; None if it has none, or if it failed."""
    setup_problem: str = ""
    """Why the node's setup failed."""
    of_job: JobSetupAnswer | None = None
    """The changes of the checked job's setup; None if no job is checked, or it has no setup."""

    def command(self, name: str) -> CommandResult | None:
        """Return how a command ended; None if the node has no such program, or was not asked for it."""
        return self.found.commands.get(name)
