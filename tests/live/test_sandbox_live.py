"""Sandboxes that are really brought up, logged in to, broken and taken down."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest

from clusterctl.cli import main
from clusterctl.errors import UsageError
from clusterctl.sandbox import (
    cluster,
    namespaces,
    sshd,
)
from clusterctl.sandbox import (
    process as sandbox_process,
)

pytestmark = [
    pytest.mark.live,
    pytest.mark.root,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

WHY_NOT = {
    "loopback": "" if sshd.find_sshd() and not sshd.why_not_root() else "no usable sshd",
    "embedded": "",
    "namespaces": namespaces.why_not(),
}


def needs(mode: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(WHY_NOT[mode]), reason=WHY_NOT[mode])


EVERY = [pytest.param(mode, marks=needs(mode)) for mode in WHY_NOT]
# Seconds, on a busy two-core machine; 0.15 to 0.3 on an idle one.
TWO_NODES_SOON = 5.0


@contextlib.contextmanager
def up(folder: Path, mode: str, nodes: int = 2) -> Iterator[cluster.Sandbox]:
    made = cluster.up(folder / "box", nodes=nodes, mode=mode)
    try:
        yield made
    finally:
        made.down()


@contextlib.contextmanager
def login(made: cluster.Sandbox, name: str = "node1") -> Iterator[paramiko.SSHClient]:
    node = made.node(name)
    with paramiko.SSHClient() as client:
        # And a key that is not in there is refused.
        client.load_host_keys(str(made.layout.known_hosts))
        client.connect(
            node.host,
            node.port,
            username=made.state.user,
            key_filename=str(made.layout.key),
            allow_agent=False,
            look_for_keys=False,
            timeout=10,
        )
        yield client


def run(client: paramiko.SSHClient, command: str, stdin: bytes = b"") -> tuple[int, str, str]:
    channel = client.get_transport().open_session()  # type: ignore[union-attr]
    channel.settimeout(20)
    channel.exec_command(command)
    channel.sendall(stdin)
    channel.shutdown_write()
    out, err = channel.makefile("rb").read(), channel.makefile_stderr("rb").read()
    return channel.recv_exit_status(), out.decode(), err.decode()


def processes_of(folder: Path) -> set[int]:
    """What carries the sandbox's mark, and what names its folder: sshd writes over its environment."""
    named = {pid for pid in sandbox_process.table() if f"{folder}/" in command_line(pid)}
    return named | sandbox_process.marked(f"{cluster.Layout(folder.resolve()).id}/")


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def nothing_is_left(made: cluster.Sandbox) -> None:
    assert not made.directory.exists()
    assert not processes_of(made.directory)
    for node in made.nodes:
        with socket.socket() as probe:
            assert probe.connect_ex((node.host, node.port)) != 0
    assert not (sshd.RUN_SSHD / f"clusterctl-{made.layout.id}").exists()


@pytest.mark.parametrize("mode", EVERY)
def test_nodes_come_up_answer_to_ssh_and_go_without_a_trace(tmp_path: Path, mode: str) -> None:
    begin = time.monotonic()
    with up(tmp_path, mode) as made:
        took = time.monotonic() - begin
        assert [one.state for one in made.status()] == ["up", "up"]
        assert took < TWO_NODES_SOON
        for number, node in enumerate(made.nodes, 1):
            with login(made, node.name) as client:
                destination = "pwd; echo $HOME; cd; pwd; hccn_tool -i 1 -ip -g"
                code, out, _ = run(client, destination)
                home = str(made.layout.home(node))
                assert out.splitlines() == [
                    home, home, home, f"ipaddr:192.168.20.{number}", "netmask:255.255.255.0",
                ]  # fmt: skip
                assert code == 0
        with pytest.raises(UsageError, match="is up"):
            cluster.up(made.directory, mode=mode)
        assert cluster.load(made.directory).status() == made.status()
    nothing_is_left(made)
    # Twice is fine.
    assert made.down() == 0


