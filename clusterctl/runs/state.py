"""The state of a run and of its ranks: the types, and the file state.json with the last state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.files import add_lines
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import FORMAT
from clusterctl.jobs.run_folder import damaged
from clusterctl.jobs.run_lines import Metric, read_metric
from clusterctl.wire.typed_json import BadValue, decode, encode

if TYPE_CHECKING:
    from clusterctl.jobs.run_folder import RunDir


# Seconds without a heartbeat after which a supervisor counts as stuck; it sends one every second.
SUPERVISOR_SILENCE = 20.0
# Process states in which a process does not run, by their letters in proc(5).
PROCESS_STATES = {
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "waiting in the kernel, for a disk or a device",
}


class RankPhase(str, Enum):
    """The phase of a rank's process, as its supervisor records it."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"

    __str__ = str.__str__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


@dataclass(frozen=True)
class RankState:
    """The state of a rank: its process, how it ended, and how far it has trained."""

    rank: int
    state: RankPhase = RankPhase.EXITED
    node: str = ""
    device: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    start_time: int | None = None
    """Clock ticks from the node's boot to the start of the process."""
    boot_id: str = ""
    started: float | None = None
    """Seconds since the epoch, by the node's clock."""
    ended: float | None = None
    monotonic: float | None = None
    """When the process ended, by the node's monotonic clock."""
    at: float | None = None
    """When the process ended, by the clock of this machine; None if the clocks were not compared."""
    exit_code: int | None = None
    signal: int | None = None
    step: int | None = None
    """The last step that its trainer finished."""
    step_age: float | None = None
    """Seconds since that step, by the node's clock."""
    step_seconds: float | None = None
    """The rank's own time for a step, without waiting for others."""
    hang: float | None = None
    """Seconds without progress after which the rank counted as hung."""
    silent: bool = False
    """The hang was detected from a lack of output, not of steps."""
    stopped: bool = False
    """The rank hung because a signal had stopped its process."""
    world: str = ""
    """What the rank's launcher did that the plan does not have."""
    ended_here: bool = False
    """Its supervisor was ending the ranks when it ended."""
    stands: str = ""
    """Where all ranks stood when the run hung."""
    odd: bool = False
    """The rank stood somewhere else than the others."""
    unseen: str = ""
    """Why the stacks of some ranks are not known."""
    worker: int | None = None
    """The global rank of the worker that failed below this rank, a launcher such as torchrun."""
    oom: bool = False
    """The kernel killed the process because memory ran out."""
    kernel: tuple[str, ...] = ()
    """Messages of the node's kernel about the process."""
    full: str = ""
    """A folder whose disk was full when the rank failed."""
    error: str = ""
    """The exception that torch recorded in the rank's error file."""

    @property
    def end_time(self) -> float:
        """When the process ended: by this machine's clock if the clocks were compared, else by the node's."""
        return (self.ended or 0.0) if self.at is None else self.at


@dataclass(frozen=True)
class NodeFailure:
    """The first failure of an attempt on one node, as its supervisor recorded it."""

    rank: int
    local_rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    ended: float | None = None
    monotonic: float | None = None
    step: int | None = None
    hang: float | None = None
    silent: bool = False
    stopped: bool = False
    world: str = ""


@dataclass(frozen=True)
class SupervisorState:
    """Whether the supervisor of an attempt lives on its node, and responds."""

    alive: bool = False
    silent: float | None = None
    """Seconds since its last heartbeat; it sends one every second."""
    process: str = ""
    """The state of its process, a letter of proc(5)."""
    rebooted: bool = False
    """The node was restarted since the supervisor was started."""

    def describe(self) -> str:
        """Return in words why it does not respond."""
        why = PROCESS_STATES.get(self.process, "no heartbeat")
        return why if self.silent is None else f"{why} for {self.silent:.0f} s"


@dataclass(frozen=True)
class NodeState:
    """The state of an attempt on one node, as its supervisor recorded it."""

    state: Phase
    first_failure: NodeFailure | None = None
    supervisor_lost: bool = False
    """The supervisor died, or did not respond, and the agent ended the ranks in its place."""
    unresponsive: SupervisorState | None = None
    """The supervisor before it was ended, if it did not respond."""
    left: tuple[str, ...] = ()
    """Processes that could not be ended, with name and pid."""
    adopted: int = 0
    """Number of detached processes that ranks had left behind and that were ended."""


