"""What only paramiko's way does: keys of every form, shared gateways, new keys in the middle, frozen servers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import HostKeyChanged, HostKeyUnknown, LinkLost, LoginRefused, Unreachable
from clusterctl.inventory.cluster import Node
from clusterctl.ssh import config as ssh_config
from clusterctl.ssh import session
from clusterctl.ssh.fabric import fabric_connection
from clusterctl.ssh.known_hosts import KnownHosts
from clusterctl.ssh.transport import SshTransport
from clusterctl.transport.fanout import Stream, on_each
from tests.clusterctl.ssh.test_ssh import SSHD, Server, read_all, record, start
from tests.support.nodes import wait_for

pytestmark = [pytest.mark.root, pytest.mark.skipif(SSHD is None, reason="no sshd on this machine")]


def stop(server: Server) -> None:
    server.process.terminate()
    server.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = start(tmp_path_factory.mktemp("session") / "sshd", "Subsystem sftp internal-sftp")
    yield found
    stop(found)


@pytest.fixture(scope="module")
def bastion(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[Server]:
    """A gateway that allows few sessions, and drops most of several logins at once."""
    found = start(tmp_path_factory.mktemp("bastion") / "sshd", "MaxSessions 2\nMaxStartups 3:50:6", key="rsa")
    shutil.copy(server.folder / "id.pub", found.folder / "authorized")
    yield found
    stop(found)


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`: an sshd of root has two for each login, another user's has one."""
    done = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, check=True)
    parents = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents if parent == ancestor]
    return found[1:]


def transport(known: Path, **more: object) -> SshTransport:
    return SshTransport(known_hosts=known, ssh_config="none", **more)  # type: ignore[arg-type]


def output(stream: Stream) -> bytes:
    try:
        return read_all(stream)["stdout"]
    finally:
        stream.close()


def keygen(*words: str | Path) -> None:
    subprocess.run(["ssh-keygen", "-q", *map(str, words)], check=True, stdin=subprocess.DEVNULL)


def authorize(server: Server, *lines: str) -> None:
    (server.folder / "authorized").write_text("\n".join(lines) + "\n")


# ---- gateways


def test_many_nodes_share_one_login_on_a_gateway_that_allows_few(
    server: Server, bastion: Server, known: Path
) -> None:
    record(server, known)
    record(bastion, known)
    route = transport(known)
    before = bastion.attempts()
    nodes = [server.node(f"node{number}", gateway=f"127.0.0.1:{bastion.port}") for number in range(24)]
    outcomes = on_each(nodes, lambda node: output(route.start(node, f"echo {node.name}")), fanout=24)
    assert [one.error for one in outcomes] == [None] * 24
    assert [one.value for one in outcomes] == [f"{node.name}\n".encode() for node in nodes]
    assert bastion.attempts() == before + 1


def test_a_chain_of_gateways_is_gone_through(server: Server, bastion: Server, known: Path) -> None:
    record(server, known)
    record(bastion, known)
    through = f"127.0.0.1:{bastion.port},127.0.0.1:{server.port}"
    assert output(transport(known).start(server.node(gateway=through), "echo there")) == b"there\n"


def test_a_dead_gateway_is_tried_once_and_says_the_same_for_all_its_nodes(
    server: Server, known: Path, tmp_path: Path
) -> None:
    bastion = start(tmp_path / "sshd")
    record(server, known)
    record(bastion, known)
    route = transport(known)
    nodes = [server.node(f"node{number}", gateway=f"127.0.0.1:{bastion.port}") for number in range(8)]
    with pytest.raises(LoginRefused, match=r"node0: its gateway .*no key was accepted"):
        route.start(nodes[0], "true")
    assert bastion.attempts() == 1
    outcomes = on_each(nodes, lambda node: route.start(node, "true"), fanout=4)
    assert {one.error.reason for one in outcomes if isinstance(one.error, LoginRefused)} == {
        outcomes[0].error.reason  # type: ignore[union-attr]
    }
    assert bastion.attempts() == 1
    stop(bastion)
    with pytest.raises(Unreachable, match=r"node0: its gateway .*nothing listens"):
        transport(known).start(nodes[0], "true")


