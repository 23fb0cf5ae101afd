"""Read the last collectives of a rank, their numbers and sizes, from the file that torch's flight recorder writes.

They are pickles, and torch offers nothing else to a process outside. Only numbers, texts and containers are read from
them: a pickle that names any function or class is refused, and nothing in it runs.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from clusterctl.agent.processes import read_limited

# Variables with the first part of the file's path, which the rank's number follows, and such paths if none is set.
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_HCCL_DEBUG_INFO_TEMP_FILE")
DEFAULTS = (
    "{XDG_CACHE_HOME}/torch/comm_lib_trace_rank_",
    "{HOME}/.cache/torch/comm_lib_trace_rank_",
    "/tmp/nccl_trace_rank_",
    "/tmp/hccl_trace_rank_",
)
# Variables with the first part of the path of a pipe. A rank that reads a byte there writes its file and continues.
PIPES = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_HCCL_DEBUG_INFO_PIPE_FILE")
# Seconds that such a rank may need: it looks every second.
WRITTEN = 1.5
# Limits of a file's bytes, and of the last collectives of a group that are kept.
LARGEST, MOST = 64 << 20, 16
# Collectives whose tensors have one size on all ranks; those of all_to_all_v_single may differ.
EVEN = re.compile(r"all_?reduce|broadcast|_base$|(?<!_v)_single$")
# What a damaged pickle, or one of another layout, raises.
DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
)


class PlainValues(pickle.Unpickler):
    """Read a pickle of numbers, texts and containers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the file names {module}.{name}")


def ask(environ: Mapping[str, str], rank: int) -> bool:
    """Let a rank write its file, if its program offers that; return whether it does."""
    for prefix in filter(None, map(environ.get, PIPES)):
        with contextlib.suppress(OSError):
            pipe = os.open(f"{prefix}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return stat.S_ISFIFO(os.fstat(pipe).st_mode) and os.write(pipe, b"1") > 0
            finally:
                os.close(pipe)
    return False


def recorded(environ: Mapping[str, str], rank: int, since: float) -> dict[str, object]:
    """Return by group how many collectives a rank has begun, and what the last ones were; {} if no file is there.

    A group is its ranks, separated by commas, and its name after a slash. Files from before `since` do not count.
    """
    try:
        path = max(_own_files(environ, rank, since), key=os.path.getmtime)
        value = PlainValues(io.BytesIO(read_limited(path, LARGEST))).load()
        return _by_group(value) if value["entries"] else {}
    except DAMAGED:
        return {}


def _own_files(environ: Mapping[str, str], rank: int, since: float) -> Iterator[str]:
    known = {"HOME": environ.get("HOME") or "/tmp", "XDG_CACHE_HOME": environ.get("XDG_CACHE_HOME") or "/"}
    given = [prefix for prefix in map(environ.get, PREFIXES) if prefix]
    for prefix in given or [text.format(**known) for text in DEFAULTS]:
        with contextlib.suppress(OSError):
            found = os.lstat(f"{prefix}{rank}")
            # In /tmp anyone may make a file of this name.
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and found.st_mtime >= since:
                yield f"{prefix}{rank}"


def _by_group(value: Any) -> dict[str, object]:
    groups: dict[str, dict[int, str]] = {}
    for entry in value["entries"]:
        name, configs = entry["process_group"][0], value["pg_config"]
        # gloo's groups have no names there.
        config = configs.get(name) or configs[""]
        ranks: list[str] = re.findall(r"\d+", str(config["ranks"]))
        call = str(entry["profiling_name"]).rpartition(":")[2]
        sizes = f" {entry['input_sizes']}" if EVEN.search(call) else ""
        if ranks and not entry.get("is_p2p"):
            group = groups.setdefault(f"{','.join(ranks)}/{name}", {})
            group[int(entry["collective_seq_id"])] = (call + sizes)[:100]
    recent = {
        group: {str(number): calls[number] for number in sorted(calls)[-MOST:]}
        for group, calls in groups.items()
    }
    return {"calls": {group: max(calls) for group, calls in groups.items()}, "recent": recent}