@dataclass(frozen=True)
class Heartbeat:
    """The last content of a rank's heartbeat file, and its age in seconds."""

    text: str
    age: float


@dataclass(frozen=True)
class KernelReport:
    """The report of a node's kernel about one process."""

    oom: bool = False
    kernel: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeAnswer:
    """A node's answer about an attempt."""

    supervisor: SupervisorState | None = None
    node: NodeState | None = None
    ranks: tuple[RankState, ...] = ()
    heartbeats: dict[int, Heartbeat] = field(default_factory=dict, hash=False)
    pace: dict[int, float] = field(default_factory=dict, hash=False)
    clock: float | None = None
    """The node's monotonic clock minus the clock of this machine; measured only after a failure."""
    kernel: dict[int, KernelReport] = field(default_factory=dict, hash=False)
    """By pid; asked for only after a failure."""


@dataclass(frozen=True)
class FollowEnd:
    """The last part of a node's answer to `follow`."""

    state: Phase
    """How the attempt ended on the node; UNKNOWN if only existing output was copied."""
    report: NodeAnswer | None = None
    """The state of an attempt that finished."""


@dataclass(frozen=True)
class RunState:
    """The last known state of a run."""

    phase: Phase
    nodes: dict[str, Phase] = field(hash=False)
    ranks: tuple[RankState, ...] = ()
    failure: RankState | None = None
    """The rank that failed first."""
    step: Metric | None = None
    """The metrics of the last step."""
    unreachable: dict[str, str] = field(default_factory=dict, hash=False)
    """By node, why it could not be asked."""
    controller: int | None = None
    """The pid of the run's controller on this machine; None if no process is in charge."""
    verdict: str = ""
    """The decision after the last failure, and its reason."""
    orphaned: tuple[str, ...] = ()
    """Nodes that answer, but whose supervisor died or did not respond."""
    rebooted: tuple[str, ...] = ()
    """Nodes that were restarted since the attempt began."""
    unresponsive: dict[str, str] = field(default_factory=dict, hash=False)
    """By node, why its supervisor does not respond, or did not before it was ended."""
    left: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """By node, what still runs after the end: processes that could not be ended, or ranks of a lost node."""
    adopted: dict[str, int] = field(default_factory=dict, hash=False)
    """By node, how many detached processes that ranks had left behind were ended."""

    @property
    def is_final(self) -> bool:
        return self.phase.is_final

    def as_json(self) -> dict[str, object]:
        """Return the JSON object of state.json, without empty fields of ranks."""
        bare = {name: encode(getattr(self, name)) for name in ("phase", "nodes", "unreachable")}
        return {
            **bare,
            "step": self.step.as_json() if self.step else None,
            "ranks": encode(self.ranks, sparse=True),
            "failure": encode(self.failure, sparse=True),
            "controller": self.controller,
            "verdict": self.verdict,
            "orphaned": list(self.orphaned),
            "rebooted": list(self.rebooted),
            "unresponsive": self.unresponsive,
            "left": encode(self.left),
            "adopted": self.adopted,
        }


def write_state(run: RunDir, state: RunState, path: Path | None = None) -> None:
    """Record a state in the run's folder."""
    run.write_json(path or run.state, {"format": FORMAT, **state.as_json()})


def read_state(run: RunDir, path: Path | None = None) -> RunState | None:
    """Return the last recorded state, or None before the first; raise a UsageError if the file is damaged."""
    path = path or run.state
    if not path.exists():
        return None
    try:
        value = run.read_json(path)
        if isinstance(value, dict) and isinstance(value.get("format"), int) and value["format"] > FORMAT:
            raise BadValue("a newer version of clusterctl wrote it")
        step = read_metric(value.pop("step", None)) if isinstance(value, dict) else None
        return replace(decode(RunState, value), step=step)
    except BadValue as error:
        raise damaged(path, error) from None


def end_half_line(run: RunDir) -> int:
    """Add a line break to an incomplete last line of the metrics from a lost node; return the size of the file."""
    if not run.metrics.exists():
        return 0
    return add_lines(run.metrics, b"")
