"""Explain how one rank ended, from its exit status and its last log lines, and whether another rank's end caused it.

Also contains the meaning of HCCL's error codes, with a remedy for each.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.agent.ranks.stacks import NO_TOOL
from clusterctl.runs.causes.places import PREFIX, TRACEBACK

if TYPE_CHECKING:
    from clusterctl.runs.state import RankState

# A cgroup of a Slurm job in the kernel's report.
OF_SLURM = re.compile(r"oom_memcg=/\S*slurm\S*/job_\d+")
NO_ROOM = "No space left on device"
DEVICE_MEMORY = "a smaller micro_batch, or a layout that splits the model; see `clusterctl plan`"
NODE_MEMORY = (
    "less data in the node's memory, fewer processes that load data, a smaller micro_batch;"
    " `clusterctl doctor` shows memory"
)
# These remedies for a program that is not our trainer.
OF_PROGRAMS = (
    (DEVICE_MEMORY, "a smaller batch, or a model that is divided over more devices"),
    (", a smaller micro_batch;", ";"),
)
HINTS = (
    (r"MPIR_pmi_init|PMI_Init returned", "start a program of MPI by its launcher: launch -- mpirun PROGRAM"),
    (
        r"ModuleNotFoundError|ImportError",
        "install it into the node's python (see `python` in the inventory), or push it with the job's `code`",
    ),
    (r"\bMemoryError\b|Cannot allocate memory|can't allocate memory", NODE_MEMORY),
    (r"out of memory|OutOfMemory", DEVICE_MEMORY),
    (
        r"Address already in use|EADDRINUSE",
        "another run holds the port: give `master_port: 0`, or stop it (`clusterctl runs`)",
    ),
    (NO_ROOM, "free some space on that node, or give it another `workdir`"),
    (r"Permission denied", "check the file's owner and mode on that node"),
)
SIGNALS = {
    signal.SIGKILL: "killed (SIGKILL); if no user did, the kernel's out-of-memory killer did: see dmesg on that node",
    signal.SIGSEGV: "ended by a segmentation fault (SIGSEGV)",
    signal.SIGABRT: "aborted itself (SIGABRT)",
    signal.SIGBUS: "ended by a bus error (SIGBUS); often a full /dev/shm",
    signal.SIGTERM: "ended by SIGTERM",
}
CONSEQUENCES = (
    (
        r"Watchdog caught collective operation timeout|NCCL timeout|ncclRemoteError|NCCL Error [26]\b"
        r"|remote process exited or there was a network error",
        "NCCL waited for another rank without an answer",
    ),
    (
        r"[Gg]loo.*[Tt]imed? ?out|Timed out waiting \d+ ?ms for (?:recv|send) operation",
        "gloo waited for another rank without an answer",
    ),
    (
        r"Connection (?:was )?(?:likely )?(?:closed|reset)|ConnectionResetError|BrokenPipeError|Broken pipe"
        r"|ConnectionRefusedError|ConnectionAbortedError|DistNetworkError|DistStoreError|recvValue failed"
        r"|client socket has (?:failed|timed out)",
        "connection lost",
    ),
)
MISMATCH = re.compile(
    r"preamble\.length <= op\.nbytes|doesn't match expected size|Detected mismatch between collectives"
)
# What gloo found: bytes that came, and those that the rank's own tensor has room for.
SIZES = re.compile(r"preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
MISMATCHED = "collectives that do not match"
# Why a later start may succeed: the link between two devices, or two nodes, is set up anew.
LINK_PASSES = "the link may be up then"
PORT_PASSES = "the port may be free then"
# Failures that may not happen again, and why. Of the others, a training that fails before its first step is not started
# again. The codes of HCCL are in MEANINGS.
PASSES = (
    (r"EADDRINUSE|[Aa]ddress already in use", PORT_PASSES),
    (
        r"Rendezvous(?:Timeout|Connection|Closed)Error|DistStoreError|DistNetworkError"
        r"|[Tt]imed out .{0,60}waiting for clients|wait timeout after \d+ ?ms|connectFullMesh failed"
        r"|client socket has (?:failed|timed out)",
        "all ranks may be there in time then",
    ),
    (
        r"ncclSystemError|ncclRemoteError|NCCL [Ee]rror [26]\b|unhandled system error",
        "NCCL's system error may pass",
    ),
    (
        r"Input/output error|Stale file handle|Remote I/O error|Transport endpoint is not connected"
        r"|Text file busy|\[Errno (?:5|26|107|110|116|121)\]|" + NO_ROOM,
        "the disk may work then",
    ),
)
UNSTARTED = re.compile(
    r"clusterctl: cannot start (?P<what>'.*'|\".*\") in .*?: (?:\[Errno \d+\] )?(?P<why>[^:\[\]]+)"
)
# What every rank of the trainer reports if one of them could not save.
OF_ONE_RANK = re.compile(r"error: rank (?P<rank>\d+)(?: on \S+)?: (?P<why>.*)")
# A syntax error: Python prints no traceback header before it.
UNPARSED = re.compile(r'  File ".*", line \d+')
RAISED = re.compile(r"[A-Za-z_][\w.]*(?::.*)?")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
OTHER_WORLD = (
    "start the launcher directly, or in a script of the pushed folder: launch -- torchrun train.py, or mpirun PROGRAM\n"
    "if each process is to have a group of its own, say so: `processes: node` or `processes: device` (--per-node)"
)
# Functions in which a program waits for its threads and for other ranks when it exits.
EXITING = re.compile(r"`(?:_exitfunc|_shutdown|_python_exit|_exit_function)`")
# Characters of an exception's message in a title.
WIDEST = 300


@dataclass(frozen=True)
class Kind:
    """How one rank ended."""

    words: str
    """The text after "rank 3 on node2 (device 3)" in a title."""
    short: str
    """The name of the kind where ranks are counted: "connection lost"."""
    hint: str = ""
    follows: bool = False
    """The end of another rank, or of a link, caused this one."""
    sure: bool = False
    """The rank's own log explains its end, so that a lost node elsewhere is not the cause."""
    quoted: str = ""
    """The part of `words` that the program wrote: the message of its exception."""
    passes: str = ""
    """Why the same start may succeed later; empty for other failures."""
    source: int | None = None
    """The rank whose failure the log of every rank reports."""