@pytest.mark.parametrize("mode", EVERY)
def test_streams_exit_codes_and_bytes_pass_unchanged(tmp_path: Path, mode: str) -> None:
    blob = random.Random(1).randbytes(3 << 20)
    with up(tmp_path, mode, nodes=1) as made, login(made) as client:
        assert run(client, "echo out; echo err >&2; exit 7") == (7, "out\n", "err\n")
        code, out, _ = run(client, "sha256sum", blob)
        assert code == 0
        assert out.split()[0] == hashlib.sha256(blob).hexdigest()
        command = "cat; head -c 4000000 /dev/zero | tr '\\0' x"
        assert run(client, command, b"begin") == (0, "begin" + "x" * 4000000, "")
        # No exit code: a signal.
        assert run(client, "kill -9 $$")[0] == -1


@pytest.mark.parametrize("mode", EVERY)
def test_only_the_one_key_gets_in_and_the_host_key_is_the_recorded_one(tmp_path: Path, mode: str) -> None:
    with up(tmp_path, mode, nodes=1) as made:
        node = made.nodes[0]
        link = socket.create_connection((node.host, node.port), 10)
        with paramiko.Transport(link) as transport:
            transport.start_client(timeout=10)
            shown = transport.get_remote_server_key().get_base64()
            recorded = f"[{node.host}]:{node.port} ssh-ed25519 {shown}\n"
            assert made.layout.known_hosts.read_text() == recorded
            stranger = paramiko.ECDSAKey.generate()
            with pytest.raises(paramiko.AuthenticationException, match="Authentication failed"):
                transport.auth_publickey(made.state.user, stranger)
            with pytest.raises(paramiko.AuthenticationException, match="allowed types"):
                transport.auth_password(made.state.user, "")


@needs("embedded")
def test_the_embedded_server_runs_commands_and_nothing_else(tmp_path: Path) -> None:
    with up(tmp_path, "embedded", nodes=1) as made, login(made) as client:
        transport = client.get_transport()
        assert transport is not None
        for kind in ("invoke_shell", "get_pty"):
            with pytest.raises(paramiko.SSHException, match="Channel closed"):
                getattr(transport.open_session(), kind)()
        with pytest.raises(paramiko.SSHException, match="Channel closed"):
            transport.open_session().invoke_subsystem("sftp")
        with pytest.raises(paramiko.ChannelException, match="Administratively prohibited"):
            transport.open_channel("direct-tcpip", ("127.0.0.1", 22), ("127.0.0.1", 0))


@needs("embedded")
def test_a_command_whose_connection_is_gone_sees_its_input_end(tmp_path: Path) -> None:
    told = tmp_path / "told"
    with up(tmp_path, "embedded", nodes=1) as made:
        with login(made) as client:
            channel = client.get_transport().open_session()  # type: ignore[union-attr]
            channel.exec_command(f"echo ready; cat > /dev/null; echo bye > '{told}'")
            assert channel.recv(6) == b"ready\n"
        deadline = time.monotonic() + 10
        while not told.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@needs("embedded")