def test_a_gateway_that_died_loses_its_nodes_and_is_logged_in_on_anew(
    server: Server, bastion: Server, known: Path
) -> None:
    record(server, known)
    record(bastion, known)
    route = transport(known)
    node = server.node(gateway=f"127.0.0.1:{bastion.port}")
    stream = route.start(node, "sleep 300")
    for pid in descendants(bastion.process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(LinkLost, match="the connection ended"):
        stream.read(100, 60.0)
    stream.close()
    assert output(route.start(node, "echo again")) == b"again\n"


def test_a_changed_key_behind_a_gateway_is_refused(server: Server, bastion: Server, known: Path) -> None:
    record(bastion, known)
    record(server, known, bastion)
    logins = server.logins()
    with pytest.raises(HostKeyChanged, match="its host key changed"):
        transport(known).start(server.node(gateway=f"127.0.0.1:{bastion.port}"), "true")
    assert server.logins() == logins


# ---- keys


FORMS = [("ed25519", "OPENSSH")] + [
    (kind, form) for kind in ("ecdsa", "rsa") for form in ("OPENSSH", "PEM", "PKCS8")
]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_keys_of_every_kind_and_form_log_in(
    server: Server, known: Path, tmp_path: Path, kind: str, form: str
) -> None:
    key = tmp_path / "key"
    keygen("-t", kind, *(["-b", "2048"] if kind == "rsa" else []), "-N", "", "-f", key)
    if form != "OPENSSH":
        keygen("-p", "-m", form, "-N", "", "-f", key)
    record(server, known)
    mine = (server.folder / "id.pub").read_text()
    authorize(server, mine, key.with_suffix(".pub").read_text())
    try:
        assert output(transport(known).start(server.node(key=str(key)), "echo in")) == b"in\n"
    finally:
        authorize(server, mine)


def test_a_passphrase_is_asked_once_for_all_nodes_and_only_where_somebody_is_there(
    server: Server, known: Path, tmp_path: Path
) -> None:
    key = tmp_path / "locked"
    keygen("-t", "ed25519", "-N", "right", "-f", key)
    record(server, known)
    mine = (server.folder / "id.pub").read_text()
    authorize(server, mine, key.with_suffix(".pub").read_text())
    destination: list[str] = []
    answers = iter(["wrong", "right"])

    def ask(prompt: str) -> str:
        destination.append(prompt)
        return next(answers)

    try:
        route = transport(known, ask=ask)
        nodes = [server.node(f"node{number}", key=str(key)) for number in range(8)]
        outcomes = on_each(nodes, lambda node: output(route.start(node, "echo in")), fanout=8)
        assert [one.value for one in outcomes] == [b"in\n"] * 8 and len(destination) == 2
        assert str(key) in destination[0]
        with pytest.raises(LoginRefused, match="passphrase") as caught:
            transport(known).start(nodes[0], "true")
        assert "ssh-add" in caught.value.hint
    finally:
        authorize(server, mine)


def test_a_certificate_beside_its_key_logs_in_and_the_bare_key_is_tried_after_it(
    server: Server, known: Path, tmp_path: Path
) -> None:
    authority, key = tmp_path / "authority", tmp_path / "key"
    keygen("-t", "ed25519", "-N", "", "-f", authority)
    keygen("-t", "ecdsa", "-N", "", "-f", key)
    who = os.environ.get("USER") or subprocess.check_output(["id", "-un"], text=True).strip()
    keygen("-s", authority, "-I", "me", "-n", who, key.with_suffix(".pub"))
    record(server, known)
    mine = (server.folder / "id.pub").read_text()
    node = server.node(key=str(key), user=who)
    try:
        authorize(server, mine, f"cert-authority {authority.with_suffix('.pub').read_text()}")
        assert output(transport(known).start(node, "echo in")) == b"in\n"
        authorize(server, mine, key.with_suffix(".pub").read_text())
        assert output(transport(known).start(node, "echo in")) == b"in\n"
    finally:
        authorize(server, mine)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An ssh agent of the test's own."""
    place = tmp_path / "agent"
    running = subprocess.Popen(["ssh-agent", "-D", "-a", str(place)], stdout=subprocess.DEVNULL)
    wait_for(place.exists)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(place))
    yield place
    running.terminate()
    running.wait()


