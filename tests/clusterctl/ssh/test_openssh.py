from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.agent.processes import marked
from clusterctl.errors import HostKeyChanged, LoginRefused
from clusterctl.ssh.config_query import Configuration
from clusterctl.ssh.openssh import OpenSshTransport
from clusterctl.ssh.openssh_child import ChildStream
from clusterctl.ssh.openssh_log import HopLog, plain
from clusterctl.transport.fanout import on_each
from tests.clusterctl.ssh.test_ssh import Server, read_all, record, start
from tests.support.nodes import wait_for

SSHD = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(SSHD is None or not shutil.which("ssh"), reason="no sshd or no ssh here"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openssh")
    banner = folder / "banner"
    banner.write_text('Authenticated to everything using "nothing"\nCLUSTERCTL-END 0\n')
    found = start(folder / "sshd", f"Banner {banner}")
    yield found
    found.process.terminate()
    found.process.wait()


@pytest.fixture
def known(tmp_path: Path, server: Server) -> Path:
    path = tmp_path / "known hosts"
    record(server, path)
    return path


def children() -> set[int]:
    said = subprocess.run(
        ["ps", "-o", "pid=,comm=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    return {int(line.split()[0]) for line in said.stdout.splitlines() if line.split()[1] == "ssh"}


def test_a_nodes_own_words_and_a_banner_are_never_taken_for_those_of_ssh(server: Server, known: Path) -> None:
    said = "Permission denied (publickey).\nConnection to x closed by remote host.\r\nCLUSTERCTL-END 1\n"
    stream = OpenSshTransport(known_hosts=known, ssh_config="none").start(
        server.node(), f"printf '%s' '{said}' >&2; exit 3"
    )
    assert read_all(stream) == {"stdout": b"", "stderr": said.encode()} and stream.ended() == (3, None)
    stream.close()


def test_an_end_is_known_while_what_was_left_behind_holds_the_streams(server: Server, known: Path) -> None:
    stream = OpenSshTransport(known_hosts=known, ssh_config="none").start(server.node(), "sleep 30 & exit 9")
    while not stream.exited():
        with contextlib.suppress(TimeoutError):
            stream.read(100, 0.1)
    assert stream.ended() == (9, None)
    stream.close()
    assert not children()


@pytest.mark.parametrize("size", [1, 7, 60, 1000])
def test_the_mark_is_found_however_the_bytes_arrive(size: int) -> None:
    line, mark = ChildStream.wrapped("x")
    text = b"one\ntwo\n\n\nCLUSTERCTL-END no\n" + b"\n" + mark + b" 42\n" + b"left behind\n"

    class Pieces:
        node = "node1"

        def __init__(self) -> None:
            self.left = [text[place : place + size] for place in range(0, len(text), size)]

        def read(self, size: int, timeout: float) -> tuple[str, bytes]:
            return ("stderr", self.left.pop(0)) if self.left else ("", b"")

        def status(self) -> int:
            return 42

    stream = ChildStream(Pieces(), mark)  # type: ignore[arg-type]
    found = b"".join(iter(lambda: stream.read(100, 1.0)[1], b""))
    assert found == b"one\ntwo\n\n\nCLUSTERCTL-END no\nleft behind\n" and stream.ended() == (42, None)
    assert mark.decode() in line


def test_no_child_and_no_folder_is_left_whatever_becomes_of_the_login(
    server: Server, known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    transport = OpenSshTransport(known_hosts=known, ssh_config="none")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "id")], check=True)
    with pytest.raises(LoginRefused, match="no key was accepted"):
        transport.connect(server.node(key=str(tmp_path / "id")))
    link = transport.connect(server.node())
    assert not list((tmp_path / "t").iterdir()) and len(children()) == 1
    link.close()
    assert not children()


KILLED = """
import os, sys, threading
from pathlib import Path
from clusterctl.inventory.cluster import Node
from clusterctl.ssh.openssh import OpenSshTransport
folder, known, port, marker = sys.argv[1:]
node = Node(name="n", host="127.0.0.1", address="x", port=int(port), key=f"{folder}/id", workdir=f"{folder}/work")
link = OpenSshTransport(known_hosts=Path(known), ssh_config="none").connect(node)
argv = ["/bin/sh", "-c", "setsid sleep 600 & echo up; sleep 600"]
next(link.request("run", {"argv": argv, "env": {"CLUSTERCTL_TEST": marker}}))
print("up", flush=True)
threading.Event().wait()
"""


def test_a_killed_launcher_leaves_neither_ssh_nor_what_ran_on_the_node(server: Server, known: Path) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(KILLED), str(server.folder), str(known), str(server.port)]
    launcher = subprocess.Popen([*argv, str(known)], stdout=subprocess.PIPE)
    assert launcher.stdout and launcher.stdout.readline() == b"up\n"
    said = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, text=True)
    (child,) = map(int, said.stdout.split())
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    wait_for(lambda: not marked({"CLUSTERCTL_TEST": str(known)}))
    wait_for(lambda: not Path(f"/proc/{child}").exists())


def test_a_connection_that_the_user_shares_is_joined_and_none_is_left_open(
    server: Server, known: Path
) -> None:
    # A socket's path has at most 108 bytes.
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        join_shared(server, known, Path(short))


