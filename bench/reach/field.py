"""The environment of bench/reach: real sshd nodes in namespaces, and ssh settings that let every tool connect to them.

The benchmark enters the network namespace of the sandbox's switch, so that no relay of the sandbox is between a tool
and a node. The nodes' /tmp is in memory, so that no disk is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.field import ROOT, cpu_of, sandbox, wait_for
from clusterctl.sandbox import namespaces
from clusterctl.sandbox.cluster import Sandbox

# From linux/sched.h.
CLONE_NEWNET = 0x40000000
# An environment variable of all processes started here; it finds those that stay in the background.
MARK = "REACH_BENCH"
# The folder on the nodes that pushes write to.
DEST = "/tmp/reach"
# The agent's folder on the nodes.
WORKDIR = "/tmp/clusterctl"
# The time limit of one command, in seconds.
LIMIT = 900.0
CURVE = ("-o", "KexAlgorithms=curve25519-sha256")
SETTINGS = {
    "stock": (),
    "curve25519": CURVE,
    "curve25519, aes128-gcm": (*CURVE, "-o", "Ciphers=aes128-gcm@openssh.com"),
}
"""The ssh options of each setting of a peer; the last setting is used only where the bulk cipher matters."""


@dataclass(frozen=True)
class Sample:
    """The result of one run of one tool."""

    wall: float
    cpu: float
    """Processor time in seconds of the tool and all its child processes on this machine."""
    failed: int
    """The number of nodes that failed, or 1 where that number is unknown."""
    output: bytes = b""


@dataclass(frozen=True)
class Place:
    """A node, with what the benchmark needs to connect to it."""

    name: str
    address: str
    pid: int
    """The pid of the node's first process, as seen outside the node."""

    def path(self, path: str) -> Path:
        """Return a path on the node as a path on this machine."""
        return Path(f"/proc/{self.pid}/root{path}")

    def cpu(self) -> float:
        """Return the processor time in seconds of the node's sshd and of all processes that ended on the node."""
        return cpu_of(self.pid, children=True)


