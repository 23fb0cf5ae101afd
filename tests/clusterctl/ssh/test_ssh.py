from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from clusterctl.agent.processes import marked
from clusterctl.errors import (
    ClusterctlError,
    HostKeyChanged,
    HostKeyUnknown,
    LinkLost,
    LoginRefused,
    Unreachable,
)
from clusterctl.inventory.addresses import host_and_port
from clusterctl.inventory.cluster import Node
from clusterctl.ssh import openssh, retry, transport
from clusterctl.ssh.openssh import OpenSshTransport
from clusterctl.ssh.transport import SshTransport
from clusterctl.transport.fanout import Stream, on_each
from clusterctl.transport.link import shell_command
from clusterctl.transport.shell import ShellSession
from tests.support.nodes import wait_for
from tests.support.ports import free_port

SSHD = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
pytestmark = [pytest.mark.root, pytest.mark.skipif(SSHD is None, reason="no sshd on this machine")]


@dataclass
class Server:
    """A real sshd on a loopback port of its own, with its own host key and home."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    def node(self, name: str = "node1", **changes: object) -> Node:
        node = Node(
            name=name,
            host="127.0.0.1",
            address="127.0.0.1",
            port=self.port,
            key=str(self.folder / "id"),
            workdir=str(self.folder / "work"),
        )
        return replace(node, **changes)  # type: ignore[arg-type]

    def logins(self) -> list[str]:
        return re.findall(r"^(?:Failed|Accepted) publickey.*", (self.folder / "log").read_text(), re.M)

    def attempts(self) -> int:
        return (self.folder / "log").read_text().count("Connection from")


def start(folder: Path, extra: str = "", key: str = "ed25519") -> Server:
    folder.mkdir(mode=0o700)
    (folder / "home").mkdir()
    for name, kind in (("host", key), ("id", "ed25519")):
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "id.pub", folder / "authorized")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    lines = [
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {folder}/host",
        f"AuthorizedKeysFile {folder}/authorized",
        f"PidFile {folder}/pid",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "PermitRootLogin yes",
        "LogLevel VERBOSE",
        f"SetEnv HOME={folder}/home",
        extra,
    ]
    (folder / "config").write_text("\n".join(lines) + "\n")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(folder / "config")], stderr=log)
    wait_for(lambda: "Server listening" in (folder / "log").read_text())
    return Server(folder, port, process)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = start(tmp_path_factory.mktemp("one") / "sshd")
    yield found
    found.process.terminate()
    found.process.wait()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = start(tmp_path_factory.mktemp("two") / "sshd", key="ecdsa")
    yield found
    found.process.terminate()
    found.process.wait()


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


@dataclass
class Route:
    """One of the two transports, made anew for each call."""

    kind: str

    def __call__(
        self,
        known: Path,
        *,
        accept_new: bool = False,
        ssh_config: str = "none",
        connect_timeout: float = 10.0,
    ) -> SshTransport | OpenSshTransport:
        kind = SshTransport if self.kind == "paramiko" else OpenSshTransport
        return kind(
            known_hosts=known, accept_new=accept_new, ssh_config=ssh_config, connect_timeout=connect_timeout
        )


@pytest.fixture(params=["paramiko", "openssh"])
def route(request: pytest.FixtureRequest) -> Route:
    return Route(request.param)


def record(server: Server, known: Path, key_of: Server | None = None) -> None:
    kind, key = ((key_of or server).folder / "host.pub").read_text().split()[:2]
    with known.open("a") as file:
        file.write(f"[127.0.0.1]:{server.port} {kind} {key}\n")


def keygen_fingerprint(server: Server) -> str:
    return subprocess.run(
        ["ssh-keygen", "-lf", f"{server.folder}/host.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]


def test_a_node_is_reached_with_its_own_home_and_environment(
    route: Route, server: Server, known: Path
) -> None:
    record(server, known)
    link = route(known).connect(server.node())
    assert link.hello().home == f"{server.folder}/home"
    assert link.run(["env"], env={"A": "$(id) `id`"}).text.count("A=$(id) `id`\n") == 1
    link.close()


def test_an_unknown_host_key_is_refused_before_any_login_with_both_ways_on(
    route: Route, server: Server, known: Path
) -> None:
    logins = server.logins()
    with pytest.raises(HostKeyUnknown) as caught:
        route(known).connect(server.node())
    assert keygen_fingerprint(server) in caught.value.message
    assert "nodes trust" in caught.value.hint and "--accept-new-host-keys" in caught.value.hint
    assert server.logins() == logins and not known.exists()


def test_an_unknown_host_key_is_recorded_with_consent_and_known_from_then_on(
    route: Route, server: Server, known: Path
) -> None:
    known.write_text("# mine, without a line break at its end")
    route(known, accept_new=True).connect(server.node()).close()
    route(known).connect(server.node()).close()
    lines = known.read_text().splitlines()
    assert len(lines) == 2 and lines[1].split()[:2] == [f"[127.0.0.1]:{server.port}", "ssh-ed25519"]


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_changed_host_key_is_refused_before_any_data_whatever_is_consented(
    route: Route, server: Server, other: Server, known: Path, accept_new: bool
) -> None:
    # Of another kind, then of the same kind.
    for key_of in (other, server):
        recorded = key_of
        if key_of is server:
            known.unlink()
            fresh = known.with_name("fresh")
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(fresh)], check=True)
            known.write_text(
                f"[127.0.0.1]:{server.port} {' '.join(fresh.with_suffix('.pub').read_text().split()[:2])}\n"
            )
        else:
            record(server, known, recorded)
        logins = server.logins()
        with pytest.raises(HostKeyChanged) as caught:
            route(known, accept_new=accept_new).connect(server.node())
        assert (
            keygen_fingerprint(server) in caught.value.message and caught.value.message.count("SHA256:") == 2
        )
        assert server.logins() == logins


def test_a_refused_login_is_tried_once(route: Route, server: Server, other: Server, known: Path) -> None:
    record(server, known)
    before = server.attempts()
    with pytest.raises(LoginRefused, match="no key was accepted") as caught:
        route(known).connect(server.node(key=str(other.folder / "id")))
    assert server.attempts() == before + 1 and str(other.folder / "id") in caught.value.message


def test_a_locked_key_is_named_as_such(route: Route, server: Server, known: Path, tmp_path: Path) -> None:
    record(server, known)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(tmp_path / "locked")], check=True
    )
    with pytest.raises(LoginRefused, match="passphrase") as caught:
        route(known).connect(server.node(key=str(tmp_path / "locked")))
    assert "ssh-add" in caught.value.hint


def test_a_closed_port_a_wrong_name_and_a_silent_server_are_told_apart(
    route: Route, server: Server, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (transport, openssh):
        monkeypatch.setattr(module, "HANDSHAKE_LIMIT", 0.5)
    monkeypatch.setattr(retry, "RETRY_LIMIT", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        closed = server.node(port=silent.getsockname()[1])
        with pytest.raises(Unreachable, match="nothing listens"):
            route(known).connect(closed)
        silent.listen()
        with pytest.raises(Unreachable, match=r"handshake failed|it sent nothing for 0\.5 s"):
            route(known, connect_timeout=1.0).connect(closed)
    with pytest.raises(Unreachable, match="no address"):
        route(known).connect(server.node(host="no-such-node.invalid"))


def test_a_frozen_server_is_waited_for_as_long_as_one_that_is_off_and_once(known: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        node = Node("n", "127.0.0.1", "127.0.0.1", port=frozen.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(Unreachable, match="no SSH server answers there: it sent nothing for 1 s"):
            SshTransport(known_hosts=known, connect_timeout=1.0, ssh_config="none").connect(node)
        assert time.monotonic() - began < retry.HANDSHAKE_LIMIT / 2


def test_a_dropped_handshake_is_tried_again_and_goes_through(
    route: Route, server: Server, known: Path
) -> None:
    """A gate that drops the first two connections, as a busy sshd does, and passes the third."""
    gate = socket.create_server(("127.0.0.1", 0))
    came = []

    def serve() -> None:
        for place in range(3):
            connection, _ = gate.accept()
            came.append(place)
            if place < 2:
                connection.close()
                continue
            onward = socket.create_connection(("127.0.0.1", server.port))
            for one, two in ((connection, onward), (onward, connection)):
                threading.Thread(target=pump, args=(one, two), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    link = route(known, accept_new=True).connect(server.node(port=gate.getsockname()[1]))
    assert link.run(["echo", "through"]).stdout == b"through\n" and came == [0, 1, 2]
    link.close()
    gate.close()


def pump(one: socket.socket, two: socket.socket) -> None:
    try:
        while data := one.recv(65536):
            two.sendall(data)
        two.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_a_gateway_is_gone_through_and_both_host_keys_are_checked(
    route: Route, server: Server, other: Server, known: Path
) -> None:
    shutil.copy(server.folder / "id.pub", other.folder / "authorized")
    behind = server.node(gateway=f"127.0.0.1:{other.port}")
    record(server, known)
    with pytest.raises(HostKeyUnknown, match="gateway"):
        route(known).connect(behind)
    record(other, known)
    link = route(known).connect(behind)
    assert link.hello().home == f"{server.folder}/home"
    link.close()
    known.write_text("")
    record(other, known)
    record(server, known, other)
    with pytest.raises(HostKeyChanged, match="its host key changed"):
        route(known).connect(behind)
    with pytest.raises(Unreachable, match="gateway"):
        route(known).connect(replace(behind, port=1))


def test_the_users_ssh_configuration_is_read_as_openssh_reads_it(
    route: Route, server: Server, known: Path, tmp_path: Path
) -> None:
    record(server, known)
    (tmp_path / "included").write_text(
        f"Host nick*\n  HostName 127.0.0.1\n  Port {server.port}\n  IdentityFile {server.folder}/id\n"
    )
    config = tmp_path / "config"
    config.write_text(f"Include {tmp_path}/included\nMatch host never\n  Port 1\n")
    node = Node(name="node1", host="nickname", address="x", workdir=str(server.folder / "work"))
    link = route(known, ssh_config=str(config)).connect(node)
    assert link.run(["true"]).ok
    link.close()
    config.write_text("Host *\n  ProxyCommand sh -c 'echo no way to %n as %r >&2; exit 1'\n")
    with pytest.raises(Unreachable, match="ProxyCommand printed: no way to nickname as"):
        route(known, ssh_config=str(config)).connect(node)
    config.write_text("Port no-number\n")
    with pytest.raises(ClusterctlError, match="can't read its configuration"):
        route(known, ssh_config=str(config)).connect(node)


def test_what_ran_over_a_cut_connection_is_ended_and_the_loss_is_said(
    route: Route, server: Server, known: Path
) -> None:
    record(server, known)
    link = route(known).connect(server.node())
    marker = {"CLUSTERCTL_TEST": str(known)}
    running = link.request(
        "run", {"argv": ["/bin/sh", "-c", "setsid sleep 618 & echo up; sleep 618"], "env": marker}
    )
    next(running)
    cut_connection(server.process.pid, link.hello().pid)
    with pytest.raises(LinkLost, match="the connection ended"):
        next(running)
    wait_for(lambda: not marked(marker))


def cut_connection(listener: int, program: int) -> None:
    """Kill every process between a listening sshd and a program that it started.

    Which of them holds the connection depends on whether sshd runs as root.
    """
    chain = []
    while (program := parent_of(program)) not in (listener, 0):
        chain.append(program)
    for pid in reversed(chain):
        os.kill(pid, signal.SIGKILL)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def read_all(stream: Stream) -> dict[str, bytes]:
    found = {"stdout": b"", "stderr": b""}
    while True:
        try:
            name, data = stream.read(1 << 18, 5.0)
        except TimeoutError:
            continue
        if not name:
            return found
        found[name] += data


def test_a_program_without_an_agent_gives_its_streams_apart_and_how_it_ended(
    route: Route, server: Server, known: Path
) -> None:
    record(server, known)
    stream = route(known).start(server.node(), "cat; echo oops >&2; exit 7")
    sending = threading.Thread(target=lambda: (stream.send(b"x" * 3_000_000), stream.finish()))
    sending.start()
    assert read_all(stream) == {"stdout": b"x" * 3_000_000, "stderr": b"oops\n"}
    assert stream.ended() == (7, None)
    stream.close()
    killed = route(known).start(server.node(), "kill -9 $$")
    assert read_all(killed) == {"stdout": b"", "stderr": b""}
    assert killed.ended() == ((None, 9) if route.kind == "paramiko" else (137, None))
    killed.close()


def test_a_program_over_a_cut_connection_is_lost_not_ended(route: Route, server: Server, known: Path) -> None:
    record(server, known)
    stream = route(known).start(server.node(), "echo $$; exec sleep 60")
    _, data = stream.read(100, 20.0)
    with pytest.raises(TimeoutError):
        stream.read(100, 0.01)
    cut_connection(server.process.pid, int(data))
    with pytest.raises(LinkLost, match="the connection ended"):
        stream.read(100, 20.0)
    stream.close()


def test_a_scan_shows_a_key_without_a_login_and_says_known_new_or_changed(
    route: Route, server: Server, other: Server, known: Path
) -> None:
    logins = server.logins()
    seen = route(known).seen(server.node())
    assert (seen.fingerprint, seen.state) == (keygen_fingerprint(server), "new")
    route(known).record(server.node(), seen.key)
    assert known.stat().st_mode & 0o077 == 0
    assert route(known).seen(server.node()).state == "known"
    known.unlink()
    record(server, known, other)
    changed = route(known).seen(server.node())
    assert changed.state == "changed" and isinstance(changed.refusal(), HostKeyChanged)
    assert server.logins() == logins


def test_many_nodes_behind_one_default_sshd_all_succeed(route: Route, server: Server, known: Path) -> None:
    record(server, known)
    transport = route(known)

    def work(node: Node) -> bool:
        link = transport.connect(node)
        try:
            return link.run(["true"]).ok
        finally:
            link.close()

    nodes = [server.node(f"node{number}") for number in range(24)]
    assert [one.error for one in on_each(nodes, work, fanout=24)] == [None] * 24


def test_a_python_named_with_spaces_or_a_home_is_one_word_to_any_shell() -> None:
    assert shell_command(["~/my python/bin/python3", "-c", "a;b"]) == "~/'my python/bin/python3' -c 'a;b'"
    assert shell_command(["-x; rm"])[0] == "'"


def test_gateways_are_read_with_ports_and_ipv6() -> None:
    assert host_and_port("gate") == ("gate", None) and host_and_port("gate:2222") == ("gate", 2222)
    assert host_and_port("[::1]:22") == ("::1", 22) and host_and_port("fe80::1") == ("fe80::1", None)


@pytest.mark.parametrize(
    "line",
    [
        "|1|not-base64!|x {key}",
        "|1|only-a-salt {key}",
        "[127.0.0.1]:22 ssh-ed25519 AAAA!!!notbase64",
        "{name} half",
    ],
)
def test_a_malformed_known_hosts_line_is_skipped_and_reported_once(
    route: Route, server: Server, known: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    record(server, known)
    name, _, key = known.read_text().strip().partition(" ")
    known.write_text(f"{line.format(name=name, key=key)}\n{name} {key}\n")
    made = route(known)
    for _ in range(2):
        made.connect(server.node()).close()
    if route.kind == "paramiko":
        assert [entry.getMessage() for entry in caplog.records if entry.name == "clusterctl"] == [
            f"{known}: skipped 1 line that cannot be read: 1"
        ]


def test_a_revoked_host_key_is_called_revoked(route: Route, server: Server, known: Path) -> None:
    record(server, known)
    name, _, key = known.read_text().strip().partition(" ")
    known.write_text(f"{name} {key}\n@revoked * {key}\n")
    with pytest.raises(HostKeyChanged, match=r"ssh-ed25519 SHA256:\S+ is marked as revoked") as refused:
        route(known, accept_new=True).connect(server.node())
    assert "recorded" not in refused.value.message


@pytest.mark.parametrize("target", ["", ">&2"])
def test_a_login_script_that_prints_without_end_is_named_in_five_seconds(
    route: Route, known: Path, tmp_path: Path, target: str
) -> None:
    # Which scripts run at a login depends on the user's shell. This runs at each, instead of the command.
    server = start(tmp_path / "sshd", f"ForceCommand while :; do echo noise of a login script {target}; done")
    try:
        record(server, known)
        began = time.monotonic()
        with pytest.raises(Unreachable, match=r"end.*noise|noise.*end") as refused:
            route(known).connect(server.node())
        assert time.monotonic() - began < 5
        assert "\n" not in refused.value.message
        with ShellSession(route(known)) as shell, pytest.raises(Unreachable) as refused:
            shell.run(server.node(), ["true"])
        assert time.monotonic() - began < 10
        assert refused.value.message.count("noise") == 1
    finally:
        server.process.terminate()
        server.process.wait()
