"""A real Slurm over the nodes of a sandbox: munged and slurmctld on this machine, a slurmd for each node.

Everything is in the folder `slurm` of the sandbox, with ports, keys and a munged of its own: no other Slurm of this
machine is affected. In mode namespaces Slurm runs in the network of the nodes; the sandbox's script `login` enters that
network to run Slurm's programs. Tasks and this machine share the disk, but not /tmp.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.sandbox import namespaces, process
from clusterctl.sandbox.layout import Layout, SandboxNode, State
from clusterctl.sandbox.sshd import PATHS, daemon_environment

DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sinfo", "srun", "sbatch", "scontrol", "squeue", "scancel")
MUNGED, CONTROLLER = "slurm-munged", "slurm-controller"
# Seconds: nodes are idle 1 to 2 s after their slurmd has started.
IDLE_WITHIN = 30.0
# Characters of the path of a socket.
LONGEST_SOCKET = 107


def why_not() -> str:
    """Return what this machine lacks for a Slurm, or ""."""
    missing = [name for name in (*DAEMONS, *CLIENTS) if _found(name) is None]
    return f"not installed: {', '.join(missing)} (packages slurm-wlm and munge)" if missing else ""


def check(layout: Layout) -> None:
    """Raise a UsageError if no Slurm can run here."""
    if missing := why_not():
        raise UsageError(f"--with-slurm: {missing}", "install them, or leave out --with-slurm")
    if len(str(folder(layout) / "munge.socket")) > LONGEST_SOCKET or " " in str(layout.directory):
        problem = f"--with-slurm: the path {layout.directory} is too long for a socket, or contains a space"
        raise UsageError(problem, "choose another --dir")


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{PATHS}:/bin")


def _program(name: str) -> str:
    found = _found(name)
    # why_not() has checked this.
    assert found is not None
    return found


def login_script(layout: Layout) -> Path:
    """Return the path of the script that runs a command where Slurm's programs work, as on a login node."""
    return layout.directory / "login"


def folder(layout: Layout) -> Path:
    """Return the folder of Slurm's files."""
    return layout.directory / "slurm"


def config_file(layout: Layout) -> Path:
    return folder(layout) / "slurm.conf"


def start(layout: Layout, state: State) -> None:
    """Start Slurm for the nodes of a sandbox, and wait until all of them are idle."""
    place = folder(layout)
    for name in (place, place / "state", place / "spool"):
        name.mkdir(mode=0o700)
    key = place / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    config_file(layout).write_text(_config(layout, state))
    (place / "gres.conf").write_text(f"Name=npu Count={state.devices}\n")
    _write_login(layout, state)
    _start_munged(layout)
    command = [_program("slurmctld"), "-D", "-c", "-f", str(config_file(layout))]
    _start(layout, CONTROLLER, _in_network(layout, state, command))
    for node in state.nodes:
        start_node(layout, state, node)
    _wait_idle(layout, state)


def start_node(layout: Layout, state: State, node: SandboxNode) -> None:
    """Start the slurmd of a node; in mode namespaces, inside the node."""
    (folder(layout) / "spool" / node.name).mkdir(mode=0o700, exist_ok=True)
    command = [_program("slurmd"), "-D", "-f", str(config_file(layout)), "-N", node.name]
    if state.mode == "namespaces":
        first = namespaces.first_process(layout, node)
        spaces = [f"--{kind}=/proc/{first}/ns/{name}" for kind, name in NODE_SPACES]
        command = [_program("nsenter"), *spaces, "--wd=/", *command]
    name = slurmd_record(node)
    environment = daemon_environment(layout, node.name)
    process.start(layout.record(name), name, command, environment, layout.log(name))


# nsenter's options with the names of the kernel.
NODE_SPACES = (("mount", "mnt"), ("pid", "pid"), ("net", "net"), ("uts", "uts"), ("ipc", "ipc"))


def slurmd_record(node: SandboxNode) -> str:
    """Return the name of the record of a node's slurmd."""
    return f"slurmd-{node.name}"


def _start_munged(layout: Layout) -> None:
    place = folder(layout)
    files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
    options = [f"--{option}-file={place}/munge.{end}" for option, end in files.items() if option != "socket"]
    command = [_program("munged"), "--foreground", "--force", f"--socket={place}/munge.socket", *options]
    _start(layout, MUNGED, command)
    _wait(layout, MUNGED, (place / "munge.socket").exists)


