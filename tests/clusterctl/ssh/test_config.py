from __future__ import annotations

import base64
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.inventory.addresses import host_and_port
from clusterctl.inventory.cluster import Node
from clusterctl.ssh.config import chain, route_to
from clusterctl.ssh.config_query import Configuration
from clusterctl.ssh.host_keys import key_file

SSH = shutil.which("ssh")
pytestmark = pytest.mark.skipif(SSH is None, reason="no ssh on this machine")

BLOCKS = """\
Include {folder}/included
Host *.lab !bad.lab "gate"
  User someone
  Port 2200
Host gpu?
  HostName %h.example.com
Host *
  ServerAliveInterval 7
"""
HOSTS = ["a.lab", "bad.lab", "gate", "gpu1", "gpu12", "NODE", "10.0.0.1", "fe80::1"]


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    """A file with a line for each time that `ssh` was started."""
    log = tmp_path / "asked"
    log.touch()
    (tmp_path / "ssh").write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {SSH} "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    return log


def configuration(folder: Path, text: str) -> Configuration:
    (folder / "included").write_text("Match all\nHost included\n  Port 9\n")
    (folder / "config").write_text(text.replace("{folder}", str(folder)))
    found = Configuration(str(folder / "config"))
    found.program = str(folder / "ssh")
    return found


def node(host: str, **more: object) -> Node:
    return Node(name="node1", host=host, address=host, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        BLOCKS,
        BLOCKS + "Match host NODE\n  User other\n",
        BLOCKS + "Host b.lab\n  UserKnownHostsFile /tmp/of-%h\n",
        "CanonicalizeHostname yes\nCanonicalDomains invalid\n",
        "Host=gate\n  Port=7\n",
    ],
)
def test_a_shared_answer_is_the_one_that_each_host_would_get_alone(
    tmp_path: Path, destination: Path, text: str
) -> None:
    config = configuration(tmp_path, text)
    for user, port in ((None, None), ("me", 2222)):
        for host in HOSTS:
            argv = [str(SSH), "-G", "-F", str(config.file), *(["-l", "me", "-p", "2222"] if user else [])]
            alone = subprocess.run([*argv, "--", host], capture_output=True, text=True, check=True).stdout
            expected = [line.partition(" ")[::2] for line in alone.splitlines()]
            told = [(key, one) for key, values in config.of(host, user, port).items() for one in values]
            assert without_name(told) == without_name(expected)


