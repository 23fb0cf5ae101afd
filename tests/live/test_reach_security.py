"""Five hundred hostile texts on the whole way from a command line to a real node and back: each arrives as it was,
none is executed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from clusterctl.backends.reach import transport_to
from clusterctl.errors import ClusterctlError
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.inventory import nodeset
from clusterctl.sandbox.cluster import load as load_sandbox
from clusterctl.text import escape_controls
from clusterctl.transport.fanout import Connections
from tests.live.conftest import Shell
from tests.support import hostile

pytestmark = pytest.mark.live

PYTHON = ("python3", "-I", "-S", "-X", "utf8", "-c")
TELL = "import hashlib; tell = lambda one: print(hashlib.sha256(one).hexdigest(), len(one))"
ARGUMENTS = f"{TELL}\nimport os, sys\nfor one in sys.argv[1:]: tell(os.fsencode(one))"
VARIABLES = (
    f"{TELL}\nimport os\nfor n in range(500): tell(os.environb.get(b'HOSTILE_%d' % n, b'(not there)'))"
)


def told(texts: list[str]) -> list[str]:
    raw = [one.encode("utf-8", "surrogateescape") for one in texts]
    return [f"{hashlib.sha256(one).hexdigest()} {len(one)}" for one in raw]


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """What exists once any of the texts was executed, wherever that was: nodes see this folder too."""
    return tmp_path / "executed"


def never_executed(canary: Path, cluster_file: Path) -> None:
    assert not canary.exists()
    made = load_sandbox(cluster_file.parent)
    homes = [made.layout.home(node) for node in made.nodes]
    for folder in (Path.cwd(), canary.parent, *homes):
        assert not [name for name in os.listdir(folder) if name.endswith(canary.name)], folder


def as_yaml(value: object) -> str:
    """JSON, but for its pairs of surrogates: yaml has a longer escape for those characters."""

    def joined(pair: re.Match[str]) -> str:
        return f"\\U{ord(json.loads(chr(34) + pair.group() + chr(34))):08x}"

    return re.sub(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}", joined, json.dumps(value))


def shown(text: str, node: str) -> list[str]:
    return [line.removeprefix(f"{node}: ") for line in text.splitlines() if line.startswith(f"{node}: ")]


def test_arguments_arrive_byte_identical_through_the_command_line(
    shell: Shell, canary: Path, cluster_file: Path
) -> None:
    texts = hostile.texts(str(canary))
    assert len(set(texts)) == 500
    done = shell("exec", "node[1-2]", "--", *PYTHON, ARGUMENTS, *texts)
    assert done.returncode == 0, done.stderr
    for node in ("node1", "node2"):
        assert shown(done.stdout, node) == told(texts)
    never_executed(canary, cluster_file)


def test_arguments_and_variables_arrive_byte_identical_through_an_agent(
    canary: Path, cluster_file: Path
) -> None:
    cluster = inventory_cluster.load(cluster_file)
    texts = hostile.texts(str(canary))
    values = hostile.values(str(canary))
    env = {f"HOSTILE_{number}": text for number, text in enumerate(values)}
    with Connections(transport_to(cluster)) as connections:
        link = connections.of(cluster.nodes[0])
        arguments = link.run([*PYTHON, ARGUMENTS, *texts])
        variables = link.run([*PYTHON, VARIABLES], env=env)
    assert arguments.text.splitlines() == told(texts)
    assert variables.text.splitlines() == told(values), variables.stderr
    never_executed(canary, cluster_file)


def test_variables_of_the_inventory_arrive_byte_identical(
    shell: Shell, canary: Path, cluster_file: Path
) -> None:
    """What yaml can hold; the bytes that it can't hold go through an agent above."""
    texts = [re.sub("[\udc80-\udcff]", "?", one) for one in hostile.values(str(canary))]
    value = yaml.safe_load(cluster_file.read_text().replace("./", f"{cluster_file.parent}/"))
    value["nodes"]["node1"]["env"] = {f"HOSTILE_{number}": text for number, text in enumerate(texts)}
    mine = shell.folder / "cluster.yaml"
    mine.write_text(as_yaml(value))
    done = shell("exec", "-c", str(mine), "node1", "--", *PYTHON, VARIABLES)
    assert done.returncode == 0, done.stderr
    assert shown(done.stdout, "node1") == told(texts)
    never_executed(canary, cluster_file)


def test_names_of_files_go_there_and_back_byte_identical(
    shell: Shell, canary: Path, cluster_file: Path
) -> None:
    names = hostile.names(str(canary))
    source = shell.folder / "source"
    source.mkdir()
    for number, name in enumerate(names):
        (source / name).write_bytes(b"%d" % number)
    made = load_sandbox(cluster_file.parent)
    pushed = shell("push", str(source), "~/hostile names")
    assert pushed.returncode == 0, pushed.stderr
    for node in made.nodes:
        there = made.layout.home(node) / "hostile names"
        assert {name: (there / name).read_bytes() for name in os.listdir(there)} == {
            name: b"%d" % number for number, name in enumerate(names)
        }
    pulled = shell("pull", "~/hostile names", "back")
    assert pulled.returncode == 0, pulled.stderr
    for node in made.nodes:
        here = shell.folder / "back" / node.name / "hostile names"
        assert sorted(map(os.fsencode, os.listdir(here))) == sorted(map(os.fsencode, names))
    never_executed(canary, cluster_file)


