"""Somebody in between, who answers with a key of his own and would let anybody in."""

from __future__ import annotations

import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.errors import HostKeyChanged, HostKeyUnknown
from clusterctl.inventory.cluster import Node
from clusterctl.ssh.openssh import OpenSshTransport
from clusterctl.ssh.transport import SshTransport
from clusterctl.transport.fanout import on_each
from tests.clusterctl.ssh.test_ssh import Server, keygen_fingerprint, pump, record, start

pytestmark = pytest.mark.skipif(not shutil.which("ssh") or not shutil.which("sshd", path="/usr/sbin:/usr/bin"),
                                reason="no sshd or no ssh here")  # fmt: skip
TIMES = 20
# From here on a side speaks in secret: logins, and all that is a user's.
NEW_KEYS = 21
# Key exchange, its first word, a good-bye.
USUAL = {20, 30, 1, NEW_KEYS}


class Between:
    """Forward bytes to a server and record what clients sent, during their key exchange and after it."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._gate = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._gate.getsockname()[1]
        self.heard: list[bytearray] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._gate.accept()
            except OSError:
                return
            onward = socket.create_connection(("127.0.0.1", self._to))
            kept = bytearray()
            self.heard.append(kept)
            threading.Thread(target=self._listen, args=(client, onward, kept), daemon=True).start()
            threading.Thread(target=pump, args=(onward, client), daemon=True).start()

    def _listen(self, client: socket.socket, onward: socket.socket, kept: bytearray) -> None:
        try:
            while data := client.recv(65536):
                kept += data
                onward.sendall(data)
            onward.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        # Wakes who waits at it, who would else serve the next one's clients.
        self._gate.shutdown(socket.SHUT_RDWR)
        self._gate.close()


def said(kept: bytearray) -> tuple[list[int], int]:
    """The kinds of a client's open messages, and how many bytes came after its key exchange."""
    _, _, rest = bytes(kept).partition(b"\n")
    kinds: list[int] = []
    while len(rest) >= 6 and NEW_KEYS not in kinds:
        (length,) = struct.unpack(">I", rest[:4])
        kinds.append(rest[5])
        rest = rest[4 + length :]
    return kinds, len(rest)


@pytest.fixture(scope="module")
def true(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = start(tmp_path_factory.mktemp("true") / "sshd")
    yield found
    found.process.terminate()
    found.process.wait()


@pytest.fixture(scope="module")
def impostor(true: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """He takes the very key that the client has."""
    found = start(tmp_path_factory.mktemp("impostor") / "sshd", "MaxStartups 200")
    shutil.copy(true.folder / "id.pub", found.folder / "authorized")
    yield found
    found.process.terminate()
    found.process.wait()


@pytest.fixture
def between(impostor: Server) -> Iterator[Between]:
    found = Between(impostor.port)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("gateway", "accept_new"), [(False, True), (True, False)], ids=["direct", "behind-a-gateway"]
)
@pytest.mark.parametrize("kind", [SshTransport, OpenSshTransport], ids=["paramiko", "openssh"])
def test_a_changed_key_is_refused_every_time_and_nothing_of_ours_is_sent(
    true: Server,
    impostor: Server,
    between: Between,
    tmp_path: Path,
    kind: type[SshTransport] | type[OpenSshTransport],
    gateway: bool,
    accept_new: bool,
) -> None:
    known = tmp_path / "known"
    record(true, known)
    true_key = known.read_text().split(" ", 1)[1]
    known.write_text(known.read_text() + f"[127.0.0.1]:{between.port} {true_key}")
    before = known.read_text()
    transport = kind(known_hosts=known, ssh_config="none", accept_new=accept_new)
    change = {"port": between.port, "gateway": f"127.0.0.1:{true.port}" if gateway else None}
    nodes = [true.node(f"node{number}", **change) for number in range(TIMES)]
    logins = impostor.logins()

    outcomes = on_each(nodes, lambda node: transport.start(node, "id"), fanout=8)

    assert [type(one.error) for one in outcomes] == [HostKeyChanged] * TIMES
    for one in outcomes:
        assert one.error and keygen_fingerprint(true) in one.error.message
        assert keygen_fingerprint(impostor) in one.error.message
    # A refusal is not tried again.
    assert len(between.heard) == TIMES
    for kept in between.heard:
        kinds, secret = said(kept)
        assert set(kinds) <= USUAL and secret == 0, (kinds, secret)
    assert impostor.logins() == logins and known.read_text() == before


@pytest.mark.parametrize("kind", [SshTransport, OpenSshTransport], ids=["paramiko", "openssh"])
def test_the_counter_sees_a_login_where_there_is_one(
    true: Server, impostor: Server, between: Between, tmp_path: Path,
    kind: type[SshTransport] | type[OpenSshTransport],
) -> None:  # fmt: skip
    transport = kind(known_hosts=tmp_path / "known", ssh_config="none", accept_new=True)
    stream = transport.start(true.node(port=between.port), "true")
    stream.close()
    assert max(said(kept)[1] for kept in between.heard) > 100


@pytest.mark.parametrize("kind", [SshTransport, OpenSshTransport], ids=["paramiko", "openssh"])
def test_an_impostor_in_the_gateways_place_learns_nothing_of_the_node_behind(
    true: Server, impostor: Server, between: Between, tmp_path: Path,
    kind: type[SshTransport] | type[OpenSshTransport],
) -> None:  # fmt: skip
    known = tmp_path / "known"
    record(true, known)
    node: Node = true.node(gateway=f"127.0.0.1:{between.port}")
    with pytest.raises(HostKeyUnknown, match="gateway"):
        kind(known_hosts=known, ssh_config="none").connect(node)
    true_key = known.read_text().split(" ", 1)[1]
    known.write_text(known.read_text() + f"[127.0.0.1]:{between.port} {true_key}")
    with pytest.raises(HostKeyChanged, match="gateway"):
        kind(known_hosts=known, ssh_config="none", accept_new=True).connect(node)
    assert all(said(kept)[1] == 0 for kept in between.heard) and str(true.port).encode() not in b"".join(
        bytes(kept) for kept in between.heard
    )


def test_a_revoked_key_is_refused_by_the_way_that_knows_of_it(true: Server, tmp_path: Path) -> None:
    known = tmp_path / "known"
    record(true, known)
    known.write_text(known.read_text() + "@revoked * " + known.read_text().split(" ", 1)[1])
    with pytest.raises(HostKeyChanged, match="marked as revoked"):
        OpenSshTransport(known_hosts=known, ssh_config="none").connect(true.node())