class Field:
    """The nodes of one run of the bench, and the configuration to reach them."""

    def __init__(self, made: Sandbox, folder: Path) -> None:
        self.made = made
        self.folder = folder
        self.places = [
            Place(node.name, node.address, namespaces.first_process(made.layout, node)) for node in made.nodes
        ]
        self.known_hosts = folder / "known_hosts"
        self.inventory = folder / "cluster.yaml"
        self.home = folder / "home"
        self.home.mkdir(mode=0o700)
        self.known_hosts.write_text(
            "".join(f"{place.address} {self.host_key(place)}\n" for place in self.places)
        )
        self.write_inventory(self.inventory, {place.name: {"host": place.address} for place in self.places})
        self._write_ssh_configs()
        self.env = {
            "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.home),
            "LANG": "C.UTF-8",
            MARK: str(folder),
            # The launcher of this checkout.
            "PYTHONPATH": str(ROOT),
        }

    def host_key(self, place: Place) -> str:
        return self.made.layout.host_key(self.made.node(place.name)).with_suffix(".pub").read_text().strip()

    def write_inventory(self, path: Path, nodes: Mapping[str, Mapping[str, object]]) -> None:
        """Write an inventory for clusterctl that uses the field's known_hosts."""
        shared = {
            "user": self.made.state.user,
            "key": str(self.made.layout.key),
            "python": shutil.which("python3", path="/usr/bin") or sys.executable,
            "workdir": WORKDIR,
        }
        lines = [f"known_hosts: {self.known_hosts}", f"defaults: {json.dumps(shared)}", "nodes:"]
        lines += [f"  {name}: {json.dumps(dict(fields))}" for name, fields in nodes.items()]
        path.write_text("\n".join(lines) + "\n")

    def ssh_options(self, setting: str, masters: bool = False) -> list[str]:
        """Return the `ssh` options to connect to a node by its address without the machine's own configuration."""
        return ["-F", str(self.folder / ("ssh_masters" if masters else "ssh_config")), *SETTINGS[setting]]

    def ssh_lines(self) -> list[str]:
        """Return the ssh configuration that all peers share."""
        return [
            f"User {self.made.state.user}",
            f"IdentityFile {self.made.layout.key}",
            "IdentitiesOnly yes",
            f"UserKnownHostsFile {self.known_hosts}",
            "StrictHostKeyChecking yes",
            "BatchMode yes",
            "LogLevel ERROR",
        ]

    def _write_ssh_configs(self) -> None:
        lines = self.ssh_lines()
        (self.folder / "ssh_config").write_text("\n".join(lines) + "\n")
        lines += ["ControlMaster auto", f"ControlPath {self.folder}/cm-%h", "ControlPersist 600"]
        (self.folder / "ssh_masters").write_text("\n".join(lines) + "\n")

    def forget_words(self) -> None:
        (self.folder / "stderr.txt").write_bytes(b"")

    def last_words(self) -> str:
        """Return the end of the last commands' stderr."""
        return (self.folder / "stderr.txt").read_bytes()[-200:].decode(errors="replace").strip()

    def clear(self) -> None:
        """Delete the files that pushes left on the nodes, except the agent."""
        for place in self.places:
            for path in (DEST, f"{WORKDIR}/trees", f"{WORKDIR}/store", f"{WORKDIR}/tmp"):
                shutil.rmtree(place.path(path), ignore_errors=True)
            place.path(DEST).mkdir()

    def lacking(self, count: int, name: str, size: int) -> int:
        """Return how many of the first `count` nodes do not have the file `name` below DEST in full size."""
        held = 0
        for place in self.places[:count]:
            with contextlib.suppress(OSError):
                held += place.path(f"{DEST}/{name}").stat().st_size == size
        return count - held

    def measure(self, command: Callable[[], Sequence[subprocess.Popen[bytes]]]) -> Sample:
        """Start processes and wait for all of them; return their wall time and processor time."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        started = command()
        try:
            outputs = [process.communicate(timeout=LIMIT)[0] or b"" for process in started]
        except BaseException:
            for process in started:
                process.kill()
                process.wait()
            raise
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Sample(wall, cpu, sum(process.returncode != 0 for process in started), b"".join(outputs))

    def start(self, argv: Sequence[str], output: Path | None = None, **extra: str) -> subprocess.Popen[bytes]:
        """Start one command in the field's environment; write its output to `output` if given."""
        errors = (self.folder / "stderr.txt").open("ab")
        with errors, output.open("wb") if output else contextlib.nullcontext(subprocess.PIPE) as stdout:
            return subprocess.Popen(
                argv, env={**self.env, **extra}, stdin=subprocess.DEVNULL, stdout=stdout, stderr=errors,
                cwd=self.folder,
            )  # fmt: skip

    def run(self, argv: Sequence[str], output: Path | None = None, **extra: str) -> Sample:
        return self.measure(lambda: [self.start(argv, output, **extra)])

    def clusterctl(self, verb: str, *arguments: str, inventory: Path | None = None) -> list[str]:
        """Return the command line of the launcher as a user would type it."""
        program = Path(sys.executable).with_name("clusterctl")
        return [str(program), verb, "-c", str(inventory or self.inventory), *arguments]

    def addresses(self, count: int) -> str:
        return ",".join(place.address for place in self.places[:count])

    def names(self, count: int) -> str:
        return f"node[1-{count}]" if count > 1 else "node1"

    def end_background(self) -> int:
        """End the background processes of measured tools (keepers, control masters) here; return how many."""
        return _end_marked(str(self.folder), {place.pid for place in self.places})


@contextlib.contextmanager
def field(nodes: int) -> Iterator[Field]:
    """Start nodes, yield the field, and stop the nodes; in the block this thread is in the nodes' network."""
    missing = namespaces.why_not()
    if missing:
        raise SystemExit(f"nodes in namespaces are not possible here: {missing}")
    with sandbox("reach", nodes, mode="namespaces") as (made, folder), _network_of(made):
        site = Field(made, folder)
        try:
            yield site
        finally:
            site.end_background()


