"""Check one node: free space, limits, clock, address, ports, libraries, and leftovers of earlier runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.checks import job_setup
from clusterctl.checks.answers import CommandResult, Disk, NodeAnswers, PythonVersions
from clusterctl.checks.devices import driver_versions
from clusterctl.checks.job_setup import SETUP
from clusterctl.checks.query import HCCL_PORTS, hccl_base
from clusterctl.finding import Finding
from clusterctl.inventory.setup import rank_python
from clusterctl.text import plural, size
from clusterctl.wire import contract
from clusterctl.wire import versions as known
from clusterctl.wire.typed_json import BadValue, decode, parse

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node

# Seconds of difference between clocks above which logs cannot be ordered.
MAX_SKEW = 2.0
# Bytes that should be free on a node, for code, logs and a small model's checkpoints.
MIN_DISK = 2 << 30
# Inodes that should be free: a run's folder takes some hundreds, pushed code thousands.
MIN_INODES = 10_000
# Bytes of shared memory: NCCL takes some 10 MB for a pair of devices, workers of data loaders their batches.
MIN_SHM = 1 << 30
# Bytes of memory for a rank; torch alone takes half of that.
MIN_MEMORY = 1 << 30
# Open files of a process: 32 loader workers of a rank need more than 1,024.
MIN_FILES = 4096
# Processes of a user: 16 ranks with 16 threads each need more than 256 before any loader.
MIN_PROCESSES = 4096
UNLIMITED = -1
TRAINER = ("torch", "numpy", "safetensors", "tokenizers")


def findings(reply: NodeAnswers, quick: bool = False) -> Iterator[Finding]:
    """Yield all findings from one node's answers."""
    if not quick:
        text = f"answers, its host key is known; {plural(reply.hello.cpus, 'core')}"
        yield Finding(
            "ok", reply.node.name, f"{text}, Python {reply.hello.python} for the agent", check="ssh"
        )
    yield from clock(reply)
    yield from room(reply)
    yield from limits(reply)
    yield from address(reply)
    yield from ports(reply)
    yield from setup(reply, quick)
    yield from libraries(reply, quick)
    yield from left_over(reply)


def clock(reply: NodeAnswers) -> Iterator[Finding]:
    if abs(reply.offset) > MAX_SKEW + reply.delay / 2:
        text = f"its clock is {reply.offset:+.1f} s from this machine's"
        remedy = "run an NTP client on all nodes: logs and checkpoints are ordered by time"
        yield Finding("warning", reply.node.name, text, remedy, "clock", "sudo chronyc makestep")


def room(reply: NodeAnswers) -> Iterator[Finding]:
    """Check disk, inodes, memory and shared memory."""
    name, workdir = reply.node.name, reply.found.workdir
    disks = reply.found.disks
    for path, entry in disks.items():
        is_own = path == workdir or path.startswith(f"{workdir}/")
        if not (is_own or path == "/tmp") or (path != workdir and _is_same(entry, disks.get(workdir))):
            continue
        level = "bad" if is_own else "warning"
        least = MIN_DISK if is_own else MIN_DISK // 8
        other = "name another `workdir` in the inventory" if is_own else "set TMPDIR in the node's `env`"
        if entry.read_only:
            remedy = f"mount it for writing, or {other}"
            yield Finding(level, name, f"{path} cannot be written", remedy, "disk", f"findmnt -T {path}")
            continue
        move = f"free some space, or {other}"
        if entry.free < least:
            yield Finding(level, name, f"{size(entry.free)} free for {path}", move, "disk", f"df -h {path}")
        if entry.inodes > 0 and entry.inodes_free < MIN_INODES:
            text = f"{entry.inodes_free} files can still be made in {path} (inodes), although there is free space"
            yield Finding(level, name, text, move, "inodes", f"df -i {path}")
    yield from _shared_memory(reply, disks.get("/dev/shm"))
    ranks = max(len(reply.node.devices), 1)
    if reply.found.memory.available < MIN_MEMORY * ranks:
        text = f"{size(reply.found.memory.available)} of memory available for {plural(ranks, 'rank')}"
        remedy = "stop the other programs there, or use fewer of its devices"
        yield Finding("warning", name, text, remedy, "memory", "ps aux --sort=-rss | head")


