"""Report the state of a node before a run, in one answer, without changing anything."""

from __future__ import annotations

import glob
import os
import resource
import signal
import subprocess
import threading
import time
from typing import Any, Dict, List, Optional, Sequence

from clusterctl.agent.bounded import outputs_of
from clusterctl.agent.network import holders, interfaces, place_of, rdma_ports
from clusterctl.agent.operations import OWN_FOLDERS
from clusterctl.agent.processes import (
    all_pids,
    boot_id,
    end_all,
    environments,
    is_alive,
    read_limited,
    stat_of,
    text_of,
)
from clusterctl.agent.reaper import MARKER
from clusterctl.agent.request import Refused, Request
from clusterctl.agent.spawn import command, environment, start

LIMITS = ("NOFILE", "NPROC", "MEMLOCK")
# Limit of bytes of the output of one command.
MOST_SAID = 64 << 10
# Limit of bytes of a file, such as a version or a setting.
MOST_READ = 4096
# Limit in seconds of one command; a hung driver never answers.
TIMEOUT = 15.0
# Instruction sets of x86-64 that change how numbers are computed; the kernel's names.
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
# What the kernel calls the makers of x86 processors.
MAKERS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
# A part of an agent's command line that no other program has.
AGENT_WORDS = b"exec(sys.stdin.buffer.read("


def examine(request: Request) -> Dict[str, Any]:
    """Return the node's free space, limits, addresses, ports and processes, and the output of commands and files.

    `commands` is name -> {argv: [[...], ...], timeout}: of each name, the first program that exists is run; all names
    run in parallel. `files` is name -> paths: of each name, the first file that exists is read. `paths` are further
    folders whose disks are reported, besides the work folder and the folders in it. `device_files` are patterns of
    files that ranks open. The commands run in the environment of `setup`.
    """
    commands = request.params.get("commands") or {}
    change = None
    if request.params.get("setup"):
        from clusterctl.agent.setups import changes

        change = changes(request)
    runner = _Commands(request, commands, change)
    workdir, present = request.workdir, interfaces()
    own = [os.path.join(workdir, name) for name in OWN_FOLDERS]
    address = str(request.params.get("address") or "")
    result = {
        "disks": {
            path: room
            for path in (workdir, *own, "/tmp", "/dev/shm", *(request.params.get("paths") or []))
            if (room := _room(os.path.expanduser(str(path))))
        },
        "workdir": workdir,
        "memory": _memory(),
        "processor": _processor(text_of("/proc/cpuinfo")),
        "limits": {name: list(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))) for name in LIMITS},
        "interfaces": present,
        "place": place_of(address, present),
        "ports": holders(request.params.get("ports") or [], address),
        "reserved_ports": text_of("/proc/sys/net/ipv4/ip_local_reserved_ports").strip(),
        "ephemeral_ports": text_of("/proc/sys/net/ipv4/ip_local_port_range").strip(),
        "rdma": rdma_ports(),
        "runs": runs_here(workdir),
        "stale_agents": stale_agents(),
        "device_files": {
            path: os.access(path, os.R_OK | os.W_OK)
            for pattern in request.params.get("device_files") or []
            for path in sorted(glob.glob(str(pattern)))
        },
        "files": {name: _first_text(paths) for name, paths in (request.params.get("files") or {}).items()},
        "user": os.getuid(),
        "boot_id": boot_id(),
    }
    result["commands"] = runner.results()
    return result


def _room(path: str) -> Optional[Dict[str, int]]:
    """Return free and total bytes and inodes of a disk for this user; None if the path does not exist."""
    try:
        disk, device = os.statvfs(path), os.stat(path).st_dev
    except OSError:
        return None
    return {
        "free": disk.f_bavail * disk.f_frsize,
        "total": disk.f_blocks * disk.f_frsize,
        "inodes_free": disk.f_favail,
        "inodes": disk.f_files,
        "device": device,
        "read_only": bool(disk.f_flag & os.ST_RDONLY),
    }


def _memory() -> Dict[str, int]:
    """Return total and available bytes, with the limit of this login's control group applied."""
    rows = dict(line.split(":", 1) for line in text_of("/proc/meminfo").splitlines() if ":" in line)
    sizes = {name: int(text.split()[0]) * 1024 for name, text in rows.items() if text.split()}
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    limit, used = _group_number("memory.max"), _group_number("memory.current")
    if limit is not None and used is not None and limit < total:
        total, available = limit, max(min(available, limit - used), 0)
    return {"total": total, "available": available}


def _processor(cpuinfo: str) -> Dict[str, Any]:
    """Return the processor's kind and maker, and which of INSTRUCTIONS it has."""
    rows = [line.partition(":")[::2] for line in cpuinfo.splitlines()]
    of = {key.strip(): value.split() for key, value in reversed(rows)}
    return {
        "machine": os.uname().machine,
        "maker": MAKERS.get(" ".join(of.get("vendor_id", [])), ""),
        "instructions": [name for name in INSTRUCTIONS if name in of.get("flags", [])],
    }


def _group_number(name: str) -> Optional[int]:
    """Return a number of this process's control group (version 2), or of the nearest group above it that has one."""
    path = next(
        (entry[3:].strip() for entry in text_of("/proc/self/cgroup").splitlines() if entry[:3] == "0::"), ""
    )
    while path:
        text = text_of(f"/sys/fs/cgroup{path.rstrip('/')}/{name}").strip()
        if text.isdigit():
            return int(text)
        path = os.path.dirname(path) if path != "/" else ""
    return None


