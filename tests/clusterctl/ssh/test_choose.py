from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.errors import HostKeyChanged, HostKeyUnknown, UsageError
from clusterctl.inventory.cluster import Node
from clusterctl.ssh.choose import SshChoice
from tests.clusterctl.ssh.test_ssh import Server, record, start

pytestmark = pytest.mark.skipif(not shutil.which("ssh") or not shutil.which("sshd", path="/usr/sbin:/usr/bin"),
                                reason="no sshd or no ssh here")  # fmt: skip


def keygen(*words: object) -> None:
    subprocess.run(["ssh-keygen", "-q", *map(str, words)], check=True, capture_output=True)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("authority") / "ca"
    keygen("-t", "ed25519", "-N", "", "-f", path)
    return path


@pytest.fixture(scope="module")
def server(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a certificate of its own, which also takes logins by certificate, and listens on ::1 too."""
    folder = tmp_path_factory.mktemp("choice")
    keygen("-t", "ed25519", "-N", "", "-f", folder / "certified")
    keygen("-s", authority, "-I", "host", "-h", "-n", "127.0.0.1,node", folder / "certified.pub")
    extra = [f"TrustedUserCAKeys {authority}.pub"]
    extra += [f"HostKey {folder}/certified", f"HostCertificate {folder}/certified-cert.pub"]
    extra += ["ListenAddress ::1"] if has_ipv6() else []
    found = start(folder / "sshd", "\n".join(extra), key="ecdsa")
    yield found
    found.process.terminate()
    found.process.wait()


def echoed(choice: SshChoice, node: Node) -> bytes:
    link = choice.connect(node)
    try:
        return link.run(["echo", "there"]).stdout
    finally:
        link.close()


def test_hosts_vouched_for_by_an_authority_are_reached_and_others_refused(
    server: Server, authority: Path, tmp_path: Path
) -> None:
    (tmp_path / "known").write_text(
        f"@cert-authority 127.0.0.1,[127.0.0.1]:* {Path(f'{authority}.pub').read_text()}"
    )
    (tmp_path / "config").write_text(f"Host *\n  UserKnownHostsFile {tmp_path}/known\n")
    choice = SshChoice(ssh_config=str(tmp_path / "config"))
    node = server.node()
    assert choice.chosen(node) == ("openssh", "certificate authorities or revoked keys in known_hosts")
    assert echoed(choice, node) == b"there\n"
    # The cluster's own file.
    own = SshChoice(known_hosts=tmp_path / "known", ssh_config="none")
    assert own.chosen(node)[0] == "openssh" and echoed(own, node) == b"there\n"
    keygen("-t", "ed25519", "-N", "", "-f", tmp_path / "other")
    other = (tmp_path / "other.pub").read_text()
    (tmp_path / "known").write_text(f"@cert-authority 127.0.0.1,[127.0.0.1]:* {other}")
    with pytest.raises((HostKeyUnknown, HostKeyChanged), match="host key is not known"):
        SshChoice(ssh_config=str(tmp_path / "config")).connect(node)


def test_a_certificate_that_lies_apart_from_its_key_logs_in(
    server: Server, authority: Path, tmp_path: Path
) -> None:
    keygen("-t", "ed25519", "-N", "", "-f", tmp_path / "mine")
    keygen("-s", authority, "-I", "me", "-n", subprocess.getoutput("id -un"), tmp_path / "mine.pub")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine-cert.pub").rename(tmp_path / "elsewhere" / "cert.pub")
    record(server, tmp_path / "known")
    (tmp_path / "config").write_text(
        f"IdentityFile {tmp_path}/mine\nCertificateFile {tmp_path}/elsewhere/cert.pub\nIdentitiesOnly yes\n"
    )
    choice = SshChoice(known_hosts=tmp_path / "known", ssh_config=str(tmp_path / "config"))
    node = server.node(key=None)
    assert choice.chosen(node) == ("openssh", "CertificateFile")
    assert echoed(choice, node) == b"there\n"


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
@pytest.mark.parametrize("kind", ["paramiko", "openssh"])
def test_ipv6_families_aliases_and_own_addresses_count(server: Server, tmp_path: Path, kind: str) -> None:
    record(server, tmp_path / "known")
    key = (tmp_path / "known").read_text().split(" ", 1)[1]
    (tmp_path / "known").write_text(f"the-alias {key}")
    (tmp_path / "config").write_text(
        "Host six\n  HostName ::1\n  HostKeyAlias the-alias\n  AddressFamily inet6\n  BindAddress ::1\n"
    )
    choice = SshChoice(kind, known_hosts=tmp_path / "known", ssh_config=str(tmp_path / "config"))
    assert echoed(choice, server.node(host="six")) == b"there\n"
    (tmp_path / "known").write_text(f"[::1]:{server.port} {key}")
    choice = SshChoice(kind, known_hosts=tmp_path / "known", ssh_config="none")
    assert echoed(choice, server.node(host="::1")) == b"there\n"
    behind = server.node(host="::1", gateway=f"[::1]:{server.port}")
    assert echoed(choice, behind) == b"there\n"


@pytest.mark.parametrize("kind", ["paramiko", "openssh"])
def test_hashed_names_and_several_files_are_read(server: Server, tmp_path: Path, kind: str) -> None:
    record(server, tmp_path / "hashed")
    keygen("-H", "-f", tmp_path / "hashed")
    (tmp_path / "empty").touch()
    (tmp_path / "config").write_text(
        f"UserKnownHostsFile {tmp_path}/empty {tmp_path}/not-there {tmp_path}/hashed\n"
    )
    choice = SshChoice(kind, ssh_config=str(tmp_path / "config"))
    assert echoed(choice, server.node()) == b"there\n"
    assert choice.seen(server.node()).state == "known"


@pytest.mark.parametrize("kind", ["paramiko", "openssh"])
def test_a_proxy_command_of_the_users_is_gone_through_and_ended(
    server: Server, tmp_path: Path, kind: str
) -> None:
    record(server, tmp_path / "known")
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import os, socket, sys, threading\n"
        "line = socket.create_connection(sys.argv[1:3])\n"
        "def up():\n"
        "    while data := os.read(0, 65536): line.sendall(data)\n"
        "    line.shutdown(1)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := line.recv(65536): os.write(1, data)\n"
    )
    (tmp_path / "config").write_text(
        f"Host node\n  HostName 127.0.0.1\n  ProxyCommand python3 {relay} %h %p\n"
    )
    choice = SshChoice(kind, known_hosts=tmp_path / "known", ssh_config=str(tmp_path / "config"))
    assert echoed(choice, server.node(host="node")) == b"there\n"
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(relay) not in left


def test_an_unknown_choice_names_the_near_one() -> None:
    with pytest.raises(UsageError, match="opensh") as caught:
        SshChoice("opensh")
    assert "openssh" in caught.value.hint