def _is_same(disk: Disk, other: Disk | None) -> bool:
    """Return whether two folders are on one disk, mounted in the same way."""
    return other is not None and (disk.device, disk.read_only) == (other.device, other.read_only)


@dataclass(frozen=True)
class CheckpointNeed:
    """The space that a training's checkpoints need on the disk of each node, or on a shared one."""

    bytes: int
    count: int
    """Checkpoints, the one in progress included."""
    folder: str = ""
    """A folder on a shared disk; "" for the node's work folder."""


def checkpoint_room(reply: NodeAnswers, need: CheckpointNeed) -> Iterator[Finding]:
    """Check that the checkpoints of a training fit the disk that they go to."""
    folder = need.folder or reply.found.workdir
    disk = reply.found.disks.get(folder)
    if disk is not None and disk.free < need.bytes:
        counted = f"{plural(need.count, 'checkpoint')}, the one in progress included"
        text = f"{counted}, need {size(need.bytes)}; {folder} has {size(disk.free)} free"
        other = "`workdir` in the inventory, or train.save.dir"
        remedy = f"free some space, lower train.save.keep, or name another disk: {other}"
        yield Finding("bad", reply.node.name, text, remedy, "disk", f"df -h {folder}")


def _shared_memory(reply: NodeAnswers, shm: Disk | None) -> Iterator[Finding]:
    fix = "sudo mount -o remount,size=16G /dev/shm"
    remedy = "make it larger; a container's is set by --shm-size or --ipc=host"
    if shm is None:
        yield Finding("warning", reply.node.name, "no /dev/shm: data loaders and NCCL need it", remedy, "shm")
    elif shm.free < MIN_SHM:
        text = (
            f"/dev/shm has {size(shm.free)} free of {size(shm.total)}: a full one ends ranks by a bus error"
        )
        yield Finding("warning", reply.node.name, text, remedy, "shm", fix)


def limits(reply: NodeAnswers) -> Iterator[Finding]:
    """Check the limits of the login, which ranks inherit."""
    wanted = [
        ("NOFILE", MIN_FILES, "nofile", "open files", "-n"),
        ("NPROC", MIN_PROCESSES, "nproc", "processes and threads", "-u"),
    ]
    # RDMA registers memory, all of which is locked.
    if reply.found.rdma:
        wanted.append(("MEMLOCK", UNLIMITED, "memlock", "bytes of locked memory, which RDMA needs", "-l"))
    for key, least, check, subject, flag in wanted:
        soft, hard = reply.found.limits[key]
        # A start raises this limit for the ranks, up to the hard one.
        soft = hard if key == "NOFILE" else soft
        if soft == UNLIMITED or (least != UNLIMITED and soft >= least):
            continue
        want = "unlimited" if least == UNLIMITED else str(max(least, 65536))
        text = (
            f"a login may have {soft} {subject} (ulimit {flag}; hard limit {'none' if hard == -1 else hard})"
        )
        remedy = f"raise it in /etc/security/limits.d and log in again: * - {check} {want}"
        fix = f"echo '* - {check} {want}' | sudo tee /etc/security/limits.d/90-clusterctl.conf"
        yield Finding("warning", reply.node.name, text, remedy, check, fix)


def address(reply: NodeAnswers) -> Iterator[Finding]:
    """Check that the address that ranks use is the node's own, and on an interface that is up."""
    node, own, present = reply.node, reply.found.place, reply.found.interfaces
    if own.ip is None:
        text = f"does not know its own address {node.address}: {own.reason}"
        yield Finding("bad", node.name, text, address_remedy(node), "address")
    elif not own.own:
        text = f"{node.address} is not an address of this node: a master there can't be bound to it"
        remedy = "write the address of the interface that all nodes share as `address` in the inventory"
        yield Finding("warning", node.name, text, remedy, "address", "ip -brief address")
    if node.interface and node.interface not in present:
        text = f"has no interface {node.interface}: it has {', '.join(present)}"
        yield Finding("bad", node.name, text, "correct `interface` in the inventory", "interface")
    elif node.interface and not present[node.interface].up:
        text = f"its interface {node.interface} is down"
        fix = f"sudo ip link set {node.interface} up"
        yield Finding("bad", node.name, text, "bring it up, or name another as `interface`", "interface", fix)
    elif node.interface and own.own and own.interface not in (node.interface, None):
        text = f"{node.address} is on {own.interface}, and `interface` says {node.interface}"
        remedy = "ranks would meet on one network and exchange data on the other: correct one of them in the inventory"
        yield Finding("warning", node.name, text, remedy, "interface")