def _in_network(layout: Layout, state: State, command: list[str]) -> list[str]:
    """Return the command that runs `command` in the network of the nodes."""
    if state.mode != "namespaces":
        return command
    relay = process.read_record(layout.record(namespaces.RELAY))
    assert relay is not None
    return [_program("nsenter"), f"--net=/proc/{relay.pid}/ns/net", *command]


def _start(layout: Layout, name: str, command: list[str]) -> None:
    process.start(layout.record(name), name, command, daemon_environment(layout, name), layout.log(name))


def _write_login(layout: Layout, state: State) -> None:
    script = login_script(layout)
    enter = " ".join(_in_network(layout, state, []))
    variables = f"export SLURM_CONF='{config_file(layout)}' PATH=\"$PATH:/usr/bin:/usr/sbin\""
    script.write_text(
        f"#!/bin/sh\n# Runs a command as on a login node of the sandbox's Slurm.\n{variables}\n"
    )
    with script.open("a") as file:
        # Without --, nsenter takes the options of the command for its own.
        file.write(f'exec {enter} -- "$@"\n' if enter else 'exec "$@"\n')
    script.chmod(0o755)


def _config(layout: Layout, state: State) -> str:
    """Return slurm.conf. Slurm expands %n, but no variables."""
    place, apart = folder(layout), state.mode == "namespaces"
    own = socket.gethostname().partition(".")[0]
    address = namespaces.bridge_address(layout) if apart else "127.0.0.1"
    controller_port, *ports = _free_ports(address if not apart else "127.0.0.1", 1 + len(state.nodes))
    cores = os.cpu_count() or 1
    lines = [
        "ClusterName=sandbox",
        f"SlurmctldHost={own}({address})",
        f"SlurmUser={state.user}",
        f"SlurmdUser={state.user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={place}/munge.socket",
        f"SlurmctldPort={controller_port}",
        f"StateSaveLocation={place}/state",
        f"SlurmdSpoolDir={place}/spool/%n",
        f"SlurmctldPidFile={place}/slurmctld.pid",
        f"SlurmdPidFile={place}/slurmd-%n.pid",
        *FIXED,
    ]
    for node, port in zip(state.nodes, ports, strict=True):
        where = f"NodeAddr={node.address}" + ("" if apart else f" NodeHostname={own} Port={port}")
        resources = f"CPUs={cores} RealMemory=1000 Gres=npu:{state.devices} State=UNKNOWN"
        lines.append(f"NodeName={node.name} {where} {resources}")
    lines.append("PartitionName=sandbox Nodes=ALL Default=YES MaxTime=UNLIMITED OverSubscribe=NO State=UP")
    return "\n".join(lines) + "\n"


FIXED = (
    # Slurm neither tracks processes by cgroups nor accounts anything: a sandbox supports neither.
    "ProctrackType=proctrack/linuxproc",
    "TaskPlugin=task/none",
    "JobAcctGatherType=jobacct_gather/none",
    "AccountingStorageType=accounting_storage/none",
    "SelectType=select/cons_tres",
    "SelectTypeParameters=CR_Core",
    "SwitchType=switch/none",
    "MpiDefault=none",
    "GresTypes=npu",
    # A node that was killed is used again as soon as its slurmd runs.
    "ReturnToService=2",
    # Seconds until a silent node counts as down, and between SIGTERM and SIGKILL.
    "SlurmdTimeout=15",
    "KillWait=5",
)


def _free_ports(address: str, count: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.create_server((address, 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


def ask(layout: Layout, *words: str) -> str:
    """Return what one of Slurm's programs prints, or ""."""
    command = [str(login_script(layout)), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


def _wait_idle(layout: Layout, state: State) -> None:
    def idle() -> bool:
        # A node is listed once for each of its partitions.
        lines = set(ask(layout, "sinfo", "-h", "-N", "-o", "%N %T").splitlines())
        return lines == {f"{node.name} idle" for node in state.nodes}

    _wait(layout, CONTROLLER, idle)


def _wait(layout: Layout, name: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + IDLE_WITHIN
    while not ready():
        record = process.read_record(layout.record(name))
        if record is None or not record.alive or time.monotonic() > deadline:
            raise ClusterctlError(f"{name} did not start: {process.tail(layout.log(name))}")
        time.sleep(0.05)
