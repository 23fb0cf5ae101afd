"""Measure the cost of an SSH login: `python -m bench.reach.login [LOGINS]`, on a sandbox node started for it.

It prints, for each key exchange as first choice, the median time from the TCP connection to the exit code, and the CPU
time of client and server; and how many MB/s one core of the client can send and receive.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

from bench.field import cpu_of, sandbox
from clusterctl.hostfile.detect import load
from clusterctl.inventory.cluster import Node
from clusterctl.ssh.transport import SshTransport
from clusterctl.transport.fanout import Stream

STREAM_MB = 200


def main(logins: int) -> None:
    with sandbox("login", 1) as (made, _):
        cluster = load(made.cluster_file, "cpu")
        known = Path(cluster.known_hosts) if cluster.known_hosts else None
        node = cluster.nodes[0]
        # One login before the measurement loads paramiko.
        drain(SshTransport(known_hosts=known, ssh_config="none").start(node, "true"))
        from clusterctl.ssh import session

        for kex in session.FAST_KEX:
            session.FAST_KEX = (kex,)
            logins_of(kex, SshTransport(known_hosts=known, ssh_config="none"), node, logins)
        streams(SshTransport(known_hosts=known, ssh_config="none"), node)


def logins_of(name: str, transport: SshTransport, node: Node, logins: int) -> None:
    server = listener(node)
    walls, before, servers = [], time.process_time(), cpu_of(server, children=True)
    for _ in range(logins):
        began = time.perf_counter()
        drain(transport.start(node, "hostname"))
        walls.append(time.perf_counter() - began)
    client = (time.process_time() - before) / logins * 1000
    # The server's processes end a little later than the client's connection.
    time.sleep(1.0)
    theirs = (cpu_of(server, children=True) - servers) / logins * 1000
    wall = statistics.median(walls) * 1000
    print(f"{name}: {wall:.1f} ms, client CPU {client:.2f} ms, server CPU {theirs:.1f} ms")


def streams(transport: SshTransport, node: Node) -> None:
    data = os.urandom(1 << 20)
    before = time.process_time()
    stream = transport.start(node, "cat > /dev/null")
    for _ in range(STREAM_MB):
        stream.send(data)
    stream.finish()
    drain(stream)
    print(f"sent: {STREAM_MB * 1.048576 / (time.process_time() - before):.0f} MB/s of a core")
    before = time.process_time()
    drain(transport.start(node, f"head -c {STREAM_MB << 20} /dev/zero"))
    print(f"received: {STREAM_MB * 1.048576 / (time.process_time() - before):.0f} MB/s of a core")


def drain(stream: Stream) -> None:
    while stream.read(1 << 18, 60.0)[0]:
        pass
    stream.close()


def listener(node: Node) -> int:
    """Return the pid of the node's sshd, which sums up the CPU time of all its sessions."""
    mark = f"{Path(node.workdir).parents[1]}/sshd_config"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command_line = (process / "cmdline").read_text()
        except OSError:
            continue
        if mark in command_line and "[listener]" in command_line:
            return int(process.name)
    raise SystemExit("the node's sshd was not found: this needs Linux and OpenSSH")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
