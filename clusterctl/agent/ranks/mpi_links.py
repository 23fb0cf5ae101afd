"""Let mpirun on the first node of a run start its daemons on the others, without SSH between the nodes.

    python mpi_links.py first COMMAND...   on the first node: waits for the others, then runs the command
    python mpi_links.py wait               on the others: runs what the first node's mpirun sends
    AGENT [OPTIONS] NODE COMMAND...        started by mpirun in place of ssh

mpirun takes the program in place of ssh, and a hostfile, from its environment: Open MPI 4 and 5, MPICH and Intel MPI.
Both ends prove that they have the run's key before anything is sent, and each message carries a code made with it.

This file is copied to the nodes and runs on its own: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

KEY = "CLUSTERCTL_MPI_KEY"
NODES = "CLUSTERCTL_MPI_NODES"
# Seconds within which the other nodes come, and between two tries to reach the first one.
PATIENCE, RETRY = 300.0, 0.2
# Seconds that the daemons have to end after mpirun.
LEAVING = 2.0
# Bytes of the longest command of a daemon.
LONGEST = 1 << 20
# Variables of the run that mean something else for the ranks that MPI starts.
MISLEADING = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)


class Line:
    """A connection between two nodes: lines of JSON, each with its code."""

    def __init__(self, sock: socket.socket, key: str, accepts: bool) -> None:
        self.sock, self.file, self.key = sock, sock.makefile("rb"), key
        self.lock = threading.Lock()
        self.sent = self.received = 0
        mine = secrets.token_hex(16)
        sock.sendall(mine.encode() + b"\n")
        theirs = self.file.readline(100).decode().strip()
        # Each direction has a key of its own, so that no message can be sent back.
        both = mine + theirs if accepts else theirs + mine
        self.out, self.into = (self._code(both + side) for side in ("ab" if accepts else "ba"))

    def _code(self, text: str) -> str:
        return hmac.new(self.key.encode(), text.encode(), "sha256").hexdigest()

    def send(self, **message: object) -> None:
        """Send a message."""
        with self.lock:
            text = json.dumps(message)
            code = hmac.new(self.out.encode(), f"{self.sent} {text}".encode(), "sha256").hexdigest()
            self.sent += 1
            self.sock.sendall(f"{code} {text}\n".encode())

    def receive(self) -> "dict[str, object]":
        """Return the next message; an empty one if the other end is gone or does not have the key."""
        try:
            code, _, text = self.file.readline(LONGEST).decode().rstrip("\n").partition(" ")
        except (OSError, ValueError):
            return {}
        right = hmac.new(self.into.encode(), f"{self.received} {text}".encode(), "sha256").hexdigest()
        self.received += 1
        return dict(json.loads(text)) if hmac.compare_digest(code, right) else {}


def first(command: "list[str]") -> int:
    """Run a command with mpirun's way to the other nodes; return its exit code."""
    names = json.loads(os.environ[NODES])
    lines = _gather(names[1:])
    folder = _folder()
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(folder, "socket"))
        listener.listen(256)
        calls = Calls(lines)
        threading.Thread(target=_serve, args=(listener, calls), daemon=True).start()
        child = subprocess.Popen(command, env={**_plain(), **_of_mpi(folder, names)})
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _: child.send_signal(got))
        code = child.wait()
        deadline = time.monotonic() + LEAVING
        while calls.agents and time.monotonic() < deadline:
            time.sleep(0.01)
        for line in lines.values():
            with contextlib.suppress(OSError):
                line.send(end=code)
        return code if code >= 0 else 128 - code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _folder() -> str:
    """Make the folder of the agent, and return its path: the same on each node, and known only to those with the key.

    The daemons look for the agent too, though they do not use it.
    """
    name = hmac.new(os.environ[KEY].encode(), b"folder", "sha256").hexdigest()[:20]
    folder = os.path.join("/tmp", f"clusterctl-mpi-{name}")
    # Two nodes of a sandbox are one machine.
    os.makedirs(folder, mode=0o700, exist_ok=True)
    agent = os.path.join(folder, "agent")
    words = " ".join(map(shlex.quote, (sys.executable, "-S", os.path.abspath(__file__), "agent", folder)))
    with open(os.open(agent, os.O_WRONLY | os.O_CREAT, 0o700), "w") as file:
        file.write(f'#!/bin/sh\nexec {words} "$@"\n')
    return folder


def _gather(names: "list[str]") -> "dict[str, Line]":
    """Return a connection to each of these nodes; they come to this one."""
    lines: "dict[str, Line]" = {}
    any_address = socket.getaddrinfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))[0]
    with socket.socket(any_address[0]) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(any_address[4])
        server.listen(256)
        deadline = time.monotonic() + PATIENCE
        while len(lines) < len(names):
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                sock, _ = server.accept()
            except OSError:
                missing = ", ".join(name for name in names if name not in lines)
                raise SystemExit(f"clusterctl: {missing} did not come within {PATIENCE:g} s") from None
            sock.settimeout(10)
            try:
                line = Line(sock, os.environ[KEY], accepts=True)
            except OSError:
                continue
            name = str(line.receive().get("node"))
            if name in names:
                sock.settimeout(None)
                lines[name] = line
    return lines