def how_it_ended(rank: RankState) -> str:
    """Return an exit status in words."""
    if rank.world:
        return rank.world
    if rank.hang and rank.stopped:
        return f"was stopped by a signal (SIGSTOP) for {rank.hang:g} s"
    if rank.hang and rank.odd:
        return f"hung: {rank.stands}"
    if rank.hang and rank.silent:
        return f"hung: no rank wrote a line for {rank.hang:g} s, and this one was the last that did"
    if rank.hang:
        return f"hung: no step in {rank.hang:g} s after step {rank.step}"
    number = rank.signal
    if number:
        known = {int(key): phrase for key, phrase in SIGNALS.items()}
        return known.get(number, f"ended by {signal_name(number)}")
    return f"exited with code {rank.exit_code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kind_of(rank: RankState, tail: Sequence[str]) -> Kind:
    """Return how a rank ended, from its exit status, the kernel's reports and the last lines of its log."""
    kind = _kind_of(rank, tail)
    if kind.passes or rank.oom or rank.hang or not rank.exit_code:
        return kind
    text = raised_in(tail) or "\n".join(tail)
    passes = next((reason for pattern, reason in PASSES if re.search(pattern, text)), "")
    return replace(kind, passes=passes or (LINK_PASSES if kind.follows else ""))