def test_the_ssh_agents_keys_serve_many_nodes_at_once(
    server: Server, known: Path, tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    keygen("-t", "ed25519", "-N", "", "-f", key)
    subprocess.run(["ssh-add", "-q", str(key)], check=True)
    record(server, known)
    mine = (server.folder / "id.pub").read_text()
    authorize(server, mine, key.with_suffix(".pub").read_text())
    monkeypatch.setattr(ssh_config, "IDENTITIES", ())
    key.unlink()
    config = tmp_path / "config"
    config.write_text("IdentityFile none\n")
    try:
        route = SshTransport(known_hosts=known, ssh_config=str(config))
        nodes = [server.node(f"node{number}", key=None) for number in range(8)]
        outcomes = on_each(nodes, lambda node: output(route.start(node, "echo in")), fanout=8)
        assert [one.error for one in outcomes] == [None] * 8
    finally:
        authorize(server, mine)


# ---- fabric


def test_fabric_runs_and_copies_over_a_login_that_was_checked_here(
    server: Server, bastion: Server, known: Path, tmp_path: Path
) -> None:
    record(server, known)
    record(bastion, known)
    node = server.node(gateway=f"127.0.0.1:{bastion.port}")
    (tmp_path / "sent").write_text("over fabric")
    with fabric_connection(transport(known), node) as connection:
        assert connection.run("echo hello; exit 3", hide=True, warn=True, in_stream=False).exited == 3
        connection.put(str(tmp_path / "sent"), f"{tmp_path}/there")
        connection.get(f"{tmp_path}/there", str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "over fabric"
    known.unlink()
    record(bastion, known)
    with (
        pytest.raises(HostKeyUnknown, match="its host key is not known"),
        fabric_connection(transport(known), node),
    ):
        pass


def test_paramiko_is_loaded_without_what_only_fabric_needs() -> None:
    code = """
import sys
from clusterctl.ssh.load_paramiko import load_paramiko
load_paramiko()
import clusterctl.ssh.program
assert "invoke" not in sys.modules and "asyncio" not in sys.modules
import fabric
fabric.Connection("nowhere")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- the session itself


def test_new_keys_in_the_middle_of_a_stream_change_nothing(
    server: Server, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(server, known)
    monkeypatch.setattr(session, "REKEY_BYTES", 1 << 20)
    stream = transport(known).start(server.node(), "cat")
    data = os.urandom(1 << 16) * 96
    sending = threading.Thread(target=lambda: (stream.send(data), stream.finish()))
    sending.start()
    assert output(stream) == data
    sending.join()
    assert stream.ended() == (0, None)


def test_a_server_without_aes_gcm_serves_too(
    server: Server, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(server, known)
    monkeypatch.setattr(session.Session, "_preferred_ciphers", session.CTR)
    monkeypatch.setattr(session, "REKEY_BYTES", 1 << 20)
    data = os.urandom(1 << 16) * 48
    for macs in (session.SHA2, session.SHA2[2:]):
        monkeypatch.setattr(session.Session, "_preferred_macs", macs)
        stream = transport(known).start(server.node(), "sleep 0.3; cat")
        with pytest.raises(TimeoutError):
            stream.read(100, 0.05)
        sending = threading.Thread(target=lambda one=stream: (one.send(data), one.finish()))
        sending.start()
        assert output(stream) == data
        sending.join()


def test_one_thread_may_send_much_while_the_node_answers_little(server: Server, known: Path) -> None:
    record(server, known)
    stream = transport(known).start(server.node(), "wc -c")
    for _ in range(40):
        stream.send(b"x" * (1 << 18))
    stream.finish()
    assert output(stream).strip() == b"10485760"


def test_a_server_that_freezes_is_a_lost_link_and_one_that_is_silent_is_not(
    server: Server, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "BEAT", 0.2)
    monkeypatch.setattr(session, "SILENCE", 1.0)
    record(server, known)
    stream = transport(known).start(server.node(), "echo $PPID; exec sleep 300")
    name, data = stream.read(100, 20.0)
    assert name == "stdout"
    with pytest.raises(TimeoutError):
        # It answers that it is there.
        stream.read(100, 2.5)
    os.kill(int(data), signal.SIGSTOP)
    try:
        with pytest.raises(LinkLost, match="nothing was received"):
            stream.read(100, 60.0)
    finally:
        os.kill(int(data), signal.SIGCONT)
        stream.close()


def test_a_dead_node_costs_its_own_connect_timeout_and_nobody_else_any_time(
    server: Server, known: Path
) -> None:
    record(server, known)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # From the second on the kernel drops who knocks.
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        route = transport(known, connect_timeout=5.0)
        nodes = [server.node(f"node{number}") for number in range(4)]
        nodes.insert(0, server.node("dead", port=full.getsockname()[1]))
        came: list[str] = []
        outcomes = on_each(
            nodes,
            lambda node: output(route.start(node, "echo in")),
            on_outcome=lambda one: came.append(one.node.name),
        )
        for one in waiting:
            one.close()
    assert came[-1] == "dead" and [one.value for one in outcomes[1:]] == [b"in\n"] * 4
    with pytest.raises(Unreachable, match=r"did not answer within 5 s"):
        outcomes[0].get()


def test_closing_in_another_thread_ends_a_read(server: Server, known: Path) -> None:
    record(server, known)
    stream = transport(known).start(server.node(), "sleep 300")
    threading.Timer(0.3, stream.close).start()
    with pytest.raises(LinkLost, match="closed"):
        stream.read(100, 60.0)


def test_a_server_that_talks_without_end_is_given_up(known: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gate:

        def serve() -> None:
            connection, _ = gate.accept()
            with connection, contextlib.suppress(OSError):
                while True:
                    connection.sendall(b"x" * 4096)

        threading.Thread(target=serve, daemon=True).start()
        node = Node(name="node1", host="127.0.0.1", address="x", port=gate.getsockname()[1])
        with pytest.raises(Unreachable, match="no SSH server"):
            transport(known).start(node, "true")


# ---- host keys


def test_hashed_names_patterns_and_revoked_keys_are_understood(server: Server, known: Path) -> None:
    record(server, known)
    name = f"[127.0.0.1]:{server.port}"
    kind, key = (server.folder / "host.pub").read_text().split()[:2]
    keygen("-H", "-f", known)
    assert name not in known.read_text() and [one.base64 for one in KnownHosts([known]).of(name)] == [key]
    known.write_text(f"!other,[127.0.0.?]:* {kind} {key}\n")
    assert KnownHosts([known]).of(name) and not KnownHosts([known]).of("127.0.0.1")
    assert output(transport(known).start(server.node(), "echo in")) == b"in\n"
    known.write_text(f"!{name},[127.0.0.1]:* {kind} {key}\n")
    with pytest.raises(HostKeyUnknown, match="its host key is not known"):
        transport(known).start(server.node(), "true")
    known.write_text(f"{name} {kind} {key}\n@revoked * {kind} {key}\n")
    with pytest.raises(HostKeyChanged, match="revoked"):
        transport(known, accept_new=True).start(server.node(), "true")


def test_an_ipv6_address_is_a_host_like_any_other(known: Path, tmp_path: Path) -> None:
    if not _has_ipv6():
        pytest.skip("no IPv6 on this machine")
    server = start(tmp_path / "sshd", "ListenAddress ::1")
    node = replace(server.node(), host="::1")
    try:
        route = transport(known, accept_new=True)
        assert output(route.start(node, "echo in")) == b"in\n"
        assert known.read_text().startswith(f"[::1]:{server.port} ssh-ed25519 ")
    finally:
        stop(server)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
