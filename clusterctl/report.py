"""Why a run failed, in words: the first cause, what it said last, what followed from it, what to try."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterctl.logs import last_lines
from clusterctl.rundir import RunDir

TAIL = 20  # lines of the failed rank's log

HINTS = (
    (
        r"ModuleNotFoundError|ImportError",
        "install it into the node's python (see `python` in the inventory), or push it with the job's `code`",
    ),
    (
        r"out of memory|MemoryError|OutOfMemory",
        "a smaller micro_batch, or a layout that splits the model; see `clusterctl plan`",
    ),
    (
        r"Address already in use|EADDRINUSE|EI0019|EJ0003",
        "another run holds the port: give `master_port: 0`, or stop it (`clusterctl runs`)",
    ),
    (
        r"EI0006|EI0015|HCCL_CONNECT_TIMEOUT",
        "ranks came too far apart, or a link is down: raise HCCL_CONNECT_TIMEOUT, check the links",
    ),
    (r"EI0014|EI0017|EI0004", "HCCL refuses the rank table: `clusterctl ranktable check`"),
    (r"No space left on device", "free some space on that node, or give it another `workdir`"),
    (r"Permission denied", "check the file's owner and mode on that node"),
)
SIGNALS = {
    signal.SIGKILL: "killed (SIGKILL); if nobody did, the kernel's out-of-memory killer did: see dmesg on that node",
    signal.SIGSEGV: "segmentation fault (SIGSEGV)",
    signal.SIGABRT: "aborted itself (SIGABRT)",
    signal.SIGBUS: "bus error (SIGBUS); often a full /dev/shm",
    signal.SIGTERM: "ended by SIGTERM",
}


@dataclass(frozen=True)
class Cause:
    """A failed run's root cause."""

    title: str
    tail: tuple[str, ...]
    log: str
    others: str
    hint: str


def how_it_ended(rank: Mapping[str, Any]) -> str:
    """An exit status in words."""
    number = rank.get("signal")
    if number:
        known = {int(key): words for key, words in SIGNALS.items()}
        return known.get(number, f"ended by {_signal_name(number)}")
    return f"exited with code {rank.get('exit_code')}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def find_cause(
    run: RunDir,
    failure: Mapping[str, Any] | None,
    ranks: Sequence[Mapping[str, Any]],
    nodes: Mapping[str, str],
    attempt: int = 1,
) -> Cause:
    """The root cause as far as the nodes' records and the logs that came home tell."""
    gone = [name for name, state in nodes.items() if state in ("lost", "unknown")]
    if gone:  # what failed elsewhere followed from it
        title = f"lost {', '.join(gone)}: the node, its link or its supervisor is gone"
        return Cause(
            title, (), str(run.logs(attempt)), "", "look at the node; `clusterctl doctor` asks all of them"
        )
    if failure is None:
        title = "ended without a reason that was recorded"
        return Cause(title, (), str(run.logs(attempt)), "", "clusterctl status shows every rank")
    errors = run.log(failure["node"], failure["rank"], "err", attempt)
    outputs = run.log(failure["node"], failure["rank"], "out", attempt)
    tail = [line for line in last_lines(errors, TAIL) if line.strip()] or [
        line for line in last_lines(outputs, TAIL) if line.strip()
    ]
    title = f"rank {failure['rank']} on {failure['node']} (device {failure.get('device')}) {how_it_ended(failure)}"
    said = "\n".join(tail)
    hint = next((words for pattern, words in HINTS if re.search(pattern, said)), "")
    return Cause(
        title,
        tuple(tail),
        str(errors if errors.exists() and errors.stat().st_size else outputs),
        _others(failure, ranks),
        hint,
    )


def _others(failure: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> str:
    """The other ranks in one line: they followed, they did not begin it."""
    others = [one for one in ranks if one["rank"] != failure["rank"]]
    bad = [one for one in others if one.get("exit_code") or one.get("signal")]
    if not others:
        return ""
    return (
        f"{len(bad)} of the {len(others)} other ranks ended in consequence"
        if bad
        else f"the {len(others)} other ranks ended well"
    )