def _kind_of(rank: RankState, tail: Sequence[str]) -> Kind:
    ended, output = how_it_ended(rank), "\n".join(tail)
    if rank.world:
        return Kind(ended, "another group than planned", OTHER_WORLD, sure=True)
    if rank.oom:
        limit = any("cgroup out of memory" in line for line in rank.kernel)
        by_slurm = limit and any(OF_SLURM.search(line) for line in rank.kernel)
        holder = "its Slurm job" if by_slurm else "its container"
        whose = f"the memory limit of {holder} was reached" if limit else "the node was out of memory"
        phrase = f"was killed by the kernel: {whose}"
        more = "more memory (slurm: {extra: [--mem=64G]}), " if by_slurm else ""
        hint = more + NODE_MEMORY
        return Kind(phrase, "killed by the kernel, out of memory", hint, sure=True)
    # The last lines of a stopped process say nothing about the cause.
    if rank.hang and rank.stopped:
        return Kind(
            ended, "hung", "see who sends SIGSTOP on that node; kill -CONT continues a process", sure=True
        )
    raised = raised_in(tail)
    if rank.hang:
        quoted = raised[:WIDEST] if raised and EXITING.search(rank.stands) else ""
        words = f"{ended}; it was exiting after {quoted}" if quoted else ended
        return Kind(words, "hung", _hint_of_hang(rank, tail), quoted=quoted)
    # The process could not write its message about the full disk.
    if rank.full and rank.exit_code and NO_ROOM not in output:
        return Kind(f"{ended}: {NO_ROOM}, for {rank.full}", NO_ROOM, dict(HINTS)[NO_ROOM], sure=True)
    if rank.exit_code in (126, 127) and (unstarted := UNSTARTED.match(tail[-1] if tail else "")):
        return _unstarted(unstarted["what"], unstarted["why"].strip())
    if raised is None and (reported := _of_one_rank(tail)):
        return reported
    code = code_in(output)
    if code and _of_hccl(raised):
        meaning = MEANINGS[code]
        phrase = f"{ended}: {code}, {meaning.words}"
        short, passes = f"{code} {meaning.words}", meaning.passes
        return Kind(phrase, short, meaning.hint, meaning.follows, not meaning.follows, passes=passes)
    if MISMATCH.search(output):
        return _mismatched(ended, output)
    consequence = _consequence(raised or output)
    if consequence and rank.signal in (None, 0, signal.SIGABRT):
        hint = "no other rank failed before it: look for a hung rank, or a broken link (`clusterctl doctor`)"
        return Kind(f"{ended}: {consequence}", consequence, hint, follows=True)
    hint = next((phrase for pattern, phrase in HINTS if re.search(pattern, raised or output)), "")
    # Threads of torch may abort a program that is exiting because of an exception.
    if raised and rank.signal in (
        None,
        0,
        signal.SIGABRT,
    ):
        name, colon, rest = raised[:WIDEST].partition(":")
        return Kind(f"{ended}: {raised[:WIDEST]}", name, hint, sure=True, quoted=colon + rest)
    if rank.signal == signal.SIGTERM:
        return Kind(ended, lost_another(tail) or "stopped", hint, follows=True)
    return Kind(ended, ended.partition(";")[0], hint, sure=rank.signal in (signal.SIGSEGV, signal.SIGBUS))


def _hint_of_hang(rank: RankState, tail: Sequence[str]) -> str:
    """Return where more about a hang can be found, or what would have shown more."""
    seen = any("by py-spy:" in line or "(most recent call first)" in line for line in tail)
    hints = ["its log ends with the stacks of its threads"] if seen else []
    if rank.unseen and not seen:
        more = "; install py-spy in the nodes' Python to see that" if NO_TOOL in rank.unseen else ""
        hints.append(f"where it stands is not known ({rank.unseen}){more}")
    if rank.silent:
        hints.append("a program that is silent for long needs a longer hang_after")
    return "; ".join(hints)


def _of_one_rank(tail: Sequence[str]) -> Kind | None:
    """Return the failure of one rank that all ranks of the trainer report, with the trainer's own remedy, or None."""
    for line, after in reversed(list(zip(tail, [*tail, ""][1:], strict=True))):
        if found := OF_ONE_RANK.match(line):
            hint = after.removeprefix("  try: ") if after.startswith("  try: ") else ""
            return Kind(
                f"failed: {found['why']}", "ended with it", hint, sure=True, source=int(found["rank"])
            )
    return None


def _mismatched(ended: str, output: str) -> Kind:
    """Return the kind of a failure whose collectives do not match; gloo shows the sizes."""
    hint = "every rank must call the same collectives in one order, with tensors of one size"
    if sizes := SIZES.search(output):
        hint += f"; {sizes[1]} bytes came, and its own tensor takes {sizes[2]}: one of the two ranks is wrong"
    return Kind(f"{ended}: its collective does not match those of other ranks", MISMATCHED, hint, sure=True)


def _unstarted(subject: str, why: str) -> Kind:
    """Return the kind of end of a program that the node could not start."""
    hint = "give its path on the node, or push it with its folder; what its first line (#!) names must be there too"
    if why == "Permission denied":
        hint = "chmod +x it, or start it by its interpreter: python FILE, sh FILE"
    return Kind(f"could not start {subject}: {why}", "could not start", hint, sure=True)


def lost_another(tail: Sequence[str]) -> str | None:
    """Return what a rank that was stopped had logged about the end of another rank, or None."""
    raised = raised_in(tail)
    return _consequence(raised) if raised else None


def _consequence(text: str) -> str | None:
    return next((phrase for pattern, phrase in CONSEQUENCES if re.search(pattern, text)), None)


def _of_hccl(raised: str | None) -> bool:
    """Return True if an exception is one with which torch_npu reports an HCCL error.

    An error code in the log before another exception did not end the rank.
    """
    return raised is None or bool(
        re.search(r"\b(?:hccl|acl|npu|inner error|E[A-Z][0-9]{4})", raised, re.IGNORECASE)
    )