def test_an_orphan_on_an_embedded_node_does_not_stay_a_zombie(tmp_path: Path) -> None:
    with up(tmp_path, "embedded", nodes=1) as made, login(made) as client:
        _, out, _ = run(client, "(setsid sh -c 'echo $$' &) | cat")
        deadline = time.monotonic() + 10
        while Path(f"/proc/{int(out)}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("mode", EVERY)
def test_killing_a_node_ends_all_of_it_and_nothing_of_the_others(tmp_path: Path, mode: str) -> None:
    with up(tmp_path, mode) as made:
        # Detached, no marker left.
        hidden = "(setsid env -i /bin/sleep 61 > /dev/null 2>&1 &) ; sleep 62"
        others = set()
        with login(made, "node1") as one, login(made, "node2") as two:
            for client in (one, two):
                client.get_transport().open_session().exec_command(hidden)  # type: ignore[union-attr]
            deadline = time.monotonic() + 10
            while len(found := sleepers(made)) < 4:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            record = sandbox_process.read_record(made.layout.record("node2"))
            assert record
            others = set(sandbox_process.below({record.pid}))
            assert made.kill("node1") >= 3
            left = sleepers(made)
            assert left < found and left <= others and len(left) == 2
            assert [status.state for status in made.status()] == ["down", "up"]
            assert run(two, "echo alive")[1] == "alive\n"
        assert made.kill("node1") == 0
    nothing_is_left(made)


def sleepers(made: cluster.Sandbox) -> set[int]:
    records = sandbox_process.read_records(made.layout.processes)
    below = sandbox_process.below({record.pid for record in records if record.alive})
    return below.keys() & sandbox_process.named("sleep")


@needs("namespaces")
def test_a_node_of_namespaces_is_a_machine_of_its_own(tmp_path: Path) -> None:
    def machine() -> str:
        return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout

    before = machine()
    with up(tmp_path, "namespaces") as made, login(made) as client:
        # Nothing was changed in the machine's own network.
        assert machine() == before
        assert run(client, "hostname; cat /etc/hostname")[1] == "node1\nnode1\n"
        code, out, _ = run(client, "/usr/local/Ascend/driver/tools/hccn_tool -i 0 -ip -g; cat /etc/hccn.conf")
        assert code == 0 and out.startswith("ipaddr:192.168.10.1\n") and "address_1=192.168.20.1\n" in out
        assert not Path("/usr/local/Ascend").exists() and not Path("/etc/hccn.conf").exists()
        assert "127.0.1.1" not in run(client, "cat /etc/hosts")[1]
        address = made.nodes[0].address
        python = f"{sys.executable} -c 'import socket; print(socket.gethostbyname(socket.gethostname()))'"
        assert run(client, python)[1] == f"{address}\n"
        assert run(client, "echo 1 > /tmp/mine; ls /dev/shm; cat /proc/1/comm")[1] == "sshd\n"
        assert not Path("/tmp/mine").exists()
        assert "inet " + address in run(client, "ip -4 address show eth0")[1]
        reach = 'import socket; socket.create_connection(("node2", 22), 5)'
        assert run(client, f"{sys.executable} -c '{reach}'")[0] == 0
    assert machine() == before


@needs("namespaces")
def test_a_cut_link_is_silent_and_a_healed_one_goes_on_where_it_was(tmp_path: Path) -> None:
    with up(tmp_path, "namespaces") as made, login(made) as client:
        channel = client.get_transport().open_session()  # type: ignore[union-attr]
        channel.settimeout(0.5)
        channel.exec_command("while echo x; do sleep 0.02; done")
        assert channel.recv(1)
        made.cut("node1")
        assert [status.state for status in made.status()] == ["cut", "up"]
        with pytest.raises(socket.timeout):
            # What was under way when the link went.
            while channel.recv(4096):
                pass
        assert client.get_transport().is_active()  # type: ignore[union-attr]
        made.heal("node1")
        channel.settimeout(10)
        assert channel.recv(1)
        assert [status.state for status in made.status()] == ["up", "up"]


@needs("namespaces")
def test_a_killed_node_of_namespaces_says_no_good_bye(tmp_path: Path) -> None:
    with up(tmp_path, "namespaces", nodes=1) as made, login(made) as client:
        channel = client.get_transport().open_session()  # type: ignore[union-attr]
        channel.exec_command("sleep 60")
        made.kill("node1")
        channel.settimeout(1.0)
        with pytest.raises(socket.timeout):
            channel.recv(1)
        assert client.get_transport().is_active()  # type: ignore[union-attr]
        with pytest.raises(UsageError, match="node1 is down"):
            made.heal("node1")


@pytest.mark.parametrize("mode", ["loopback", "embedded"])
def test_cut_without_links_of_its_own_says_what_gives_them(tmp_path: Path, mode: str) -> None:
    if WHY_NOT[mode]:
        pytest.skip(WHY_NOT[mode])
    with up(tmp_path, mode, nodes=1) as made:
        for verb in (made.cut, made.heal):
            with pytest.raises(UsageError) as caught:
                verb("node1")
            assert "--mode namespaces" in caught.value.hint


@needs("loopback")
def test_sandboxes_side_by_side_leave_each_other_alone(tmp_path: Path) -> None:
    first = cluster.up(tmp_path / "one", nodes=1, mode="loopback")
    try:
        second = cluster.up(tmp_path / "two", nodes=1, mode="loopback")
        second.down()
        with login(first) as client:
            assert run(client, "echo still here")[1] == "still here\n"
    finally:
        first.down()
    nothing_is_left(first)


@needs("loopback")
def test_a_port_lost_to_another_is_chosen_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[socket.socket] = []
    real = sshd.start

    def snatch_first(layout: object, state: object, node: cluster.SandboxNode) -> None:
        if not kept:
            kept.append(socket.create_server((node.host, node.port)))
        real(layout, state, node)  # type: ignore[arg-type]

    monkeypatch.setattr(sshd, "start", snatch_first)
    with up(tmp_path, "loopback", nodes=1) as made:
        assert made.nodes[0].port != kept[0].getsockname()[1]
        assert [status.state for status in made.status()] == ["up"]
    kept[0].close()


@needs("loopback")
def test_the_command_line_brings_up_shows_breaks_and_takes_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[str, int]] = []

    def clusterctl(*words: str) -> str:
        with keeping_signals():
            seen.append((" ".join(words), main.run(list(words))))
        out, err = capfd.readouterr()
        return out + err

    assert json.loads(clusterctl("sandbox", "up", "--dry-run"))["mode"] == "loopback"
    assert not list(tmp_path.iterdir())
    shown = clusterctl("sandbox", "up", "--mode", "loopback")
    assert "127." in shown and "node2" in shown
    following = [line.strip().split()[1:] for line in shown.splitlines() if line.startswith("  clusterctl")]
    assert len(following) == 4
    for words in following[:-1]:
        clusterctl(*words)
    assert json.loads(clusterctl("sandbox", "status", "--json"))["nodes"][1]["state"] == "up"
    clusterctl("sandbox", "kill", "node2")
    assert [code for _, code in seen] == [0] * len(seen), seen
    assert json.loads(clusterctl("sandbox", "status", "--json"))["nodes"][1]["state"] == "down"
    assert "--mode namespaces" in clusterctl("sandbox", "cut", "node1")
    assert "did you mean 'node2'" in clusterctl("sandbox", "kill", "nod2")
    assert [code for _, code in seen[-3:]] == [1, 2, 2]
    # node1's daemon, and perhaps a session of it that has not ended yet.
    assert re.search(r"ended [12] process(es)?;", clusterctl(*following[-1]))
    assert "nothing to do" in clusterctl("sandbox", "down")
    assert not (tmp_path / ".clusterctl-sandbox").exists()


