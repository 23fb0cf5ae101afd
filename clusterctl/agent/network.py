"""Report a node's addresses and ports: where an address is, which process uses a port, whether another node reaches
it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from typing import Any, Dict, Iterable, List, Optional, Tuple

from clusterctl.agent.processes import all_pids, text_of
from clusterctl.agent.request import Refused, Request

# Linux's numbers of the ioctls.
GET_ADDRESS, GET_NETMASK, GET_FLAGS = 0x8915, 0x891B, 0x8913
UP, RUNNING = 0x1, 0x40
# The state of an ended connection: a program that sets SO_REUSEADDR, as torch does, can have its port.
TIME_WAIT = "06"
GREETING = b"clusterctl "


def rdma_ports(folder: str = "/sys/class/infiniband") -> List[Dict[str, str]]:
    """Return the ports of the node's RDMA adapters: state (ACTIVE), rate (100 Gb/sec) and kind of link.

    The ports of NPUs are not among them: only hccn_tool shows those.
    """
    result = []
    for device in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        ports = os.path.join(folder, device, "ports")
        for port in sorted(os.listdir(ports)) if os.path.isdir(ports) else ():
            read = {
                name: text_of(os.path.join(ports, port, name)).strip()
                for name in ("state", "rate", "link_layer")
            }
            # `4: ACTIVE`, `100 Gb/sec (4X EDR)`.
            state, rate = read["state"].partition(":")[2].strip(), read["rate"].partition(" (")[0]
            result.append(
                {"name": f"{device}:{port}", "state": state, "rate": rate, "link": read["link_layer"]}
            )
    return result


def interfaces() -> Dict[str, Dict[str, Any]]:
    """Return by name whether an interface is up, and its addresses."""
    result: Dict[str, Dict[str, Any]] = {}
    door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        for _, name in socket.if_nameindex():
            flags = _ask(door, name, GET_FLAGS)
            up = flags is not None and struct.unpack("=H", flags[16:18])[0] & (UP | RUNNING) == UP | RUNNING
            result[name] = {"up": up, "addresses": []}
            address, mask = _ask(door, name, GET_ADDRESS), _ask(door, name, GET_NETMASK)
            if address and mask:
                bits = bin(struct.unpack(">I", mask[20:24])[0]).count("1")
                result[name]["addresses"].append(f"{socket.inet_ntoa(address[20:24])}/{bits}")
    finally:
        door.close()
    for line in text_of("/proc/net/if_inet6").splitlines():
        fields = line.split()
        if len(fields) == 6 and fields[5] in result:
            text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
            result[fields[5]]["addresses"].append(f"{text}/{int(fields[2], 16)}")
    return result


def _ask(door: socket.socket, name: str, question: int) -> Optional[bytes]:
    import fcntl

    try:
        return fcntl.ioctl(door.fileno(), question, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None


def place_of(address: str, present: Optional[Dict[str, Dict[str, Any]]] = None) -> Dict[str, Any]:
    """Return where an address is: its number, whether it is this node's own, and on which interface.

    `present` is the answer of `interfaces`, if the caller has it.
    """
    try:
        ip = str(places_of(address, 0, socket.SOCK_DGRAM)[0][2][0]) if address else ""
    except OSError as problem:
        return {"ip": None, "own": False, "interface": None, "reason": str(problem)}
    own = bool(ip) and _is_own(ip)
    interface = _interface_of(ip, interfaces() if present is None else present) if own else None
    return {"ip": ip, "own": own, "interface": interface, "reason": ""}


def _is_own(ip: str) -> bool:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    door = socket.socket(family, socket.SOCK_DGRAM)
    try:
        door.bind((ip.partition("%")[0], 0))
    except OSError:
        return False
    finally:
        door.close()
    return True


def _interface_of(ip: str, present: Dict[str, Dict[str, Any]]) -> Optional[str]:
    """Return the interface with this address, or else the one whose network contains it."""
    wanted, near = _packed(ip.partition("%")[0]), None
    for name, about in present.items():
        for text in about["addresses"]:
            own, _, bits = text.partition("/")
            if _packed(own) == wanted:
                return name
            if _network(_packed(own), int(bits)) == _network(wanted, int(bits)):
                near = near or name
    return near


def _packed(ip: str) -> bytes:
    """Return an address as bytes, 4 or 16."""
    return socket.inet_pton(socket.AF_INET6 if ":" in ip else socket.AF_INET, ip)


def _network(address: bytes, bits: int) -> "Tuple[int, int]":
    """Return what the addresses of one network share: their length, and their first bits."""
    return len(address), int.from_bytes(address, "big") >> max(len(address) * 8 - bits, 0)


# ---- who holds a port


def holders(ports: Iterable[int], address: str = "") -> List[Dict[str, Any]]:
    """Return which TCP ports are in use at an address of this node, and the process if this user may see it."""
    wanted = {int(entry) for entry in ports}
    if not wanted:
        return []
    ours = {"0.0.0.0", "::", str(place_of(address)["ip"] or address)}
    result: Dict[Tuple[int, str], Dict[str, Any]] = {}
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in text_of(path).splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] == TIME_WAIT:
                continue
            host, port = fields[1].split(":")
            if int(port, 16) in wanted and _address(host) in ours:
                result[int(port, 16), fields[9]] = {"port": int(port, 16), "user": int(fields[7])}
    owners = _owners({inode for _, inode in result}) if result else {}
    return [{**entry, **owners.get(inode, {})} for (_, inode), entry in sorted(result.items())]


def _address(text: str) -> str:
    """Return an address as text from the form of /proc/net/tcp: words of 32 bits in the machine's byte order."""
    raw = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    if len(raw) == 16 and raw[:12] == b"\0" * 10 + b"\xff\xff":
        raw = raw[12:]
    return socket.inet_ntop(socket.AF_INET6 if len(raw) == 16 else socket.AF_INET, raw)