class Calls:
    """The commands that run on other nodes for mpirun."""

    def __init__(self, lines: "dict[str, Line]") -> None:
        self.lines = lines
        self.running: "dict[str, socket.socket]" = {}
        # How many agents have not ended.
        self.agents = 0
        for line in lines.values():
            threading.Thread(target=self._answers, args=(line,), daemon=True).start()

    def start(self, sock: socket.socket) -> None:
        """Run the command that an agent has sent; the agent gets its exit code."""
        self.agents += 1
        with sock.makefile("rb") as file:
            node, command = json.loads(file.readline(LONGEST))
            call = secrets.token_hex(8)
            if node not in self.lines:
                print(f"clusterctl: mpirun names {node}, which is no node of this run", file=sys.stderr)
                sock.sendall(b"255\n")
            else:
                self.running[call] = sock
                self.lines[node].send(call=call, run=command)
            # An agent that is killed ends what it started.
            file.read()
            if self.running.pop(call, None):
                self.lines[node].send(call=call, kill=True)
        self.agents -= 1

    def _answers(self, line: Line) -> None:
        while message := line.receive():
            agent = self.running.pop(str(message.get("call")), None)
            if agent is not None:
                with contextlib.suppress(OSError):
                    agent.sendall(f"{message.get('code')}\n".encode())


def _serve(listener: socket.socket, calls: Calls) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=calls.start, args=(sock,), daemon=True).start()


def _plain() -> "dict[str, str]":
    """Return the environment without the key, and without what a rank of MPI would misread."""
    return {name: value for name, value in os.environ.items() if name not in (*MISLEADING, KEY, NODES)}


def _of_mpi(folder: str, names: "list[str]") -> "dict[str, str]":
    """Return the variables by which each MPI finds its agent and its hostfile; write the latter into the folder."""
    slots = json.loads(os.environ["CLUSTERCTL_MPI_SLOTS"])
    agent = os.path.join(folder, "agent")
    # mpirun knows its own node by these names, wherever those of the inventory lead; MPICH's daemons connect to it.
    files = {"open": ("localhost", "{} slots={}\n"), "hydra": (os.environ["MASTER_ADDR"], "{}:{}\n")}
    for name, (here, form) in files.items():
        with open(os.path.join(folder, name), "w") as file:
            file.writelines(form.format(host, slots[index]) for index, host in enumerate([here, *names[1:]]))
    open_hosts, hydra_hosts = (os.path.join(folder, name) for name in files)
    root = os.geteuid() == 0
    return {
        "OMPI_MCA_plm_rsh_agent": agent,
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        # A daemon that fails is then reported, and its messages are shown.
        "OMPI_MCA_orte_leave_session_attached": "1",
        "PRTE_MCA_prte_leave_session_attached": "1",
        "OMPI_MCA_orte_default_hostfile": open_hosts,
        "PRTE_MCA_plm_ssh_agent": agent,
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "PRTE_MCA_prte_default_hostfile": open_hosts,
        # Each rank gets the environment of its node; without this, MPICH sends that of the first one.
        "HYDRA_ENV": os.environ.get("HYDRA_ENV", "none"),
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": agent,
        "HYDRA_HOST_FILE": hydra_hosts,
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": agent,
        "I_MPI_HYDRA_HOST_FILE": hydra_hosts,
        **({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if root else {}),
        **({"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if root else {}),
    }


def agent(folder: str, words: "list[str]") -> int:
    """Run a command on another node, as ssh does for mpirun; return its exit code."""
    while words and words[0].startswith("-"):
        words = words[1:]
    with socket.socket(socket.AF_UNIX) as sock, sock.makefile("rb") as answers:
        sock.connect(os.path.join(folder, "socket"))
        sock.sendall(json.dumps([words[0], " ".join(words[1:])]).encode() + b"\n")
        line = answers.readline(20).strip()
        return int(line) if line else 255


def wait() -> int:
    """Run the commands that the first node sends, until it has ended; return the exit code of its command."""
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            line = Line(socket.create_connection(where, timeout=10), os.environ[KEY], accepts=False)
            break
        except OSError as problem:
            if time.monotonic() > deadline:
                raise SystemExit(f"clusterctl: {where[0]}:{where[1]} does not answer: {problem}") from None
            time.sleep(RETRY)
    line.sock.settimeout(None)
    folder = _folder()
    line.send(node=os.environ["CLUSTERCTL_NODE"])
    try:
        return _obey(line)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _obey(line: Line) -> int:
    """Run the commands that come on a connection, until the end is announced."""
    started: "dict[str, subprocess.Popen[bytes]]" = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while message := line.receive():
        call = str(message.get("call"))
        if "end" in message:
            # mpirun's own exit code says how the run ended.
            return 0
        if message.get("kill") and call in started:
            started[call].terminate()
        elif "run" in message:
            # As ssh does: the command is written for a shell.
            command = ["/bin/sh", "-c", str(message["run"])]
            started[call] = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=_plain())
            threading.Thread(target=_report, args=(line, call, started[call]), daemon=True).start()
    print("clusterctl: the connection to the first node is gone", file=sys.stderr)
    return 1


def _report(line: Line, call: str, child: "subprocess.Popen[bytes]") -> None:
    code = child.wait()
    with contextlib.suppress(OSError):
        line.send(call=call, code=code if code >= 0 else 128 - code)


def main(words: "list[str]") -> int:
    """Run one of the three parts, and return its exit code."""
    if words[:1] == ["agent"]:
        return agent(words[1], words[2:])
    return first(words[1:]) if words[:1] == ["first"] else wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
