"""The network switch of a sandbox in mode namespaces, and the relay to it: `python -I -S switch.py CONFIG`.

The nodes have a network of their own. This process first listens on loopback in the network of the machine, then moves
into a new network, which becomes the switch: a listening socket stays in the network where it was opened, but new
connections are made in the current one. The network of the machine is not changed, and the switch ends with this
process. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

# Linux/sched.h; os.unshare came with Python 3.12.
CLONE_NEWNET = 0x40000000
CHUNK = 256 << 10
# Seconds that a connection waits for a node that does not answer, like one to an unreachable machine.
PATIENCE = 60.0
AGAIN = 0.2


def main(path: str) -> int:
    """Listen, move into the new network, make the bridge, write the ports, and relay until killed."""
    config: dict[str, Any] = json.loads(Path(path).read_text())
    listeners = {name: socket.create_server(("127.0.0.1", 0), backlog=128) for name in config["nodes"]}
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        sys.stderr.write(f"a new network was refused: {os.strerror(ctypes.get_errno())}\n")
        return 1
    _make_bridge(config["ip"], config["bridge_address"])
    ports = {name: listener.getsockname()[1] for name, listener in listeners.items()}
    aside = Path(config["ports"] + ".new")
    aside.write_text(json.dumps(ports))
    aside.replace(config["ports"])
    asyncio.run(_serve({name: (listeners[name], address) for name, address in config["nodes"].items()}))
    return 0


def _make_bridge(ip: str, address: str) -> None:
    commands = [
        "link set lo up",
        # A fixed address: otherwise it takes that of a node, and connections stall when that node ends.
        "link add br0 address 02:00:0a:4d:00:fe type bridge",
        f"address add {address} dev br0",
        "link set br0 up",
    ]
    subprocess.run([ip, "-batch", "-"], input="\n".join(commands), text=True, check=True, timeout=60)


async def _serve(nodes: dict[str, tuple[socket.socket, str]]) -> None:
    async def one(listener: socket.socket, address: str) -> None:
        server = await asyncio.start_server(
            lambda reader, writer: _relay(reader, writer, address), sock=listener, limit=CHUNK
        )
        await server.serve_forever()

    await asyncio.gather(*(one(*node) for node in nodes.values()))


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
    try:
        ends = await _connect(writer, address)
        if ends is None:
            _reset(writer)
            return
        there_reader, there_writer = ends
        _no_delay(writer)
        _no_delay(there_writer)
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
        there_writer.close()
        writer.close()
    except (ConnectionError, OSError):
        _reset(writer)


async def _connect(
    writer: asyncio.StreamWriter, address: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """Connect to the node; retry until it answers or PATIENCE is over, then return None."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while asyncio.get_running_loop().time() < deadline and not writer.is_closing():
        try:
            return await asyncio.wait_for(asyncio.open_connection(address, 22, limit=CHUNK), 5.0)
        except ConnectionRefusedError:
            return None
        except (OSError, asyncio.TimeoutError):
            await asyncio.sleep(AGAIN)
    return None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction including its end; pass a reset on to the other side."""
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except (ConnectionError, OSError):
        _reset(writer)


def _no_delay(writer: asyncio.StreamWriter) -> None:
    _socket(writer).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        _socket(writer).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _socket(writer: asyncio.StreamWriter) -> socket.socket:
    found: socket.socket = writer.get_extra_info("socket")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
