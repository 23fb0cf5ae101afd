"""The first lines of a task that a batch system starts on a node: connect back to the launcher, and become the agent.

Its text arrives on the standard input of every task of a step. The launcher and the task prove to each other that they
know the step's secret, which never travels over the connection. Standard library only.
"""

import hashlib
import hmac
import io
import os
import socket
import sys

# Seconds for one of the launcher's addresses to answer: a second SYN is sent after one second.
PATIENCE = 2.5
# The ports on which HCCL listens on each node. The kernel may give them to outgoing connections; a connection that
# lasts as long as a run would take a port that its ranks need.
HCCL = range(60000, 60016)
# Bytes of a nonce and of a proof.
NONCE, PROOF = 16, 32
# Printed on standard error by a task that cannot reach the launcher.
NO_WAY = "no connection back to the launcher"


def proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    """Return the proof that one side knows the secret."""
    return hmac.new(secret, side + nonce, hashlib.sha256).digest()


def exactly(connection: "socket.socket", count: int) -> bytes:
    """Return exactly `count` bytes; raise OSError if the other side closes before."""
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise OSError("the other side closed the connection")
        data += piece
    return data


def introduce(connection: "socket.socket", secret: bytes, name: bytes) -> None:
    """Send the name of this node and exchange proofs of the secret; raise OSError if the launcher's proof is wrong."""
    mine = os.urandom(NONCE)
    connection.sendall(bytes([len(name)]) + name + mine)
    theirs = exactly(connection, NONCE)
    if not hmac.compare_digest(exactly(connection, PROOF), proof(secret, b"launcher", mine)):
        raise OSError("it is another program")
    connection.sendall(proof(secret, b"node" + name, theirs))


def welcome(connection: "socket.socket", secret: bytes) -> str:
    """Return the name of the node that has connected, once it has proved itself; the launcher's side."""
    name = exactly(connection, exactly(connection, 1)[0])
    theirs = exactly(connection, NONCE)
    mine = os.urandom(NONCE)
    connection.sendall(mine + proof(secret, b"launcher", theirs))
    if not hmac.compare_digest(exactly(connection, PROOF), proof(secret, b"node" + name, mine)):
        raise OSError("it does not know the secret of the step")
    return name.decode("ascii", "replace")


def bound(family: int, host: str = "") -> "socket.socket":
    """Return a TCP socket at a port of this machine that HCCL does not need."""
    passed: list[socket.socket] = []
    try:
        while True:
            made = socket.socket(family, socket.SOCK_STREAM)
            try:
                made.bind((host, 0))
            except OSError:
                made.close()
                raise
            if made.getsockname()[1] not in HCCL or len(passed) > len(HCCL):
                return made
            # Keep it open until another port is found, or the kernel may choose it again.
            passed.append(made)
    finally:
        for made in passed:
            made.close()


def connected(place: str, port: int) -> "socket.socket":
    """Return a connection to the first of a host's addresses that answers; raise the last error if none does."""
    problem = OSError("it has no address")
    for family, _, _, _, address in socket.getaddrinfo(place, port, type=socket.SOCK_STREAM):
        connection = bound(family)
        try:
            connection.settimeout(PATIENCE)
            connection.connect(address)
            return connection
        except OSError as found:
            connection.close()
            problem = found
    raise problem


def reach(secret: bytes, hosts: "list[str]", port: int, name: str) -> "socket.socket":
    """Return a connection to the launcher at the first address that works; `name` is that of this node."""
    problems = []
    for place in dict.fromkeys(hosts):
        try:
            connection = connected(place, port)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            introduce(connection, secret, name.encode())
            connection.settimeout(None)
            return connection
        except OSError as problem:
            problems.append(f"{place}: {problem}")
    sys.exit(f"{NO_WAY} from {name}: {'; '.join(problems)}")


def dial(
    secret: str,
    hosts: "list[str]",
    port: int,
    count: int,
    node: str,
    launcher: "list[str]",
    job: "tuple[str, ...]",
    task: "tuple[str, ...]",
) -> None:
    """Connect to the launcher, and run the `count` bytes of a program that it sends as this process.

    The rest are variables of the batch system: `node` has the name of this node, those of `launcher` addresses of the
    launcher. Those that begin as in `task` describe this task, not a rank, except those that begin as in `job`.
    """
    known = [os.environ[name] for name in launcher if os.environ.get(name)]
    connection = reach(bytes.fromhex(secret), [*known, *hosts], port, os.environ.get(node, ""))
    for number in (0, 1):
        os.dup2(connection.fileno(), number)
    connection.close()
    for name in list(os.environ):
        if name.startswith(task) and not name.startswith(job):
            del os.environ[name]
    # A signal to the whole job also reaches the agent, which the launcher still needs in order to stop the ranks.
    os.environ["CLUSTERCTL_OUTLIVE_SIGNALS"] = "1"
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), "utf-8", "surrogateescape")
    exec(sys.stdin.buffer.read(count), {"__name__": "agent"})