def without_name(answers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """All but the line that repeats the question, a path that holds a hash of it, and what the first question's -v
    changes."""
    left_out = ("host", "controlpath", "loglevel")
    return sorted((key.lower(), value) for key, value in answers if key not in left_out)


def test_ssh_is_asked_once_for_hosts_that_its_files_cannot_tell_apart(
    tmp_path: Path, destination: Path
) -> None:
    config = configuration(tmp_path, "Host *\n  User me\nHost gate*\n  Port 9\n")
    for number in range(200):
        assert route_to(node(f"10.0.0.{number}"), config).host == f"10.0.0.{number}"
    assert route_to(node("gate1"), config).port == 9
    # The many, and with it which files there are; the gate.
    assert len(destination.read_text().splitlines()) == 2
    config = configuration(tmp_path, "Match exec true\n  User me\n")
    for number in range(5):
        route_to(node(f"10.0.0.{number}"), config)
    assert len(destination.read_text().splitlines()) == 2 + 5


def test_everything_that_the_configuration_says_of_a_way_is_kept(tmp_path: Path, destination: Path) -> None:
    for name in ("key", "other key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True
        )
    (tmp_path / "known b").touch()
    text = f"""\
Host node
  HostName ::1
  Port 2022
  User me
  IdentityFile {tmp_path}/%r-is-not-there
  IdentityFile "{tmp_path}/other key"
  IdentityFile {tmp_path}/key
  IdentitiesOnly yes
  UserKnownHostsFile {tmp_path}/a "{tmp_path}/known b"
  GlobalKnownHostsFile none
  HostKeyAlias alias
  AddressFamily inet6
  BindAddress ::1
  ConnectTimeout 77
  ProxyCommand relay --to %h:%p --as %r --for %n --rate 5%%
  ControlMaster auto
"""
    route = route_to(node("node"), configuration(tmp_path, text))
    assert (route.host, route.port, route.user, route.name) == ("::1", 2022, "me", "alias")
    assert route.identities == (f"{tmp_path}/other key", f"{tmp_path}/key") and not route.use_agent
    assert route.known_hosts == (f"{tmp_path}/a", f"{tmp_path}/known b", "none")
    assert (route.family, route.bind_address, route.connect_timeout) == ("inet6", "::1", 77)
    assert route.proxy_command == "relay --to ::1:2022 --as me --for node --rate 5%"
    assert route.joins_master and not route.only_openssh and route.gateway is None
    ours = route_to(node("node", user="you", port=2023, gateway="gate"), configuration(tmp_path, text))
    assert (ours.user, ours.port, ours.proxy_command) == ("you", 2023, None) and ours.gateway is not None


def test_chains_of_gateways_are_followed_and_endless_ones_refused(tmp_path: Path, destination: Path) -> None:
    text = "Host node\n  ProxyJump first,you@second:29\nHost first\n  Port 28\n  ProxyCommand relay %h\n"
    route = route_to(node("node"), configuration(tmp_path, text))
    assert [(one.host, one.port) for one in chain(route)] == [("first", 28), ("second", 29), ("node", 22)]
    assert route.first.proxy_command == "relay first" and route.gateway and route.gateway.user == "you"
    with pytest.raises(UsageError, match="there are more than 8 gateways"):
        route_to(node("node"), configuration(tmp_path, "Host a\n  ProxyJump b\nHost *\n  ProxyJump a\n"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("PKCS11Provider /usr/lib/some.so", "PKCS11Provider"),
        ("RevokedHostKeys {folder}/revoked", "RevokedHostKeys"),
        ("IdentityAgent {folder}/socket", "IdentityAgent"),
        ("IdentityAgent SSH_AUTH_SOCK", ""),
        ("CertificateFile {folder}/elsewhere-cert.pub", "CertificateFile"),
        ("IdentityFile {folder}/key\n  CertificateFile {folder}/key-cert.pub", ""),
        ("ProxyCommand x\n  ProxyUseFdpass yes", "ProxyUseFdpass"),
        ("UserKnownHostsFile {folder}/marked", "certificate authorities or revoked keys in known_hosts"),
        ("HostbasedAuthentication yes", "HostbasedAuthentication"),
    ],
)
def test_what_only_openssh_can_do_is_told(tmp_path: Path, destination: Path, text: str, reason: str) -> None:
    (tmp_path / "marked").write_text("@cert-authority * ssh-ed25519 AAAA\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    assert route_to(node("node"), configuration(tmp_path, f"Host *\n  {text}\n")).only_openssh == reason


def test_a_key_file_tells_its_kind_and_whether_it_is_locked(tmp_path: Path) -> None:
    for kind, more, says in (
        ("ed25519", [], ("ssh-ed25519", False)),
        ("rsa", [], ("ssh-rsa", False)),
        ("rsa", ["-m", "PEM"], ("", False)),
        ("ecdsa", ["-N", "secret"], ("ecdsa-sha2-nistp256", True)),
        ("rsa", ["-m", "PEM", "-N", "secret"], ("", True)),
    ):
        path = tmp_path / f"{kind}{len(more)}{''.join(more)}"
        secret = [] if "-N" in more else ["-N", ""]
        subprocess.run(["ssh-keygen", "-q", "-t", kind, *more, *secret, "-f", str(path)], check=True)
        found = key_file(str(path))
        assert (found.kind, found.locked) == says
        assert key_file(f"{path}.pub").kind == "public"
    assert key_file(str(tmp_path / "none")).kind == ""


def test_without_ssh_the_inventory_alone_counts(tmp_path: Path, destination: Path) -> None:
    config = configuration(tmp_path, "Host *\n  Port 9\n")
    config.program = None
    route = route_to(node("node", user="me"), config)
    assert (route.host, route.port, route.user, route.gateway) == ("node", 22, "me", None)


def test_gateways_are_read_with_ports_and_ipv6() -> None:
    assert host_and_port("gate") == ("gate", None) and host_and_port("gate:2222") == ("gate", 2222)
    assert host_and_port("[::1]:22") == ("::1", 22) and host_and_port("fe80::1") == ("fe80::1", None)


def test_hardware_keys_go_to_openssh_and_locked_ones_do_not(
    tmp_path: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    locked, hardware = tmp_path / "locked", tmp_path / "hardware"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(locked)], check=True)
    fields = [b"none", b"none", b"", b"sk-ssh-ed25519@openssh.com"]
    cipher, kdf, options, kind = (struct.pack(">I", len(one)) + one for one in fields)
    public = struct.pack(">I", len(kind)) + kind
    body = base64.b64encode(b"openssh-key-v1\0" + cipher + kdf + options + struct.pack(">I", 1) + public)
    hardware.write_bytes(
        b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + body + b"\n-----END OPENSSH PRIVATE KEY-----\n"
    )
    config = configuration(tmp_path, f"Host a\n  IdentityFile {hardware}\nHost b\n  IdentityFile {locked}\n")
    assert route_to(node("a"), config).only_openssh == "keys of the kind sk-ssh-ed25519@openssh.com"
    assert route_to(node("b"), config).only_openssh == ""
    assert route_to(node("a", key=str(locked)), config).only_openssh == ""
    assert route_to(node("b", key=str(hardware)), config).only_openssh.startswith("keys of the kind sk-")
    assert route_to(node("b", key=f"{locked}.pub"), config).only_openssh.startswith(
        "the key of the ssh agent"
    )
