"""The kinds of faults, when they strike, and the expected end of each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STEPS, SAVE_EVERY = 30, 5
# Of the faults that may hit the embedded trainer, those that do.
REAL_SHARE = 0.3
# The nodes of a run; node3 is the spare.
NODES = ("node1", "node2")

BEFORE, PUSH, STARTING, FIRST_STEP, RUNNING, CHECKPOINT, STOP, ANY = (
    "before",
    "push",
    "start",
    "first step",
    "running",
    "checkpoint",
    "stop",
    "any moment",
)
AT_WORK = (STARTING, FIRST_STEP, RUNNING, CHECKPOINT)
LOST = ("node killed", "node frozen", "link cut for long")
# Faults that make nodes unreachable, for a while or forever.
AWAY = (
    *LOST,
    "link cut briefly",
    "launcher cut off",
)


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    phases: tuple[str, ...]
    real: bool = False
    """Whether it is also injected into the embedded trainer."""
    per_round: int = 1
    """How many times it occurs in one round of all kinds."""
    only_real: bool = False
    """Whether it is only injected into the embedded trainer."""
    details: tuple[str, ...] = ()
    """The variants, one of which is drawn for each fault."""


KINDS = {
    "rank killed": Kind((*AT_WORK, STOP), real=True),
    "rank crashed": Kind((RUNNING,), details=("exit3", "raise", "signal11", "signal6")),
    "rank frozen": Kind((FIRST_STEP, RUNNING, CHECKPOINT, STOP), real=True),
    "crash at the same step": Kind((RUNNING,)),
    "user's mistake": Kind((STARTING,)),
    "supervisor killed": Kind((*AT_WORK, STOP), real=True),
    "controller killed": Kind((*AT_WORK, STOP), real=True),
    "command killed": Kind((PUSH, *AT_WORK)),
    "Ctrl-C": Kind((PUSH, *AT_WORK, STOP)),
    "node killed": Kind((PUSH, *AT_WORK, STOP), real=True),
    "node frozen": Kind((PUSH, FIRST_STEP, RUNNING, CHECKPOINT)),
    "link cut briefly": Kind((PUSH, RUNNING, CHECKPOINT)),
    "link cut for long": Kind((RUNNING, CHECKPOINT)),
    "connection dropped": Kind((RUNNING, CHECKPOINT, STOP), per_round=2),
    "launcher cut off": Kind((RUNNING,)),
    "disk full": Kind((STARTING, RUNNING, CHECKPOINT), real=True, details=("bytes", "inodes")),
    "children left behind": Kind((RUNNING,)),
    "clock skewed": Kind((RUNNING,)),
    "slow rank": Kind((RUNNING,)),
    "supervisor stopped": Kind((RUNNING, CHECKPOINT)),
    "login without end": Kind((BEFORE,), details=("prints", "sleeps")),
    "manifest damaged": Kind((RUNNING,), real=True, only_real=True),
    "daemon left behind": Kind((RUNNING,)),
    "launcher killed": Kind((*AT_WORK, STOP)),
}
CRASHES = {
    "exit3": r"exited with code 3",
    "raise": r"exited with code 1: RuntimeError",
    "signal11": r"segmentation fault",
    "signal6": r"SIGABRT",
}


@dataclass(frozen=True)
class Fault:
    """One fault of a campaign; the same seed and number give the same fault."""

    number: int
    kind: str
    phase: str
    rank: int
    step: int
    """In the phase `running`: the step after which it strikes."""
    delay: float
    """Seconds from the start of the phase."""
    spare: bool
    """Whether there is a spare node, if a node is lost."""
    detail: str = ""
    real: bool = False
    """Whether it hits the embedded trainer, with one rank per node; otherwise the stand-in, with two ranks per node."""

    @property
    def node(self) -> str:
        return NODES[self.rank if self.real else self.rank // 2]

    @property
    def local(self) -> int:
        return 0 if self.real else self.rank % 2

    def __str__(self) -> str:
        event = f"{self.kind}{' by ' + self.detail if self.detail else ''}, {self.phase}"
        where = f"rank {self.rank} on {self.node}" + (", with a spare" if self.spare else "")
        return f"{event} ({where}{', embedded trainer' if self.real else ''})"


def draw(seed: int, count: int) -> list[Fault]:
    """Return `count` faults: rounds of all kinds, the phases of each kind in turn, the rest random."""
    chance = random.Random(seed)
    wanted = [name for name, kind in KINDS.items() for _ in range(kind.per_round)]
    phases = {name: _turns(chance, kind.phases) for name, kind in KINDS.items()}
    found: list[Fault] = []
    while len(found) < count:
        for name in chance.sample(wanted, len(wanted)):
            found.append(_one(chance, len(found), name, next(phases[name])))
    return found[:count]


def _turns(chance: random.Random, phases: Sequence[str]) -> Iterator[str]:
    while True:
        yield from chance.sample(phases, len(phases))


def _one(chance: random.Random, number: int, kind: str, phase: str) -> Fault:
    real = KINDS[kind].real and phase in (RUNNING, CHECKPOINT) and chance.random() < REAL_SHARE
    real = real or KINDS[kind].only_real
    # No other node can replace it.
    spare = (kind in LOST and chance.random() < 0.7) or kind == "node killed"
    step = chance.randint(SAVE_EVERY + 1, STEPS - 12)
    detail = chance.choice(KINDS[kind].details or ("",))
    rank = chance.randrange(2 if real else 4)
    delay = chance.uniform(0.0, 0.6 if phase == PUSH else 0.15)
    return Fault(number, kind, phase, rank, step, delay, spare, detail, real)


def draw_interrupts(seed: int, count: int) -> list[Fault]:
    """Return `count` Ctrl-C at random moments during a launch and its first steps, independent of phases."""
    chance = random.Random(seed)
    return [
        Fault(number, "Ctrl-C", ANY, 0, 0, chance.uniform(0.0, 5.0), False, chance.choice(("once", "twice")))
        for number in range(count)
    ]


# -- what has to come of it ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpectedEnd:
    """How a run may end after a fault to count as a good end."""

    phases: tuple[str, ...]
    """The allowed phases of the run; "" means that none was recorded: the launch was refused, or ended earlier."""
    attempts: tuple[int, int]
    cause: str = ""
    """A pattern for the reason of the restart, or for the root cause; "" if no failure is expected."""


def expected_end(fault: Fault) -> ExpectedEnd:
    """Return the end that this fault must lead to."""
    where, kind = rf"rank {fault.rank} on {fault.node}\b.*", fault.kind
    if kind == "Ctrl-C":
        return ExpectedEnd(("stopped", ""), (1, 1))
    # Whichever fault comes later, the user asked for the end.
    if fault.phase == STOP:
        return ExpectedEnd(("stopped",), (1, 1))
    if kind == "crash at the same step":
        return ExpectedEnd(("failed",), (4, 4), where + r"exited with code 3[^\n]*[\s\S]*do not requeue")
    if kind == "user's mistake":
        return ExpectedEnd(("failed",), (1, 1), r"rank \d on node\d\b.*ModuleNotFoundError")
    if kind in LOST:
        return _lost(fault)
    causes = {
        "rank killed": where + "killed",
        "rank crashed": where + CRASHES.get(fault.detail, ""),
        "rank frozen": where + r"(stands still|was stopped by a signal \(SIGSTOP\))",
        "supervisor killed": rf"supervisor on {fault.node}\b",
        "supervisor stopped": rf"supervisor on {fault.node}\b.*did not respond",
        "manifest damaged": where + "killed",
        "children left behind": where + "killed",
        "daemon left behind": where + "killed",
        "clock skewed": where + "killed",
    }
    if kind in causes:
        return ExpectedEnd(("finished",), (2, 2), causes[kind])
    if kind == "login without end":
        return ExpectedEnd(("",), (1, 1), rf"\b{fault.node}\b.*login scripts")
    # If no rank has to write, the full disk may remain unnoticed.
    if kind == "disk full":
        return ExpectedEnd(("finished",), (1, 4), rf"\b{fault.node}\b.*No space left on device")
    # The command may be killed before the run is recorded.
    if kind == "command killed" and fault.phase in (PUSH, STARTING):
        return ExpectedEnd(("finished", ""), (1, 2))
    if kind == "launcher killed" and fault.phase == STARTING:
        return ExpectedEnd(("finished", "failed"), (1, 2))
    return ExpectedEnd(("finished",), (1, 1))


def _lost(fault: Fault) -> ExpectedEnd:
    # A launch that is not possible reports that and starts nothing.
    if fault.phase in (PUSH, STARTING):
        return ExpectedEnd(("finished", "failed", ""), (1, 3), rf"\b{fault.node}\b")
    return ExpectedEnd(("finished",), (2, 2 if fault.spare else 8), rf"lost {fault.node}\b")