def address_remedy(node: Node) -> str:
    """Return what to do about a node that cannot use its own address."""
    if node.host == "local":
        return (
            "write `address: 127.0.0.1` in the inventory, which is enough for runs on this machine alone; for runs "
            "with other nodes, the address at which they reach it"
        )
    return "write a number as `address` in the inventory, or correct /etc/hosts there"


def ports(reply: NodeAnswers) -> Iterator[Finding]:
    """Check HCCL's ports: those that are taken, and those that the system may give to any outgoing connection."""
    node = reply.node
    if node.kind != "npu":
        return
    base = hccl_base(node)
    last = base + HCCL_PORTS - 1
    for entry in reply.found.ports:
        text = f"port {entry.port}, which HCCL listens on, is taken by {entry}"
        remedy = "end it, or set HCCL_IF_BASE_PORT in the inventory's `env`; else the run ends with EI0019"
        yield Finding("bad", node.name, text, remedy, "hccl-ports", f"ss -tanp 'sport = :{entry.port}'")
    low, high = _range(reply.found.ephemeral_ports)
    if low <= last and base <= high and not _reserved(reply.found.reserved_ports, base, last):
        text = f"the system may give HCCL's ports {base}-{last} to any connection ({low}-{high} are its own)"
        remedy = "reserve them"
        fix = f"sudo sysctl -w net.ipv4.ip_local_reserved_ports={base}-{last}"
        yield Finding("warning", node.name, text, remedy, "hccl-ports", fix)


def _range(text: str) -> tuple[int, int]:
    parts = text.split()
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdecimal, parts)) else (1, 0)


def _reserved(text: str, first: int, last: int) -> bool:
    free = set(range(first, last + 1))
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdecimal() and (high or low).isdecimal():
            free -= set(range(int(low), int(high or low) + 1))
    return not free


# ---- libraries


def setup(reply: NodeAnswers, quick: bool) -> Iterator[Finding]:
    """Check that the node's setup runs; report its changes."""
    name = reply.node.name
    if reply.setup_problem:
        remedy = "correct `setup` in the inventory; to try it by hand: clusterctl ssh NODE"
        yield Finding("bad", name, reply.setup_problem, remedy, SETUP)
    elif reply.setup is not None and not quick:
        yield Finding("ok", name, f"its setup changes {reply.setup.text(most=12)}", check=SETUP)
    if reply.of_job is not None and not quick and not reply.setup_problem:
        yield from job_setup.findings(name, reply.of_job)


def versions(reply: NodeAnswers) -> dict[str, str]:
    """Return the versions that must be the same on every node: Python, libraries, toolkit, driver."""
    python = python_of(reply)
    result = {"Python": python.python, **python.packages} if python else {}
    return {**result, **driver_versions(reply)}


def python_of(reply: NodeAnswers) -> PythonVersions | None:
    """Return what the ranks' Python reports about itself; None if it does not run."""
    done = reply.command("python")
    if done is None or not done.succeeded:
        return None
    try:
        return decode(PythonVersions, parse(done.out))
    except BadValue:
        return None


