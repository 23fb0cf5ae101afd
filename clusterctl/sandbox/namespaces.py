"""Nodes made of Linux namespaces. They need root.

Each node has its own processes, mounts, host name, /etc, /tmp, /run, /dev/shm and network card. sshd is its first
process, so killing it kills the node. The cards are connected to a bridge in the network of `switch.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import clusterctl
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.sandbox import process, switch
from clusterctl.sandbox import sshd as sandbox_sshd
from clusterctl.sandbox.layout import HOME_APART, Layout, SandboxNode, State, home_on_node

# The name of the switch's record.
RELAY = "relay"
PREFIX_LENGTH = 16
TOOLS = ("unshare", "nsenter", "ip", "mount")
READY_WITHIN = 10.0


def why_not() -> str:
    """Return what this machine lacks for such nodes, or ""."""
    if sys.platform != "linux":
        return "namespaces need Linux"
    if os.geteuid() != 0:
        return "root is needed"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=sandbox_sshd.PATHS + ":/bin") is None]
    if sandbox_sshd.find_sshd() is None:
        missing.append("sshd")
    if missing:
        return f"not installed: {', '.join(missing)} (packages util-linux, iproute2, openssh-server)"
    tried = subprocess.run(
        [_tool("unshare"), "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return "" if tried.returncode == 0 else f"new namespaces are refused: {tried.stderr.strip()}"


def _tool(name: str) -> str:
    found = shutil.which(name, path=sandbox_sshd.PATHS + ":/bin")
    if found is None:
        raise UsageError(f"{name} is not installed", "use --mode loopback")
    return found


def node_address(layout: Layout, index: int) -> str:
    """Return the address of a node: blocks of 250, the first one numbered by the sandbox."""
    block, host = divmod(index - 1, 250)
    return f"10.77.{(int(layout.subnet) + block) % 256}.{host + 1}"


def bridge_address(layout: Layout) -> str:
    """Return the address of the switch itself."""
    return f"10.77.{layout.subnet}.254"


def start_relay(layout: Layout, nodes: tuple[SandboxNode, ...]) -> dict[str, int]:
    """Start the switch with its relay; return the port of each node on 127.0.0.1."""
    config = layout.directory / "relay_config.json"
    value = {
        "nodes": {node.name: node.address for node in nodes},
        "bridge_address": f"{bridge_address(layout)}/{PREFIX_LENGTH}",
        "ip": _tool("ip"),
        "ports": str(layout.relay_ports),
    }
    config.write_text(json.dumps(value))
    process.start(
        layout.record(RELAY),
        RELAY,
        [sys.executable, "-I", "-S", switch.__file__, str(config)],
        sandbox_sshd.daemon_environment(layout, RELAY),
        layout.log(RELAY),
    )
    deadline = time.monotonic() + READY_WITHIN
    while not layout.relay_ports.exists():
        if time.monotonic() > deadline or not _alive(layout, RELAY):
            log = process.tail(layout.log(RELAY))
            raise ClusterctlError(f"the switch of the sandbox did not start: {log}", "use --mode loopback")
        time.sleep(0.005)
    ports: dict[str, int] = json.loads(layout.relay_ports.read_text())
    return ports


def _alive(layout: Layout, name: str) -> bool:
    record = process.read_record(layout.record(name))
    return record is not None and record.alive


def start(layout: Layout, state: State, node: SandboxNode) -> None:
    """Start a node: it waits for its network card, then becomes sshd."""
    sshd = sandbox_sshd.find_sshd()
    # why_not() has checked this.
    assert sshd is not None
    config = sandbox_sshd.write_config(layout, state, node, sshd)
    _write_etc(layout, state, node)
    (layout.node(node) / "stage").mkdir(mode=0o700)
    command = [
        _tool("unshare"),
        "--mount",
        "--pid",
        "--net",
        "--uts",
        "--ipc",
        "--fork",
        "--kill-child=SIGKILL",
        "/bin/sh",
        "-c",
        NODE_SCRIPT,
        "sandbox-node",
        str(layout.node(node)),
        node.name,
        f"{node.address}/{PREFIX_LENGTH}",
        sshd,
        str(config),
        str(layout.log(node.name)),
        HOME_APART if state.isolated else "",
        *_kept(layout, state),
    ]
    # The node waits for a line, and ends if this process ends before.
    reading, writing = os.pipe()
    try:
        with os.fdopen(reading, "rb") as stdin:
            environment = sandbox_sshd.daemon_environment(layout, node.name)
            process.start(
                layout.record(node.name), node.name, command, environment, layout.log(node.name), stdin
            )
        _plug_in(layout, node, first_process(layout, node))
        os.write(writing, b"connected\n")
    finally:
        os.close(writing)


def wait_listening(layout: Layout, node: SandboxNode) -> None:
    """Wait until sshd logs that it listens: an earlier connection would wait one second for TCP's first retry."""
    deadline = time.monotonic() + READY_WITHIN
    while b"Server listening" not in layout.log(node.name).read_bytes():
        if time.monotonic() > deadline or not _alive(layout, node.name):
            log = process.tail(layout.log(node.name))
            raise ClusterctlError(f"{node.name} did not start: {log}", "use --mode loopback")
        time.sleep(0.005)


def first_process(layout: Layout, node: SandboxNode) -> int:
    """Return the pid (outside the node) of the first process of a node; when it ends, the node ends."""
    record = process.read_record(layout.record(node.name))
    deadline = time.monotonic() + READY_WITHIN
    while record and record.alive and time.monotonic() < deadline:
        children = [pid for pid, row in process.table().items() if row.parent == record.pid]
        if children:
            return children[0]
        time.sleep(0.002)
    raise ClusterctlError(f"{node.name} is not running: {process.tail(layout.log(node.name))}")


