"""Send a push from node to node: decide which node serves which, and create the certificate for it."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.inventory.cluster import Node
from clusterctl.transport.link import PendingRequest

CHOICES = ("auto", "on", "plain", "off")
LEAST_NODES = 3
# The least bytes per node, and the bytes added per piece, for which relaying pays. Measured CPU time
# relative to a direct push: 0.93 for 4 MB to 12 nodes, 0.92 for 8 MB to 4 nodes, 1.25 for 8 MB in 2,000
# files to 8 nodes, because each file costs 25 us per hop. With a slow network here it pays earlier: the
# user chooses that with `--relay on`.
LEAST_BYTES, LEAST_PIECE = 4_000_000, 3_000
# Nodes per chain. Further nodes form a second chain, so that the last one does not wait for all others.
CHAIN = 64
CHOICE_OF_PARENTS = 3
# After this many nodes failed to reach another one, and none succeeded, the next nodes do not try.
HOPELESS = 3


class Relay:
    """The nodes of one transfer, in the order in which they started to listen."""

    def __init__(self, nodes: Sequence[Node], plain: bool = False, always: bool = False) -> None:
        self._addresses = {node.name: node.address for node in nodes}
        self._plain = plain
        self._always = always
        self._terms: dict[str, str] = {}
        self._members: list[tuple[str, int]] = []
        self._lingering: list[PendingRequest] = []
        self._failures = 0
        self._worked = False
        self._change = threading.Lock()

    def terms(self, node: str, wanted: int, pieces: int = 1) -> dict[str, str]:
        """Return how a node gets its missing bytes: it listens at an address, or the launcher sends them
        all."""
        if not self._always and wanted < LEAST_BYTES + LEAST_PIECE * pieces:
            return {"mode": "off"}
        with self._change:
            self._terms = self._terms or (_plain_terms() if self._plain else _tls_terms())
        return {**self._terms, "address": self._addresses[node]}

    def join(self, node: str, port: int) -> list[dict[str, str | int]]:
        """Add a node that listens (unless the port is 0); return nodes to request data from, best first."""
        with self._change:
            members = list(self._members)
            if port:
                self._members.append((node, port))
            if self._failures >= HOPELESS and not self._worked:
                return []
        index = len(members)
        first = index - 1 if index % CHAIN else max(index - CHAIN, 0)
        chosen = reversed(members[max(first - CHOICE_OF_PARENTS + 1, 0) : first + 1])
        return [{"node": name, "address": self._addresses[name], "port": port} for name, port in chosen]

    @property
    def members(self) -> list[tuple[str, int]]:
        """Return the nodes that listen, and their ports."""
        with self._change:
            return list(self._members)

    def leave(self, node: str) -> None:
        """Remove a node that failed, so that no other node is sent to it."""
        with self._change:
            self._members = [member for member in self._members if member[0] != node]

    def record(self, relayed: int, failed: int) -> None:
        """Record whether a node received data from other nodes, and whether it failed to reach any."""
        with self._change:
            self._worked = self._worked or relayed > 0
            self._failures += failed > 0 and not relayed

    def linger(self, request: PendingRequest) -> None:
        """Let a finished node serve the others until `release`."""
        with self._change:
            self._lingering.append(request)

    def release(self) -> None:
        """Let the nodes stop serving: all have their data, so a link that breaks now loses nothing."""
        for request in self._lingering:
            with contextlib.suppress(ClusterctlError):
                request.send(b"done\n")
        for request in self._lingering:
            with contextlib.suppress(ClusterctlError):
                request.end()


@contextmanager
def relay_for(choice: str, nodes: Sequence[Node]) -> Iterator[Relay | None]:
    """Yield the relay for a choice, or None.

    `off` never relays; `on` and `plain` do from 2 nodes on; `auto` only for enough nodes and bytes.
    """
    if choice not in CHOICES:
        raise UsageError(f"--relay {choice}: no such choice", ", ".join(CHOICES))
    if choice == "off" or len(nodes) < (LEAST_NODES if choice == "auto" else 2):
        yield None
        return
    relay = Relay(nodes, choice == "plain", always=choice != "auto")
    try:
        yield relay
    finally:
        relay.release()


def _plain_terms() -> dict[str, str]:
    return {"mode": "plain", "secret": secrets.token_hex(32)}


def _tls_terms() -> dict[str, str]:
    """Return a key and a certificate for this transfer alone; its nodes accept no other certificate.

    The nodes compare the certificate itself, so its name and dates do not matter: a node with a wrong clock
    can take part.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "clusterctl transfer")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(1990, 1, 1))
        .not_valid_after(datetime.datetime(2049, 1, 1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "mode": "tls",
        "certificate": made.public_bytes(serialization.Encoding.PEM).decode(),
        "key": private.decode(),
    }