def raised_in(tail: Sequence[str]) -> str | None:
    """Return the exception that ended a program, from its last traceback, or None.

    Of chained exceptions, return the last that is not a lost connection: handling an error may lose a connection.
    """
    chain = _last_chain([PREFIX.sub("", line) for line in tail])
    return next((entry for entry in reversed(chain) if not _consequence(entry)), chain[-1] if chain else None)


def _last_chain(lines: Sequence[str]) -> list[str]:
    chain: list[str] = []
    inside = chained = False
    for line in lines:
        if line.startswith(CHAINED):
            chained = True
        elif line.strip() == TRACEBACK and not line.startswith(" "):
            chain = chain if chained else []
            inside, chained = True, False
        elif not inside and UNPARSED.fullmatch(line):
            chain, inside = [], True
        elif inside and line and not line[0].isspace() and RAISED.fullmatch(line):
            chain.append(line.strip())
            inside = False
    return chain


CODE = re.compile(r"\b(E[A-Z][0-9]{4})\b")
TABLE = "the rank table is wrong: `clusterctl ranktable check`, and `ranktable verify` against the nodes"
LINKS = "look at the links between these devices: `clusterctl doctor`, `hccn_tool -i N -link -g`"
FIRST = "look for a rank that failed earlier or stands still; if no rank did, look at the links (`clusterctl doctor`)"


@dataclass(frozen=True)
class Meaning:
    """The meaning of one error code."""

    words: str
    hint: str
    follows: bool = False
    """The code mostly means that another rank, or a link, failed first."""
    passes: str = ""
    """Why the same start may succeed later; empty for other codes."""


MEANINGS = {
    "EI0001": Meaning(
        "an environment variable of HCCL has a wrong value", "the log names it; see the job's `env`"
    ),
    "EI0002": Meaning(
        "waited in a collective until HCCL_EXEC_TIMEOUT for a rank that did not arrive", FIRST, True
    ),
    "EI0003": Meaning("a collective was called with a wrong argument", "see the call in the traceback"),
    "EI0004": Meaning("the rank table can't be read", TABLE),
    "EI0005": Meaning(
        "ranks called a collective with different arguments, or have different rank tables",
        "the same code, data and rank table everywhere: `clusterctl ranktable verify`",
    ),
    "EI0006": Meaning(
        "waited for another rank's socket until HCCL_CONNECT_TIMEOUT",
        f"{FIRST}; ranks that start far apart need a larger HCCL_CONNECT_TIMEOUT (120 s by default)",
        True,
        LINK_PASSES,
    ),
    "EI0007": Meaning(
        "no memory, stream or notify is left on the device", "fewer groups or streams, less memory"
    ),
    "EI0008": Meaning(
        "CANN is not the same version everywhere", "`clusterctl doctor` lists the versions a node"
    ),
    "EI0009": Meaning("the connection between two devices could not be set up", LINKS, passes=LINK_PASSES),
    "EI0010": Meaning("devices of one node can't reach each other directly", "try HCCL_INTRA_ROCE_ENABLE=1"),
    "EI0011": Meaning(
        "out of memory on the device",
        "a smaller micro_batch, or a layout that splits the model: `clusterctl plan`",
    ),
    "EI0012": Meaning("a copy between two devices broke off", FIRST, True, LINK_PASSES),
    "EI0013": Meaning("a packet to another device was not answered", FIRST, True, LINK_PASSES),
    "EI0014": Meaning("the rank table names what is not so on this node", TABLE),
    "EI0015": Meaning("not all ranks came together at the start", FIRST, True, LINK_PASSES),
    "EI0016": Meaning("a setting of HCCL has a wrong value", "the log names it"),
    "EI0017": Meaning("the rank table lacks a field", TABLE),
    "EI0018": Meaning("a packet to another device was not answered", FIRST, True, LINK_PASSES),
    "EI0019": Meaning(
        "HCCL's port on the node is taken",
        "another run holds it (`clusterctl runs`); HCCL_IF_BASE_PORT names another",
        passes=PORT_PASSES,
    ),
    "EI0020": Meaning(
        "HCCL's port on the device is taken",
        "two processes on one device need HCCL_NPU_SOCKET_PORT_RANGE",
        passes=PORT_PASSES,
    ),
    "EJ0003": Meaning(
        "a port that the driver needs is taken",
        "another run holds the device (`clusterctl runs`, `npu-smi info`)",
        passes=PORT_PASSES,
    ),
}


def code_in(text: str) -> str | None:
    """Return the first known code in a text, or None; later codes follow from the first."""
    return next((code for code in CODE.findall(text) if code in MEANINGS), None)