def _first_text(paths: Sequence[str]) -> Optional[str]:
    for path in paths:
        try:
            with open(os.path.expanduser(path), encoding="utf-8", errors="replace") as file:
                return file.read(MOST_READ)
        except OSError:
            continue
    return None


# ---- what is left of earlier runs


def runs_here(workdir: str) -> List[Dict[str, Any]]:
    """Return each attempt below this work folder that has living processes, and whether its supervisor lives."""
    groups: Dict[Any, Dict[str, Any]] = {}
    for pid, environ in environments():
        output = _marks(environ)
        if not _is_below(output.get("CLUSTERCTL_RUN_DIR", ""), workdir):
            continue
        key = output["CLUSTERCTL_RUN_ID"], output.get("CLUSTERCTL_ATTEMPT", "")
        item = groups.setdefault(key, {"run": key[0], "attempt": key[1], "pids": []})
        item.update(node=output.get("CLUSTERCTL_NODE", ""), run_dir=output["CLUSTERCTL_RUN_DIR"])
        item["pids"].append(pid)
    return [{**item, "supervised": _supervised(item)} for _, item in sorted(groups.items())]


def _marks(environ: bytes) -> Dict[str, str]:
    """Return clusterctl's variables in the environment of a rank; nothing in that of another process."""
    if b"CLUSTERCTL_RUN_ID=" not in environ:
        return {}
    lines = [
        text.decode("utf-8", "replace") for text in environ.split(b"\0") if text.startswith(b"CLUSTERCTL_")
    ]
    output = dict(entry.split("=", 1) for entry in lines if "=" in entry)
    return output if output.get("CLUSTERCTL_RUN_ID") else {}


def _is_below(path: str, workdir: str) -> bool:
    return bool(path) and os.path.realpath(path).startswith(os.path.realpath(workdir) + os.sep)


def _supervised(entry: Dict[str, Any]) -> bool:
    from clusterctl.agent.records import AttemptFiles, read_json

    if not str(entry["attempt"]).isdigit():
        return False
    record = read_json(AttemptFiles(entry["run_dir"], int(entry["attempt"])).supervisor)
    return record is not None and is_alive(record)


def stale_agents() -> List[int]:
    """Return the agents of this user that are stopped or whose login is gone.

    A healthy agent ends with its connection.
    """
    result = []
    for pid in all_pids():
        try:
            command_line = read_limited(f"/proc/{pid}/cmdline", 4096)
            mine = os.stat(f"/proc/{pid}").st_uid == os.getuid() and AGENT_WORDS in command_line
            # A supervisor is a fork of an agent, and reads nothing.
            mine = mine and os.readlink(f"/proc/{pid}/fd/0") != os.devnull
        except OSError:
            continue
        fields = stat_of(pid)
        if mine and pid != os.getpid() and len(fields) > 1 and (fields[0] == "T" or fields[1] == "1"):
            result.append(pid)
    return result


# ---- commands


class _Commands:
    """Runs commands in parallel; each is ended after its time limit."""

    def __init__(
        self, request: Request, wanted: Dict[str, Any], change: Optional[Dict[str, Any]] = None
    ) -> None:
        self.request = request
        self.change = change
        self.found: Dict[str, Any] = {}
        self.threads = []
        for entry in wanted.values():
            if not isinstance(entry, dict) or not all(
                isinstance(argv, list) and argv for argv in entry.get("argv", [0])
            ):
                raise Refused("usage", f"examine: a command is {{argv: [[...]], timeout}}, not {entry!r:.80}")
        for name, entry in wanted.items():
            limit = float(entry.get("timeout", TIMEOUT))
            thread = threading.Thread(target=self._run, args=(name, entry["argv"], limit), daemon=True)
            self.threads.append((thread, time.monotonic() + limit + 3.0))
            thread.start()

    def results(self) -> Dict[str, Any]:
        """Return by name how the command ended and what it printed; None if no such program exists."""
        for thread, deadline in self.threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return dict(self.found)

    def _run(self, name: str, alternatives: List[List[str]], limit: float) -> None:
        self.found[name] = {"timed_out": True, "exit_code": None, "out": "", "err": ""}
        marker = {MARKER: os.urandom(16).hex()}
        for words in alternatives:
            argv, env = command([str(word) for word in words]), environment(marker, self.change)
            try:
                process = start(argv, env, subprocess.PIPE, subprocess.PIPE)
            except (OSError, ValueError):
                continue
            watched = process.pid, f"{MARKER}={marker[MARKER]}"
            self.request.watcher.watch(*watched)
            try:
                self.found[name] = self._output(process, marker, limit)
            finally:
                self.request.watcher.release(*watched)
            return
        self.found[name] = None

    def _output(
        self, process: "subprocess.Popen[bytes]", marker: Dict[str, str], limit: float
    ) -> Dict[str, Any]:
        self.request.on_cancel.append(lambda: _kill(process.pid))
        out, err, ended = outputs_of(process, limit, MOST_SAID)
        if not ended:
            end_all([process.pid], marker, 0.0, limit=1.0)
            return {"timed_out": True, "exit_code": None, "out": "", "err": ""}
        return {
            "timed_out": False,
            "exit_code": process.returncode,
            "out": out.decode("utf-8", "replace"),
            "err": err.decode("utf-8", "replace"),
        }


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # It has ended.
        return