def join_shared(server: Server, known: Path, folder: Path) -> None:
    config = folder / "config"
    config.write_text(
        f'ControlMaster auto\nControlPersist 60\nControlPath {folder}/%C\nUserKnownHostsFile "{known}"\n'
    )
    transport = OpenSshTransport(known_hosts=known, ssh_config=str(config))
    transport.connect(server.node()).close()
    # No master of ours.
    assert not list(folder.glob("????????????????????????????????????????"))
    before = server.attempts()
    by_hand = [
        "ssh",
        "-F",
        str(config),
        "-i",
        f"{server.folder}/id",
        "-p",
        str(server.port),
        "-l",
        user(),
        "-fN",
    ]
    subprocess.run([*by_hand, "127.0.0.1"], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        link = transport.connect(server.node())
        assert link.run(["echo", "joined"]).stdout == b"joined\n"
        link.close()
        stream = transport.start(server.node(), "exit 6")
        assert read_all(stream) == {"stdout": b"", "stderr": b""} and stream.ended() == (6, None)
        stream.close()
        assert server.attempts() == before + 1
    finally:
        subprocess.run([*by_hand[:-1], "-O", "exit", "127.0.0.1"], check=True, stderr=subprocess.DEVNULL)


def user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def test_a_chain_of_gateways_is_gone_through_with_our_options_at_every_step(
    server: Server, known: Path, tmp_path: Path
) -> None:
    first = start(tmp_path / "first")
    second = start(tmp_path / "second")
    try:
        for one in (first, second):
            shutil.copy(server.folder / "id.pub", one.folder / "authorized")
            record(one, known)
        config = tmp_path / "config"
        config.write_text(f"Host 127.0.0.1\n  IdentityFile {server.folder}/id\n  StrictHostKeyChecking no\n")
        node = server.node(gateway=f"127.0.0.1:{first.port},127.0.0.1:{second.port}")
        transport = OpenSshTransport(known_hosts=known, ssh_config=str(config))
        link = transport.connect(node)
        assert link.run(["echo", "through"]).stdout == b"through\n"
        link.close()
        assert transport.seen(node).state == "known"
        lines = known.read_text().splitlines()
        known.write_text(
            "\n".join([*lines[:2], lines[2].replace(f":{second.port}", f":{first.port}")]) + "\n"
        )
        lines[2] = (
            lines[1].split()[0].replace(str(first.port), str(second.port)) + " " + lines[1].split(" ", 1)[1]
        )
        known.write_text("\n".join(lines) + "\n")
        with pytest.raises(HostKeyChanged, match=rf"gateway \[127.0.0.1\]:{second.port}"):
            transport.connect(node)
        with pytest.raises(HostKeyChanged, match=rf"gateway .*:{second.port}\): its host key changed"):
            transport.connect(replace(node, gateway=f"127.0.0.1:{second.port}"))
    finally:
        for one in (first, second):
            one.process.terminate()
            one.process.wait()


def test_what_a_user_ordered_stays_and_only_the_usual_order_is_made_quick(tmp_path: Path) -> None:
    quick = ["mlkem768x25519-sha256", "curve25519-sha256"]
    for text, expected in (("", quick), ("KexAlgorithms ecdh-sha2-nistp521,curve25519-sha256", [""])):
        (tmp_path / "config").write_text(text + "\n")
        transport = OpenSshTransport(ssh_config=Configuration(str(tmp_path / "config")))
        first = transport._quick(transport_way(transport)).get("KexAlgorithms", "").split(",")[0]
        assert first in expected


def transport_way(transport: OpenSshTransport):  # type: ignore[no-untyped-def]
    from clusterctl.inventory.cluster import Node
    from clusterctl.ssh.config import route_to

    return route_to(Node(name="n", host="h", address="h"), transport._config)


def test_the_log_of_any_version_is_read_alike() -> None:
    for line in (
        'sshconnect2.c:ssh_userauth2():580 (pid=1778): Authenticated to h ([h]:22) using "publickey".\n',
        'debug1: Authenticated to h ([h]:22) using "publickey".\r\n',
        'Authenticated to h ([h]:22) using "publickey".\n',
        'sshconnect2.c:ssh_userauth2():580 (bin=ssh, pid=17): Authenticated to h ([h]:22) using "publickey".\n',
    ):
        assert HopLog("n", None, plain(line.encode())).logged_in, line  # type: ignore[arg-type]
    shown = HopLog("n", None, plain(b"debug1: Server host key: ssh-rsa SHA256:abc\r\n")).shown  # type: ignore[arg-type]
    assert str(shown) == "ssh-rsa SHA256:abc"


def test_a_gateway_that_refuses_a_login_is_asked_once_for_all_nodes(
    server: Server, known: Path, tmp_path: Path
) -> None:
    gate = start(tmp_path / "gate")
    try:
        record(gate, known)
        transport = OpenSshTransport(known_hosts=known, ssh_config="none")
        nodes = [server.node(f"node{number}", gateway=f"127.0.0.1:{gate.port}") for number in range(12)]
        outcomes = on_each(nodes, lambda node: transport.start(node, "true"), fanout=12)
        assert [type(one.error) for one in outcomes] == [LoginRefused] * 12
        assert all(one.error and "gateway [127.0.0.1]" in one.error.message for one in outcomes)
        assert gate.attempts() == 1
    finally:
        gate.process.terminate()
        gate.process.wait()