def test_a_path_on_the_node_is_never_a_command(shell: Shell, canary: Path, cluster_file: Path) -> None:
    source = shell.folder / "source"
    source.mkdir()
    (source / "file").write_text("whole")
    made = load_sandbox(cluster_file.parent)
    for name in hostile.names(str(canary))[::70]:
        path = f"~/paths/{name[:120]}/ {name[:120]}"
        pushed = shell("push", "-n", "node1", str(source), path)
        assert pushed.returncode == 0, pushed.stderr
        kept = made.layout.home(made.nodes[0]) / path.removeprefix("~/") / "file"
        assert kept.read_text() == "whole"
    never_executed(canary, cluster_file)


def test_names_of_nodes_are_refused_in_words_or_only_ever_names(canary: Path, tmp_path: Path) -> None:
    taken = 0
    for text in hostile.texts(str(canary)):
        for known in ((), ("node1", "node2")):
            try:
                names = nodeset.expand(text, {}, known)
            except ClusterctlError as refusal:
                assert refusal.message.strip()
                continue
            assert all(not nodeset.name_fault(name) for name in names)
        document = json.dumps({"nodes": {text: {"host": "local"}}})
        try:
            cluster = inventory_cluster.parse(document, tmp_path / "cluster.yaml")
        except ClusterctlError as refusal:
            assert refusal.message.strip() or refusal.hint
            continue
        taken += 1
        assert all(re.fullmatch(r"[A-Za-z0-9_.:%+@-]+", name) and name[0] != "-" for name in cluster.names)
    assert taken < 100
    assert not canary.exists()


def test_hosts_users_and_gateways_that_are_options_or_commands_are_refused(
    shell: Shell, canary: Path, cluster_file: Path
) -> None:
    value = yaml.safe_load(cluster_file.read_text().replace("./", f"{cluster_file.parent}/"))
    mine = shell.folder / "cluster.yaml"
    for key, text in (
        ("host", f"-oProxyCommand=touch {canary}"), ("host", f"$(touch {canary})"), ("user", f"`touch {canary}`"),
        ("user", f"-oProxyCommand=touch {canary}"), ("gateway", f"-oProxyCommand=touch {canary}"),
        ("gateway", f"a;touch {canary};@127.0.0.1:1"), ("python", f"true; touch {canary};"),
        ("workdir", f"~/$(touch {canary})"), ("key", f"$(touch {canary})"),
    ):  # fmt: skip
        changed = json.loads(json.dumps(value))
        changed["nodes"]["node1"][key] = text
        mine.write_text(json.dumps(changed))
        for command in (
            ("exec", "node1", "--timeout", "5", "--", "true"),
            ("push", "-n", "node1", str(mine)),
        ):
            verb, *words = command
            done = shell(verb, "-c", str(mine), *words)
            assert not canary.exists(), (key, text, verb)
            assert "Traceback" not in done.stderr and done.returncode != 70, (key, text, verb, done.stderr)


def listeners(folder: Path, known: set[str]) -> dict[tuple[str, int], str]:
    """Return the addresses on which a sandbox's processes listen, without the sockets in `known` (by inode)."""
    found: dict[str, tuple[str, int]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] not in known:
                address, port = fields[1].rsplit(":", 1)
                octets = bytes.fromhex(address)[::-1]
                found[fields[9]] = (
                    ".".join(map(str, octets)) if len(octets) == 4 else address,
                    int(port, 16),
                )
    known.update(found)
    mine: dict[tuple[str, int], str] = {}
    for entry in Path("/proc").iterdir() if found else ():
        try:
            if not entry.name.isdigit() or os.fsencode(folder) not in (entry / "environ").read_bytes():
                continue
            links = {os.readlink(one) for one in (entry / "fd").iterdir()}
            told = (entry / "cmdline").read_bytes().replace(bytes(1), b" ").decode(errors="replace")[:60]
        except OSError:
            continue
        mine.update({at: told for inode, at in found.items() if f"socket:[{inode}]" in links})
    return mine