def _plug_in(layout: Layout, node: SandboxNode, pid: int) -> None:
    """Connect eth0 of a node to the switch."""
    plug = port_of(node)
    ip_in_switch(
        layout,
        f"link add {plug} type veth peer name eth0 netns {pid}",
        f"link set {plug} master br0",
        f"link set {plug} up",
    )


def port_of(node: SandboxNode) -> str:
    """Return the name of the switch port of a node."""
    return f"node{node.index}"


def cut(layout: Layout, node: SandboxNode) -> None:
    """Take the link of a node down: packets are lost, connections stay open on both sides."""
    ip_in_switch(layout, f"link set {port_of(node)} down")


def heal(layout: Layout, node: SandboxNode) -> None:
    """Take the link of a node up."""
    ip_in_switch(layout, f"link set {port_of(node)} up")


def link_is_up(layout: Layout, node: SandboxNode) -> bool:
    """Return whether the link of a node is up."""
    flags = re.search(r"<([A-Z_,-]*)>", ip_in_switch(layout, f"link show {port_of(node)}"))
    return flags is not None and "UP" in flags.group(1).split(",")


def ip_in_switch(layout: Layout, *commands: str) -> str:
    """Run `ip` commands inside the switch."""
    relay = process.read_record(layout.record(RELAY))
    if relay is None or not relay.alive:
        hint = "run `clusterctl sandbox down`, then `up`"
        raise ClusterctlError("the switch of the sandbox is not running", hint)
    done = subprocess.run(
        [_tool("nsenter"), f"--net=/proc/{relay.pid}/ns/net", _tool("ip"), "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode:
        raise ClusterctlError(f"the switch of the sandbox failed: {done.stderr.strip()}")
    return done.stdout


def _write_etc(layout: Layout, state: State, node: SandboxNode) -> None:
    """Write the files in which /etc of this node differs from that of the machine."""
    etc = layout.etc(node)
    (etc / "hostname").write_text(f"{node.name}\n")
    # Without the usual line `127.0.1.1 <name>`: gloo would offer that address to the other nodes.
    lines = ["127.0.0.1 localhost", *(f"{other.address} {other.name}" for other in state.nodes)]
    (etc / "hosts").write_text("\n".join(lines) + "\n")
    passwd = Path("/etc/passwd").read_text()
    home = home_on_node(layout, state, node).replace("\\", r"\\")
    root = r"(?m)^(root:[^:]*:0:0:[^:]*):[^:]*:"
    (etc / "passwd").write_text(re.sub(root, rf"\1:{home}:", passwd, count=1))
    shadow = etc / "shadow"
    # The root account may be locked (`!`) on this machine; on the node its key must work.
    shadow.touch(mode=0o600)
    shadow.write_text(re.sub(r"(?m)^root:!*", "root:*", Path("/etc/shadow").read_text(), count=1))


def _kept(layout: Layout, state: State) -> list[str]:
    """Return the folders below /tmp and /run that a node must still see, although it has its own /tmp and /run."""
    package = Path(clusterctl.__file__).parent.parent
    pythons = [Path(state.python).parent.parent, Path(state.python).resolve().parent.parent, Path(sys.prefix)]
    wanted = [layout.directory, package, *pythons]
    commands: list[str] = []
    for folder in sorted({str(path) for path in wanted}):
        hidden = folder.startswith(("/tmp/", "/run/"))
        if hidden and not any(folder.startswith(f"{outer}/") for outer in commands):
            commands.append(folder)
    return commands


# The arguments: folder, name and address of the node, sshd, its configuration, the log, where to mount its home folder
# ("": nowhere), then the folders to keep.
# Folders of an overlay are named relative to the stage, since ',' and ':' are special in the options of mount.
NODE_SCRIPT = """
set -eu
dir=$1 name=$2 address=$3 sshd=$4 config=$5 log=$6 apart=$7
shift 7
read -r line || exit 1
mount -t proc proc /proc
printf '%s' "$name" > /proc/sys/kernel/hostname
mount -t tmpfs -o mode=0700 stage "$dir/stage"
cd "$dir/stage"
mkdir -p etc/new etc/work local/new/Ascend/driver/tools local/new/bin local/work tmp run shm cgroup
chmod 755 etc/new local/new local/new/bin
cp -p "$dir"/etc/* etc/new/
cp -p "$dir"/bin/hccn_tool local/new/Ascend/driver/tools/
cp -p "$dir"/bin/npu-smi local/new/bin/
mount -t overlay -o lowerdir=/etc,upperdir=etc/new,workdir=etc/work overlay /etc
mount -t overlay -o lowerdir=/usr/local,upperdir=local/new,workdir=local/work overlay /usr/local
mount -t tmpfs -o mode=1777 tmp tmp
mount -t tmpfs -o mode=0755 run run
mkdir -m 755 run/sshd
for kept; do
    mkdir -p "$PWD/${kept#/}"
    mount --bind "$kept" "$PWD/${kept#/}"
done
if mount --rbind /sys/fs/cgroup cgroup 2>/dev/null && mount -t sysfs sysfs /sys; then
    mount --rbind cgroup /sys/fs/cgroup
fi
if [ "$apart" ]; then
    mount -t tmpfs -o mode=0755 apart "${apart%/*}"
    mkdir -m 700 "$apart"
    mount --bind "$dir/home" "$apart"
    mount -t tmpfs -o mode=0700 hidden "$dir/home"
fi
mount -t tmpfs -o mode=1777 shm /dev/shm
mount --rbind run /run
mount --rbind tmp /tmp
ip link set lo up
ip address add "$address" dev eth0
ip link set eth0 up
cd /
exec "$sshd" -D -e -f "$config" < /dev/null 2>> "$log"
"""