@contextlib.contextmanager
def keeping_signals() -> Iterator[None]:
    """The front door sets handlers for good; the test runner wants its own back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PROGRAM = """
import sys, pathlib
from clusterctl.sandbox import cluster
print("begin", flush=True)
cluster.up(pathlib.Path(sys.argv[1]), mode=sys.argv[2])
"""


def interrupted_up(folder: Path, mode: str, number: int, delay: float) -> int:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    ) as process:
        assert process.stdout
        process.stdout.readline()
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            # As a terminal does: the whole foreground group.
            os.killpg(process.pid, number)
        return process.wait(timeout=60)


@pytest.mark.parametrize("mode", EVERY)
def test_up_interrupted_at_any_moment_leaves_nothing(tmp_path: Path, mode: str) -> None:
    chance = random.Random(mode)

    def once(number: int) -> bool:
        folder = tmp_path / str(number)
        begin = time.monotonic()
        number = signal.SIGTERM if number % 3 == 2 else signal.SIGINT
        interrupted_up(folder, mode, number, chance.random() * span)
        whole = is_whole(folder)
        # It was done before the signal came: then it is up, and `down` ends it.
        if whole:
            cluster.down(folder)
        assert not folder.exists()
        assert not processes_of(folder)
        assert time.monotonic() - begin < 30
        return not whole

    begin = time.monotonic()
    cluster.up(tmp_path / "measured", mode=mode).down()
    span = 1.2 * (time.monotonic() - begin)
    with ThreadPoolExecutor(max_workers=2) as pool:
        interrupted = list(pool.map(once, range(20 if mode == "loopback" else 6)))
    assert any(interrupted)


def is_whole(folder: Path) -> bool:
    try:
        cluster.load(folder)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("mode", EVERY)
def test_down_clears_what_a_killed_up_left_at_any_moment(tmp_path: Path, mode: str) -> None:
    chance = random.Random(mode)

    def once(number: int) -> None:
        folder = tmp_path / str(number)
        interrupted_up(folder, mode, signal.SIGKILL, chance.uniform(0.0, 0.3))
        # A process that was just being started records itself, or finds no folder and ends.
        time.sleep(0.2)
        cluster.down(folder)
        assert not processes_of(folder)
        assert not folder.exists() or not list(folder.iterdir())

    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(once, range(6)))