def own_certificate(folder: Path) -> Path:
    """A certificate that anybody can make."""
    path = folder / "mine.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
            "2", "-subj", "/CN=clusterctl transfer", "-keyout", str(path), "-out", f"{path}.crt"]  # fmt: skip
    subprocess.run(made, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


def given_to_a_stranger(at: tuple[str, int], certificate: Path | None, tls: bool) -> bytes:
    """What a listener gives to somebody who asks for the first pieces and was not handed the transfer's key."""
    given = b""
    try:
        with socket.create_connection(at, 2) as plain:
            plain.settimeout(2)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if certificate:
                context.load_cert_chain(certificate)
            with context.wrap_socket(plain) if tls else plain as stream:
                stream.sendall(b"\x00\x00\x00\x07[[0,1]]" * 4)
                while piece := stream.recv(1000):
                    given += piece
    except OSError:
        # Also what TLS raises.
        pass
    return given


@pytest.mark.parametrize("relay", ["on", "plain", "off"])
def test_a_push_opens_the_relays_listeners_and_no_others_and_they_serve_no_stranger(
    shell: Shell, cluster_file: Path, relay: str
) -> None:
    made = load_sandbox(cluster_file.parent)
    source = shell.folder / "source"
    source.mkdir()
    with (source / "data").open("wb") as file:
        for _ in range(100):
            file.write(os.urandom(1 << 20))
    certificate = own_certificate(shell.folder)
    known: set[str] = set()
    listeners(made.directory, known)
    seen: dict[tuple[str, int], str] = {}
    given: list[bytes] = []
    argv = [sys.executable, "-m", "clusterctl", "push", str(source), f"~/relayed-{relay}", "--relay", relay]
    process = subprocess.Popen(argv, cwd=shell.folder, env=shell.env, stderr=subprocess.PIPE, text=True,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    while process.poll() is None:
        fresh = listeners(made.directory, known)
        for at in fresh:
            given += [
                given_to_a_stranger(at, *how) for how in ((None, False), (None, True), (certificate, True))
            ]
        seen.update(fresh)
        time.sleep(0.005)
    assert process.returncode == 0, process.stderr and process.stderr.read()
    if process.stderr:
        process.stderr.close()
    for node in made.nodes:
        there = made.layout.home(node) / f"relayed-{relay}" / "data"
        assert there.stat().st_size == 100 << 20
        there.unlink()
    addresses = {node.address for node in made.nodes}
    assert {address for address, _ in seen} <= (addresses if relay != "off" else set()), seen
    # The nonce that the proof must sign.
    most = 32 if relay == "plain" else 0
    assert bool(seen) == (relay != "off") and max(map(len, given), default=0) <= most, given


WHAT_NO_TERMINAL_MAY_SEE = """
import sys
out = sys.stdout.buffer
out.write(b"\\x1b[2J\\x1b]0;owned\\x07\\x9b31m\\xe2\\x80\\xaefake\\rnode2: forged\\x08\\x00\\n")
out.write("\\u202enode2: turned\\u2066 \\u200b\\ufeff\\x85\\u2028node2: broken\\n".encode())
out.write(b"\\xff\\xfe\\x80 no text\\n")
sys.stderr.buffer.write(b"\\x1bc\\x1b[31mnode2: error\\n")
"""


@pytest.mark.parametrize("how", [(), ("-b",), ("--diff",), ("--json",), ("--json-lines",)])
def test_what_a_command_prints_can_neither_drive_a_terminal_nor_forge_a_line(
    shell: Shell, how: tuple[str, ...]
) -> None:
    words = ["exec", *how, "node1", "--", *PYTHON, WHAT_NO_TERMINAL_MAY_SEE]
    for line in at_terminal(shell, words).replace("\r\n", "\n").split("\n"):
        assert escape_controls(line) == line, ascii(line)
        assert not line.startswith("node2: ")


def at_terminal(shell: Shell, words: list[str]) -> str:
    """Return what a command prints at a terminal."""
    ours, theirs = os.openpty()
    argv = [sys.executable, "-m", "clusterctl", *words]
    process = subprocess.Popen(argv, cwd=shell.folder, env=shell.env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    # Linux reports the closed other end as an error.
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 4096):
            said += piece
    os.close(ours)
    assert process.wait(60) == 0, said
    return said.decode()


HELD = """
import resource, subprocess, sys
ran = subprocess.run(sys.argv[2:], stdout=open(sys.argv[1], "wb"), timeout=100)
print(ran.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
"""


def test_a_line_without_end_and_much_output_do_not_fill_the_memory(shell: Shell) -> None:
    """200 MB as one line, and as lines; a launcher that kept them would hold as much."""
    one_line = "import sys\nfor _ in range(200): sys.stdout.write('x' * (1 << 20))"
    lines = "import sys\nfor _ in range(200): sys.stdout.write(('x' * 63 + '\\\\n') * (1 << 14))"
    for code in (one_line, lines):
        out = shell.folder / "out"
        argv = [sys.executable, "-m", "clusterctl", "exec", "node1", "--", *PYTHON, code]
        ran = subprocess.run(
            [sys.executable, "-c", HELD, str(out), *argv], cwd=shell.folder, env=shell.env, capture_output=True,
            text=True, timeout=110,
        )  # fmt: skip
        returned, held = map(int, ran.stdout.split())
        assert returned == 0, ran.stderr
        assert out.stat().st_size > 200 << 20
        assert held < 150, f"{held} MB"
        out.unlink()
