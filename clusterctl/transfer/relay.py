"""Push from node to node: which node serves which, and the certificate by which they know each other."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError, UsageError

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.link import PendingRequest

CHOICES = ("auto", "on", "plain", "off")
LEAST_NODES = 3
# Bytes a node, and on top of them for each piece: of CPU alone 4 MB cost 12 nodes 0.93 of what they cost from here,
# 8 MB cost 4 nodes 0.92, and 8 MB in 2,000 files cost 8 nodes 1.25, since each file costs each hop 25 us. A slow line
# from here makes it pay earlier: that is for the user to say (`--relay on`).
LEAST_BYTES, LEAST_PIECE = 4_000_000, 3_000
# Nodes in a row; beyond it a second row begins beside, so that the last one need not wait for all.
CHAIN = 64
CHOICE_OF_PARENTS = 3
# Nodes that reached none, while none reached one: the next ones need not try.
HOPELESS = 3


class Relay:
    """The nodes of one transfer in the order in which they began to listen."""

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
        """Return what a node that lacks some bytes has to do: listen, and where; or request all of them from the
        launcher."""
        if not self._always and wanted < LEAST_BYTES + LEAST_PIECE * pieces:
            return {"mode": "off"}
        with self._change:
            self._terms = self._terms or (_plain_terms() if self._plain else _tls_terms())
        return {**self._terms, "address": self._addresses[node]}

    def join(self, node: str, port: int) -> list[dict[str, Any]]:
        """Add a node that listens (at port 0 it does not); return the nodes that it may ask, the best one first."""
        with self._change:
            members = list(self._members)
            if port:
                self._members.append((node, port))
            if self._failures >= HOPELESS and not self._worked:
                return []
        place = len(members)
        first = place - 1 if place % CHAIN else max(place - CHAIN, 0)
        chosen = reversed(members[max(first - CHOICE_OF_PARENTS + 1, 0) : first + 1])
        return [{"node": name, "address": self._addresses[name], "port": port} for name, port in chosen]

    @property
    def members(self) -> list[tuple[str, int]]:
        """Return the nodes that listen, and their ports."""
        with self._change:
            return list(self._members)

    def leave(self, node: str) -> None:
        """Take out a node that failed: no new node is sent to it."""
        with self._change:
            self._members = [member for member in self._members if member[0] != node]

    def tell(self, relayed: int, failed: int) -> None:
        """Record how a transfer between a node and the others went."""
        with self._change:
            self._worked = self._worked or relayed > 0
            self._failures += failed > 0 and not relayed

    def linger(self, request: PendingRequest) -> None:
        """Keep a node that has everything serving the others until `release`."""
        with self._change:
            self._lingering.append(request)

    def release(self) -> None:
        """Let the nodes stop serving: all have what they need, and a link that breaks now loses nothing."""
        for request in self._lingering:
            with contextlib.suppress(ClusterctlError):
                request.send(b"done\n")
        for request in self._lingering:
            with contextlib.suppress(ClusterctlError):
                request.end()


@contextmanager
def relay_for(choice: str, nodes: Sequence[Node]) -> Iterator[Relay | None]:
    """Return the relay for a choice: `on` and `plain` always, `auto` where it helps, `off` never."""
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
    """A key and its certificate for this transfer alone; every node of it has both, and takes no other.

    The nodes compare the certificate itself, so neither its name nor its dates mean anything: a node whose
    clock is wrong takes part all the same.
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