def _owners(inodes: Iterable[str]) -> Dict[str, Dict[str, Any]]:
    """Return the process that owns each socket; other users' processes are visible only to root."""
    wanted = {f"socket:[{item}]": item for item in inodes}
    result: Dict[str, Dict[str, Any]] = {}
    for pid in all_pids():
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if target in wanted:
                result[wanted[target]] = {"pid": pid, "name": text_of(f"/proc/{pid}/comm").strip()}
    return result


# ---- one node opens a port, the others connect to it


def listen(request: Request) -> Dict[str, Any]:
    """Listen on a port until the launcher cancels, and greet every client; port 0 means any free port.

    The first piece of the answer names the port. A port that is not free is an answer too, not an error.
    """
    port = int(request.params.get("port") or 0)
    token = request.need("token", str)
    try:
        door = _door(port)
    except (OSError, OverflowError) as problem:
        problem_text = getattr(problem, "strerror", None) or str(problem)
        return {"port": None, "reason": problem_text, "holders": holders([port])}
    try:
        request.send(b"", port=door.getsockname()[1])
        came = 0
        while not request.cancelled.is_set():
            if select.select([door], [], [], 0.1)[0]:
                with door.accept()[0] as caller:
                    caller.settimeout(1.0)
                    came += _greet(caller, token)
    finally:
        door.close()
    return {"port": None, "came": came}


def _greet(caller: socket.socket, token: str) -> int:
    try:
        caller.sendall(GREETING + token.encode() + b"\n")
    except OSError:
        return 0
    return 1


def _door(port: int) -> socket.socket:
    """Return a socket that listens at every address, as a run's master does."""
    try:
        return _listening(socket.AF_INET6, port)
    except OSError as problem:
        # Without IPv6: no such family, no address of it, no such option.
        if problem.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENOPROTOOPT):
            raise
    return _listening(socket.AF_INET, port)


def _listening(family: int, port: int) -> socket.socket:
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # IPv4 too.
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        door.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        door.listen(1024)
    except BaseException:
        door.close()
        raise
    return door


def knock(request: Request) -> Dict[str, Any]:
    """Return whether this node reaches another's port, and whether the expected program answers there."""
    address, port = request.need("address", str), request.need("port", int)
    token, limit = request.need("token", str), float(request.params.get("timeout", 3.0))
    if not 0 < port < 65536:
        raise Refused("usage", f"knock: no such port: {port}")
    began = time.monotonic()
    try:
        line = connected(address, port, limit)
        try:
            output = b""
            while not output.endswith(b"\n") and len(output) < 200:
                piece = line.recv(200)
                if not piece:
                    break
                output += piece
            mine = str(line.getsockname()[0])
        finally:
            line.close()
    except OSError as problem:
        timed_out = isinstance(problem, socket.timeout)
        problem_text = f"no answer within {limit:.0f} s" if timed_out else problem.strerror or str(problem)
        return {"reached": False, "reason": problem_text, "seconds": time.monotonic() - began}
    same = output == GREETING + token.encode() + b"\n"
    reason = "" if same else "another program uses this port"
    return {"reached": same, "reason": reason, "seconds": time.monotonic() - began, "by": mine}


def places_of(
    host: str, port: int, kind: int = socket.SOCK_STREAM
) -> "List[Tuple[int, int, Tuple[Any, ...]]]":
    """Return family, protocol and socket address of each number of a host; raise OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=kind)
    return [(family, protocol, place) for family, _, protocol, _, place in found]


def connected(host: str, port: int, limit: float) -> socket.socket:
    """Return a connection to the first of a host's addresses that answers; raise the last error if none does."""
    problem = OSError(f"{host} has no address")
    for family, protocol, place in places_of(host, port):
        line = socket.socket(family, socket.SOCK_STREAM, protocol)
        line.settimeout(limit)
        try:
            line.connect(place)
            return line
        except OSError as found:
            line.close()
            problem = found
    raise problem
