"""Read the environment variables that the launcher sets; no other module of the trainer reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterctl.wire.contract import (
    ATTEMPT,
    CACHE_DIR,
    DEVICE_KIND,
    INSTALL,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    NODE,
    RANK,
    RUN_DIR,
    RUN_ID,
    SAVED_AS,
    WORLD_SIZE,
)
from trainer.errors import InputError

FAULT = "CLUSTERCTL_FAULT"
"""For drills and tests. `rank1:step3:exit7`, `rank1:step3:kill9` or `rank0:step5:raise` ends that rank in that way
when it begins the step, `rank0:step5:hang` halts it; `rank1:step3:slow200` adds 200 ms to each of its steps from then
on."""
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Drill:
    """A fault to inject: `how` is exit, kill, raise, hang or slow; `number` is exit code, signal or milliseconds."""

    rank: int
    step: int
    how: str
    number: int


@dataclass(frozen=True)
class Env:
    """The values that the launcher passed to this rank; the defaults are for a process without a launcher."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    run_id: str = ""
    # The name of the run's folder on a shared disk; "": the run id.
    saved_as: str = ""
    run_dir: Path | None = None
    attempt: int = 1
    node: str = ""
    # "": the best available kind.
    device_kind: str = ""
    # A folder that all runs on this node share.
    cache_dir: Path | None = None
    drill: Drill | None = None
    # None: divide the cores among the node's ranks.
    threads: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Env:
        """Return the values of `environ`, by default of this process; InputError names a bad variable."""
        given = os.environ if environ is None else environ
        world_size = _integer(given, WORLD_SIZE, 1, least=1)
        env = cls(
            rank=_integer(given, RANK, 0),
            local_rank=_integer(given, LOCAL_RANK, 0),
            world_size=world_size,
            local_world_size=_integer(given, LOCAL_WORLD_SIZE, world_size, least=1),
            master_addr=given.get(MASTER_ADDR, ""),
            master_port=_integer(given, MASTER_PORT, 0),
            run_id=given.get(RUN_ID, ""),
            saved_as=given.get(SAVED_AS, ""),
            run_dir=Path(given[RUN_DIR]) if given.get(RUN_DIR) else None,
            attempt=_integer(given, ATTEMPT, 1, least=1),
            node=given.get(NODE, ""),
            device_kind=given.get(DEVICE_KIND, ""),
            cache_dir=Path(given[CACHE_DIR]) if given.get(CACHE_DIR) else None,
            drill=_drill(given.get(FAULT, "")),
            threads=_integer(given, THREADS, 1, least=1) if given.get(THREADS) else None,
        )
        env._check()
        return env

    def _check(self) -> None:
        if self.rank >= self.world_size:
            raise InputError(
                f"{RANK} is {self.rank} but {WORLD_SIZE} is {self.world_size}",
                f"ranks count from 0 to {self.world_size - 1}",
            )
        if self.world_size > 1 and not (self.master_addr and self.master_port):
            raise InputError(
                f"{WORLD_SIZE} is {self.world_size} but {MASTER_ADDR} or {MASTER_PORT} is not set",
                "start the ranks with `clusterctl launch`, or set both",
            )
        if self.device_kind not in ("", "cpu", "cuda", "npu"):
            raise InputError(f"{DEVICE_KIND} is {self.device_kind!r}", "use cpu, cuda or npu")


def install_command(extra: str) -> str:
    """Return how an extra of the package is installed: by the launcher's command, or on a node."""
    command = os.environ.get(INSTALL, "")
    if command:
        return command.replace("{extra}", extra)
    return f"install clusterctl's extra `{extra}` there: see `clusterctl nodes setup`"


def value_of(name: str) -> str | None:
    """Return the value of a variable; None if it is not set."""
    return os.environ.get(name)


def preset(name: str, value: str) -> None:
    """Set a variable for libraries loaded later, unless the user already set it."""
    os.environ.setdefault(name, value)


def replace(name: str, value: str) -> None:
    """Set a variable for libraries, also if it is set already."""
    os.environ[name] = value


def glibc_is_tuned() -> bool:
    """Return whether the launcher has set the allocator's variables, which glibc reads before main()."""
    return "MALLOC_TRIM_THRESHOLD_" in os.environ


def _integer(given: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    text = given.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        raise InputError(
            f"{name} is {text!r}, not a whole number", f"unset {name} or give it a number"
        ) from None
    if value < least:
        raise InputError(f"{name} is {value}; at least {least} is needed")
    return value


def _drill(text: str) -> Drill | None:
    if not text:
        return None
    match = re.fullmatch(r"rank(\d+):step(\d+):(?:(exit|kill|slow)(\d+)|(raise|hang))", text)
    if match is None:
        raise InputError(
            f"{FAULT} is {text!r}",
            "write it like rank1:step3:exit7, rank1:step3:kill9, rank0:step5:raise, rank0:step5:hang or"
            " rank1:step3:slow200",
        )
    rank, step, how, number, plain = match.groups()
    return Drill(int(rank), int(step), how or plain, int(number or 0))