def libraries(reply: NodeAnswers, quick: bool) -> Iterator[Finding]:
    """Check the ranks' Python, and whether it has the packages of the embedded trainer."""
    node, python = reply.node, python_of(reply)
    if python is None:
        text = f"{_python(reply)} does not run: {_why(reply.command('python'))}"
        remedy = "name the ranks' Python in the inventory: python: /path/to/python"
        yield Finding("bad", node.name, text, remedy, "python")
        return
    packages = python.packages
    yield from _torch_npu(node, packages, driver_versions(reply))
    for name in (contract.CUDA_VISIBLE, contract.ASCEND_VISIBLE):
        if name in node.env:
            text = f"its `env` in the inventory sets {name}, instead of the devices that a launch chooses"
            yield Finding("warning", node.name, text, "remove it; `devices` names the devices", "devices")
    if quick:
        return
    missing = [name for name in TRAINER if name not in packages]
    oldest = ".".join(map(str, known.TRAINER_PYTHON))
    if not known.fits_trainer(python.python, known.TRAINER_PYTHON):
        text = f"the embedded trainer can't run there: {_python(reply)} is Python {python.python}, older than {oldest}"
        remedy = f"name a Python {oldest} as `python` in the inventory; not needed for programs of your own"
        yield Finding("warning", node.name, text, remedy, "libraries")
    elif missing:
        text = f"the embedded trainer can't run there: no {', '.join(missing)}"
        remedy = f"install them into {_python(reply)} on that node; not needed for programs of your own"
        fix = f"{_python(reply)} -m pip install {' '.join(missing)}"
        yield Finding("warning", node.name, text, remedy, "libraries", fix)
    else:
        text = f"ranks run with Python {python.python}, torch {packages['torch']}"
        yield Finding("ok", node.name, text, check="python")


def _python(reply: NodeAnswers) -> str:
    """Return the path of the ranks' Python."""
    return rank_python(reply.node.python, reply.node.setup, reply.of_job.setup if reply.of_job else None)


def _torch_npu(node: Node, packages: Mapping[str, str], others: Mapping[str, str]) -> Iterator[Finding]:
    """Check torch_npu, which is built for one CANN and for one torch, and the firmware, which goes with the driver."""
    torch, plugin = packages.get("torch", ""), packages.get("torch_npu", "")
    cann, release = others.get("CANN", ""), known.torch_of(plugin)
    if node.kind == "npu" and packages and not plugin:
        remedy = f"install the torch_npu that goes with its torch into {node.python}"
        if newest := known.newest_for(cann):
            remedy += f"; for CANN {known.short(cann)}: torch {known.torch_of(newest)} and torch_npu {newest}"
        yield Finding("warning", node.name, "no torch_npu for its NPUs", remedy, "torch-npu")
    elif plugin and torch and release != known.torch_of(torch):
        text = f"torch_npu {plugin} does not go with torch {torch}"
        remedy = f"install torch {release}, or the torch_npu of {known.torch_of(torch)}"
        yield Finding("bad", node.name, text, remedy, "torch-npu")
    elif wrong := known.wrong_torch_npu(cann, plugin):
        yield Finding("warning", node.name, *wrong, "torch-npu")
    if wrong := known.wrong_firmware(others.get("driver", ""), others.get("firmware", "")):
        yield Finding("warning", node.name, *wrong, "firmware", "npu-smi info -t board -i 0")


def _why(done: CommandResult | None) -> str:
    if done is None:
        return "no such program"
    return "no answer in time" if done.timed_out else done.last_line()


# ---- what is left of earlier runs


def left_over(reply: NodeAnswers) -> Iterator[Finding]:
    """Yield processes without a supervisor, and agents whose login is gone."""
    name = reply.node.name
    for entry in reply.found.runs:
        pids = ", ".join(map(str, entry.pids[:8])) + (" and more" if len(entry.pids) > 8 else "")
        if entry.supervised:
            text = f"{entry.run} runs there with {_processes(len(entry.pids))}"
            yield Finding("ok", name, text, check="runs")
            continue
        text = f"{_processes(len(entry.pids))} left of {entry.run}, whose supervisor is gone: {pids}"
        remedy = f"clusterctl stop {entry.run} where it was started, or kill them"
        yield Finding(
            "warning", name, text, remedy, "left-over", f"kill {' '.join(map(str, entry.pids[:50]))}"
        )
    if reply.found.stale_agents:
        pids = " ".join(map(str, reply.found.stale_agents))
        text = f"agents that no launcher talks to any more: {pids}"
        yield Finding("warning", name, text, "end them", "stale-agents", f"kill -9 {pids}")


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