@contextlib.contextmanager
def _network_of(made: Sandbox) -> Iterator[None]:
    """Move this thread into the network of the nodes' switch while the block runs."""
    home_network = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        switch = json.loads(made.layout.record(namespaces.RELAY).read_text())["pid"]
        with open(f"/proc/{switch}/ns/net") as namespace:
            enter(namespace.fileno())
        yield
    finally:
        enter(home_network)
        os.close(home_network)


def enter(network: int) -> None:
    """Move this thread, and all that it starts later, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _end_marked(folder: str, spared: set[int]) -> int:
    """End the processes with the mark in their environment; return how many.

    Control masters overwrite their environment with a title, and are found by the socket's name in the title.
    """
    mark, socket = f"{MARK}={folder}".encode(), f"{folder}/cm-".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (
                mark in (entry / "environ").read_bytes().split(b"\0")
                or socket in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
    ended = [pid for pid in found if pid not in spared and pid != os.getpid()]
    for pid in ended:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    return len(ended)


class OneDefaultSshd:
    """A second sshd on a node, at many addresses, with OpenSSH's default limits on sessions and unfinished logins."""

    PORT = 2222

    def __init__(self, field: Field, place: Place, count: int) -> None:
        self.field = field
        self.place = place
        self.addresses = [f"10.78.0.{number + 1}" for number in range(count)]
        layout = field.made.layout
        # Use a folder that the node sees too.
        folder = layout.node(field.made.node(place.name))
        lines = (folder / "sshd_config").read_text().splitlines()
        settings = [
            line for line in lines if not line.startswith(("MaxStartups", "MaxSessions", "ListenAddress"))
        ]
        config = folder / "default_sshd"
        config.write_text("\n".join([f"ListenAddress 0.0.0.0:{self.PORT}", *settings]) + "\n")
        self.inside = ["nsenter", "-t", str(place.pid), "-m", "-u", "-i", "-n", "-p"]
        self.argv = [*self.inside, "/bin/sh", "-c", 'exec "$(command -v sshd)" -D -f "$0"', str(config)]

    def __enter__(self) -> list[str]:
        f = self.field
        # A whole subnet on lo is local to the node, like 127/8 on every machine.
        inside = [*self.inside, "ip", "address", "add", "10.78.0.254/24", "dev", "lo"]
        subprocess.run(inside, check=True, env=f.env)
        route = ["ip", "route", "add", "10.78.0.0/24", "via", self.place.address]
        subprocess.run(route, check=True, env=f.env)
        with f.known_hosts.open("a") as known:
            known.writelines(
                f"[{address}]:{self.PORT} {f.host_key(self.place)}\n" for address in self.addresses
            )
        self.process = subprocess.Popen(self.argv, env=f.env)
        scan = ["ssh-keyscan", "-T", "1", "-p", str(self.PORT), self.addresses[-1]]
        if not wait_for(lambda: subprocess.run(scan, capture_output=True, env=f.env).stdout, 10.0):
            raise SystemExit("a second sshd on a node did not come up")
        return self.addresses

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        subprocess.run(["ip", "route", "del", "10.78.0.0/24"], check=True, env=self.field.env)


def make_payload(folder: Path, megabytes: int) -> Path:
    """Create a folder with one file of random bytes, which cannot be compressed; return the folder."""
    folder.mkdir()
    with (folder / "data").open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1_000_000))
    return folder


def make_tree(folder: Path, files: int) -> Path:
    """Create twenty folders of small files, 200 bytes to 8 KB, the same every time; return the folder above them."""
    chance = random.Random(1)
    for index in range(20):
        below = folder / f"d{index:02}"
        below.mkdir(parents=True)
        for number in range(files // 20):
            (below / f"f{number:04}").write_bytes(chance.randbytes(chance.randint(200, 8000)))
    return folder


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
