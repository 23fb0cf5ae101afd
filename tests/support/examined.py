"""What a sound node answers to `examine`, for tests to spoil one thing at a time."""

from __future__ import annotations

import json
import time
from typing import Any

from clusterctl.transport.connection import Completed

PACKAGES = {"torch": "2.13.0", "numpy": "2.1.0", "safetensors": "0.5.0", "tokenizers": "0.21.0"}
WORKDIR = "/w"


def hello(**more: Any) -> dict[str, Any]:
    now = {"wall": time.time(), "cpus": 8, "python": "3.9.1", "workdir": WORKDIR, "home": "/h"}
    return {**now, **more}


def said(out: str = "", exit_code: int | None = 0, err: str = "", timed_out: bool = False) -> dict[str, Any]:
    """How a command on a node ended."""
    return {"exit_code": exit_code, "out": out, "err": err, "timed_out": timed_out}


def python(**more: Any) -> dict[str, Any]:
    """The ranks' Python; a package given as None is not there."""
    packages = {name: version for name, version in {**PACKAGES, **more}.items() if version is not None}
    return said(json.dumps({"python": "3.11.7", "packages": packages}))


def disk(**more: Any) -> dict[str, Any]:
    return {"free": 1 << 40, "total": 1 << 41, "inodes_free": 10**7, "inodes": 10**8, "device": 1, **more}


WIDE = ["avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"]


def node(**more: Any) -> dict[str, Any]:
    """A sound node's whole answer; commands, files, disks, limits and memory given are laid over it."""
    sound: dict[str, Any] = {
        "disks": {WORKDIR: disk(), "/tmp": disk(), "/dev/shm": disk(device=2)},
        "workdir": WORKDIR,
        "memory": {"total": 1 << 38, "available": 1 << 37},
        "limits": {"NOFILE": [65536, 65536], "NPROC": [-1, -1], "MEMLOCK": [65536, 65536]},
        "interfaces": {"lo": {"up": True, "addresses": []}, "eth0": {"up": True, "addresses": []}},
        "place": {"ip": "10.0.0.1", "own": True, "interface": "eth0", "reason": ""},
        "ports": [],
        "reserved_ports": "60000-60015",
        "ephemeral_ports": "32768\t60999",
        "rdma": [],
        "processor": {"machine": "x86_64", "instructions": ["avx2", "fma"]},
        "runs": [],
        "stale_agents": [],
        "commands": {"python": python()},
        "files": {},
        "device_files": {},
    }
    for name, value in more.items():
        laid = isinstance(value, dict) and isinstance(sound[name], dict) and name != "place"
        sound[name] = {**sound[name], **value} if laid else value
    return sound


REACHED = {"reached": True, "reason": "", "seconds": 0.001, "by": "10.0.0.1"}
OPENED = [({"port": 40000}, b""), {"port": None, "came": 1}]


def script(**nodes: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """A script of nodes by name, all of them reached; anything may be laid over it."""
    table: dict[tuple[str, str], Any] = {
        ("*", "hello"): hello(),
        ("*", "examine"): node(),
        ("*", "listen"): OPENED,
        ("*", "knock"): REACHED,
        ("*", "run"): Completed(0),
    }
    return {**table, **{(name, "examine"): answer for name, answer in nodes.items()}}
