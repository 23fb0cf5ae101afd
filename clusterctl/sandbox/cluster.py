"""A cluster of real SSH nodes on this machine: start, status, stop, and simulated faults.

Everything is in one folder, and every process records itself there. So `down` can end everything that an interrupted
`up` left behind, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import clusterctl
from clusterctl.errors import ClusterctlError, UsageError, did_you_mean
from clusterctl.sandbox import devices as sandbox_devices
from clusterctl.sandbox import folders, namespaces, process, queue, sshd
from clusterctl.sandbox.layout import (
    MAX_NODES,
    MAX_ON_LOOPBACK,
    MODES,
    Layout,
    SandboxNode,
    State,
    load_state,
    make_folders,
    make_keys,
    write_inventory,
)

# Seconds: a slow machine's first import of paramiko takes longest.
READY_WITHIN = 20.0
# Another process may take a port between our choice and the bind of the daemon.
TRIES = 5


@dataclass(frozen=True)
class NodeStatus:
    """The state of one node."""

    name: str
    state: str
    """up, cut (its link is down), silent (it runs but does not answer) or down."""
    ssh: str
    """host:port, where SSH connects."""
    address: str
    devices: int
    pid: int | None


class Sandbox:
    """A sandbox that was started."""

    def __init__(self, layout: Layout, state: State) -> None:
        self.layout = layout
        self.state = state

    @property
    def directory(self) -> Path:
        return self.layout.directory

    @property
    def mode(self) -> str:
        return self.state.mode

    @property
    def cluster_file(self) -> Path:
        return self.layout.cluster_file

    @property
    def nodes(self) -> tuple[SandboxNode, ...]:
        return self.state.nodes

    def node(self, name: str) -> SandboxNode:
        """Return the node with this name."""
        names = [node.name for node in self.nodes]
        if name not in names:
            known = f"the nodes are {', '.join(names)}"
            raise UsageError(f"the sandbox has no node {name!r}", did_you_mean(name, names) or known)
        return self.nodes[names.index(name)]

    def status(self) -> list[NodeStatus]:
        """Return the state of each node, in order; ask all in parallel and wait one second at most."""
        with ThreadPoolExecutor(max_workers=len(self.nodes)) as pool:
            return list(pool.map(self._status, self.nodes))

    def _status(self, node: SandboxNode) -> NodeStatus:
        record = process.read_record(self.layout.record(node.name))
        alive = record is not None and record.alive
        state = "down"
        if alive and self.mode == "namespaces" and not _link_is_up(self.layout, node):
            state = "cut"
        elif alive:
            state = "up" if answers(node.host, node.port, 1.0) else "silent"
        pid = record.pid if record and alive else None
        return NodeStatus(node.name, state, f"{node.host}:{node.port}", node.address, self.state.devices, pid)

    def kill(self, name: str) -> int:
        """Kill a node with all its processes; return how many there were.

        In mode namespaces this is like a power loss: connections are not closed, they just carry no more data. In the
        other modes the kernel closes them, as when sshd and all its sessions crash.
        """
        node = self.node(name)
        if self.mode == "namespaces" and self._recorded(node):
            # Cut the link first, so that no packet of a dying process closes a connection at its other end.
            namespaces.cut(self.layout, node)
        return process.end(lambda: _marked(self.layout, node.name) | self._recorded(node))

    def cut(self, name: str) -> None:
        """Cut the network link of a node; its processes continue."""
        self._needs_namespaces("cut")
        namespaces.cut(self.layout, self._living(name))

    def heal(self, name: str) -> None:
        """Restore the network link of a node."""
        self._needs_namespaces("heal")
        namespaces.heal(self.layout, self._living(name))

    def down(self) -> int:
        """Stop the sandbox and remove its folder; return the number of processes that were killed."""
        return down(self.directory)

    def _recorded(self, node: SandboxNode) -> set[int]:
        record = process.read_record(self.layout.record(node.name))
        return {record.pid} if record and record.alive else set()

    def _living(self, name: str) -> SandboxNode:
        node = self.node(name)
        if not self._recorded(node):
            raise UsageError(f"{name} is down", "run `clusterctl sandbox down`, then `up`")
        return node

    def _needs_namespaces(self, verb: str) -> None:
        if self.mode == "namespaces":
            return
        missing = namespaces.why_not()
        hint = "`clusterctl sandbox down`, then `clusterctl sandbox up --mode namespaces`"
        problem = f"`{verb}` needs mode namespaces; in mode {self.mode} the nodes share the machine's network"
        raise UsageError(problem, f"{hint}; but on this machine {missing}" if missing else hint)


def up(
    directory: Path,
    nodes: int = 2,
    devices: int = 2,
    mode: str = "auto",
    python: str = sys.executable,
    with_queue: bool = False,
    isolated: bool = False,
) -> Sandbox:
    """Start a sandbox in a folder and return it; after any failure nothing of it is left."""
    layout = Layout(_checked_directory(directory))
    if with_queue:
        queue.check(layout)
    chosen = choose_mode(mode, with_queue, isolated)
    _check_counts(nodes, devices, chosen)
    user = pwd.getpwuid(os.getuid()).pw_name
    with process.one_interrupt(), folders.own_folder(layout) as made, folders.locked(layout):
        _refuse_second(layout)
        planned = _plan_nodes(layout, chosen, nodes)
        state = State(chosen, devices, python, user, made, planned, queue=with_queue, isolated=isolated)
        try:
            return Sandbox(layout, _build(layout, state))
        except BaseException:
            _end(layout, made_directory=made)
            raise


def load(directory: Path) -> Sandbox:
    """Return the sandbox in a folder."""
    layout = Layout(_resolved(directory))
    state = load_state(layout)
    if state is None:
        raise UsageError(f"no sandbox in {layout.directory}", "start one with `clusterctl sandbox up`")
    if not state.complete:
        problem = f"the sandbox in {layout.directory} was not started completely"
        raise UsageError(problem, "run `clusterctl sandbox down`, then `up`")
    return Sandbox(layout, state)


def down(directory: Path) -> int:
    """Stop the sandbox in a folder, also an incomplete one; return the number of processes that were killed."""
    layout = Layout(_resolved(directory))
    if layout.directory.exists() and not layout.directory.is_dir():
        raise UsageError(f"{layout.directory} is not a folder", "give the folder of `sandbox up` with --dir")
    if not layout.directory.exists() or not any(layout.directory.iterdir()):
        return process.end(lambda: _marked(layout))
    if not layout.state.exists() and folders.is_foreign(layout):
        raise UsageError(f"{layout.directory} is not a sandbox", "give the folder of `sandbox up` with --dir")
    with process.one_interrupt(), folders.locked(layout):
        state = load_state(layout)
        return _end(layout, made_directory=state.made_directory if state else True)


def running(directory: Path) -> int:
    """Return how many processes `down` would kill."""
    return len(process.below(_roots(Layout(_resolved(directory)))))


def foresee(
    directory: Path, nodes: int, devices: int, mode: str, with_queue: bool = False, isolated: bool = False
) -> dict[str, object]:
    """Return what `up` would make, after the same checks; make nothing."""
    layout = Layout(_checked_directory(directory))
    if with_queue:
        queue.check(layout)
    chosen = choose_mode(mode, with_queue, isolated)
    _check_counts(nodes, devices, chosen)
    _refuse_second(layout)
    planned = [{"name": node.name, "address": node.address} for node in _plan_nodes(layout, chosen, nodes)]
    return {"directory": str(layout.directory), "mode": chosen, "devices": devices, "nodes": planned}


def choose_mode(mode: str, with_queue: bool = False, isolated: bool = False) -> str:
    """Return the mode that `auto` stands for, or `mode` itself; refuse one that this machine does not support.

    With a batch system, `auto` prefers nodes with host names and addresses of their own. Isolated nodes need
    mounts of their own.
    """
    if isolated and mode in ("loopback", "embedded"):
        raise UsageError(
            f"--isolated: in mode {mode} the nodes see the machine's files", "use --mode namespaces"
        )
    mode = "namespaces" if isolated and mode == "auto" else mode
    if mode not in ("auto", *MODES):
        known = ("auto", *MODES)
        raise UsageError(
            f"--mode: unknown mode {mode!r}", did_you_mean(mode, known) or f"use one of {', '.join(known)}"
        )
    locked = sshd.why_not_root()
    if mode == "auto" and with_queue and not namespaces.why_not():
        return "namespaces"
    if mode == "auto":
        return "loopback" if sshd.find_sshd() and not locked else "embedded"
    if mode == "namespaces" and (missing := namespaces.why_not()):
        problem = f"mode namespaces is not possible on this machine: {missing}"
        raise UsageError(problem, "use --mode loopback or --mode embedded")
    if mode == "loopback" and not sshd.find_sshd():
        raise UsageError("sshd is not installed", "install openssh-server, or use --mode embedded")
    if mode == "loopback" and locked:
        raise UsageError(locked, "use --mode namespaces or --mode embedded")
    return mode


def answers(host: str, port: int, seconds: float) -> bool:
    """Return whether an SSH server at this address sends its first line."""
    try:
        with socket.create_connection((host, port), timeout=seconds) as link:
            link.settimeout(seconds)
            # Read the whole line, or closing resets the connection.
            with link.makefile("rb") as lines:
                return lines.readline(255).startswith(b"SSH-")
    except OSError:
        return False


def _resolved(directory: Path) -> Path:
    return Path(directory).expanduser().resolve()


def _checked_directory(directory: Path) -> Path:
    path = _resolved(directory)
    if re.search(r'["%\\\x00-\x1f\x7f]', str(path)):
        hint = 'use a path without ", % and \\: sshd does not accept them'
        raise UsageError(f"{str(path)!r} cannot hold a sandbox", hint)
    if any(path.is_relative_to(taken) for taken in ("/etc", "/usr/local", "/proc", "/sys", "/dev")):
        problem = f"{path} cannot hold a sandbox: the nodes replace parts of this folder"
        raise UsageError(problem, "choose another --dir")
    if not path.parent.is_dir():
        raise UsageError(f"the folder {path.parent} does not exist", f"mkdir -p {path.parent}")
    return path


def _check_counts(nodes: int, devices: int, mode: str) -> None:
    most = MAX_NODES if mode == "namespaces" else MAX_ON_LOOPBACK
    if not 1 <= nodes <= most:
        raise UsageError(f"-n {nodes}: so many nodes are not possible in mode {mode}", f"use 1 to {most}")
    if not 1 <= devices <= sandbox_devices.MAX_DEVICES:
        raise UsageError(
            f"--devices {devices}: so many per node are not possible",
            f"use 1 to {sandbox_devices.MAX_DEVICES}",
        )


def _plan_nodes(layout: Layout, mode: str, count: int) -> tuple[SandboxNode, ...]:
    found = []
    for index in range(1, count + 1):
        if mode == "namespaces":
            host, address, interface = "127.0.0.1", namespaces.node_address(layout, index), "eth0"
        elif sys.platform == "linux":
            # Linux listens on every address of 127/8.
            host = address = f"{layout.loopback}.{index}"
            interface = "lo"
        else:
            host, address, interface = "127.0.0.1", "127.0.0.1", "lo0"
        found.append(SandboxNode(f"node{index}", index, host, address, interface))
    return tuple(found)


def _refuse_second(layout: Layout) -> None:
    if layout.state.exists():
        state = load_state(layout)
        running = any(record.alive for record in process.read_records(layout.processes))
        condition = "is up" if state and state.complete and running else "was not stopped"
        raise UsageError(
            f"a sandbox in {layout.directory} {condition}",
            f"`clusterctl sandbox down --dir {layout.directory}`, or another --dir",
        )


def _build(layout: Layout, state: State) -> State:
    state.save(layout)
    make_folders(layout, state)
    host_keys = make_keys(layout, state.nodes)
    state = _start(layout, state)
    state.save(layout)
    write_inventory(layout, state, host_keys)
    if state.queue:
        queue.start(layout, state)
    state = replace(state, complete=True)
    state.save(layout)
    return state


def _start(layout: Layout, state: State) -> State:
    """Start all nodes and wait until they answer; return the state with their ports.

    The nodes are started one after another in this thread, so that nothing is still being started after an interrupt.
    """
    if state.mode == "namespaces":
        ports = namespaces.start_relay(layout, state.nodes)
        state = replace(state, nodes=tuple(replace(node, port=ports[node.name]) for node in state.nodes))
        for node in state.nodes:
            namespaces.start(layout, state, node)
        for node in state.nodes:
            namespaces.wait_listening(layout, node)
            if not _wait_answer(layout, node):
                raise ClusterctlError(f"{node.name} ended: {process.tail(layout.log(node.name))}")
        return state
    if state.mode == "loopback":
        sshd.lease_run_folder(layout)
    nodes = [_start_on_free_port(layout, state, node) for node in state.nodes]
    for index, node in enumerate(nodes):
        tries = TRIES
        while not _wait_answer(layout, nodes[index]):
            if (tries := tries - 1) == 0:
                raise ClusterctlError(f"{node.name}: found no free port on {node.host}", "try again")
            nodes[index] = _start_on_free_port(layout, state, node)
    return replace(state, nodes=tuple(nodes))


def _start_on_free_port(layout: Layout, state: State, node: SandboxNode) -> SandboxNode:
    with socket.create_server((node.host, 0)) as taken:
        node = replace(node, port=taken.getsockname()[1])
    if state.mode == "loopback":
        sshd.start(layout, state, node)
    else:
        _start_embedded(layout, state, node)
    return node


def _start_embedded(layout: Layout, state: State, node: SandboxNode) -> None:
    config = layout.node(node) / "embedded.json"
    value = {
        "address": node.host,
        "port": node.port,
        "host_key": str(layout.host_key(node)),
        "authorized_keys": str(layout.authorized_keys),
        "user": state.user,
        "env": sshd.environment(layout, state, node),
    }
    config.write_text(json.dumps(value))
    environment = sshd.daemon_environment(layout, node.name)
    environment["PYTHONPATH"] = str(Path(clusterctl.__file__).parent.parent)
    command = [sys.executable, "-m", "clusterctl.sandbox.embedded", str(config)]
    process.start(layout.record(node.name), node.name, command, environment, layout.log(node.name))


def _wait_answer(layout: Layout, node: SandboxNode) -> bool:
    """Wait until a node answers; return False if it ended because its port was taken."""
    deadline = time.monotonic() + READY_WITHIN
    while not answers(node.host, node.port, 1.0):
        record = process.read_record(layout.record(node.name))
        log = process.tail(layout.log(node.name))
        if record is None or not record.alive:
            if "in use" in log or "bind" in log.lower():
                return False
            raise ClusterctlError(f"{node.name} ended during its start: {log}", "try another --mode")
        if time.monotonic() > deadline:
            raise ClusterctlError(f"{node.name} did not answer within {READY_WITHIN:g} s: {log}")
        time.sleep(0.01)
    return True


def _link_is_up(layout: Layout, node: SandboxNode) -> bool:
    try:
        return namespaces.link_is_up(layout, node)
    except ClusterctlError:
        # The switch is not running.
        return False


def _roots(layout: Layout) -> set[int]:
    """Return the running processes that were recorded, or whose environment has the mark of this sandbox."""
    # Search for marks first: sshd overwrites its environment, but it was recorded before it became sshd.
    marked = _marked(layout)
    records = process.read_records(layout.processes)
    return marked | {record.pid for record in records if record.alive}


def _marked(layout: Layout, node: str = "") -> set[int]:
    return process.marked(f"{layout.id}/{node}")


def _end(layout: Layout, *, made_directory: bool) -> int:
    """Kill every process of a sandbox, then remove its files; can be repeated after an interrupt."""
    ended = process.end(lambda: _roots(layout))
    sshd.end_lease(layout)
    for path in layout.directory.iterdir():
        if path not in (layout.state, layout.lock, layout.processes):
            folders.remove(path)
    # End processes that were starting during the first search.
    ended += process.end(lambda: _roots(layout))
    if layout.processes.exists():
        folders.remove(layout.processes)
    # Remove the state last: `down` needs it.
    layout.state.unlink(missing_ok=True)
    layout.lock.unlink(missing_ok=True)
    if made_directory:
        # A folder with files of the user is kept.
        with contextlib.suppress(OSError):
            layout.directory.rmdir()
    return ended
