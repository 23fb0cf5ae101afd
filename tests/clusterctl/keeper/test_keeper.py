"""The keeper: the same words warm and cold, one user's own, gone when idle, stopped or killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl import errors
from clusterctl.agent.frames import encode
from clusterctl.inventory.cluster import Node, Setup
from clusterctl.keeper import address
from clusterctl.keeper.client import error_from_json
from clusterctl.keeper.clients import _Outgoing, error_to_json
from clusterctl.keeper.messages import LinkRequest, WayOptions
from clusterctl.transport.link import RequestFailed
from clusterctl.wire import typed_json
from clusterctl.wire.typed_json import decode
from tests.support.keeping import Keeping, is_alive, until

pytestmark = pytest.mark.root

INVENTORY = """
nodes:
  node1: {host: local, port: 1, python: PYTHON, workdir: WORK/1}
  node2: {host: local, port: 2, python: PYTHON, workdir: WORK/2}
  node3: {host: local, port: 3, python: PYTHON, workdir: WORK/3}
"""


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Keeping]:
    """Three nodes that are this machine, and a keeper for them once it is used."""
    text = INVENTORY.replace("WORK", str(tmp_path / "work")).replace("PYTHON", sys.executable)
    (tmp_path / "cluster.yaml").write_text(text)
    keeping = Keeping.at(tmp_path, tmp_path / "cluster.yaml")
    yield keeping
    keeping.stop()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "clusterctl").mkdir(mode=0o700)
    return tmp_path / "clusterctl"


# ---- whose it is


def test_the_folder_must_be_the_users_own_and_no_link(place: Path, tmp_path: Path) -> None:
    os.close(address.opened(str(place)))
    for mode in (0o755, 0o770, 0o701, 0o1777):
        place.chmod(mode)
        with pytest.raises(address.WrongPlace, match="0700"):
            address.opened(str(place))
    place.chmod(0o700)
    (tmp_path / "link").symlink_to(place)
    with pytest.raises(address.WrongPlace, match="link: Not a directory; it must be a folder"):
        address.opened(str(tmp_path / "link"))
    (tmp_path / "file").write_text("")
    with pytest.raises(address.WrongPlace, match="file: Not a directory; it must be a folder"):
        address.opened(str(tmp_path / "file"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(place: Path) -> None:
    os.chown(place, 12345, 12345)
    with pytest.raises(address.WrongPlace, match="owner 12345"):
        address.opened(str(place))


def test_a_wrong_folder_stops_the_command_before_anything_runs(kept: Keeping) -> None:
    kept.place.mkdir(mode=0o755)
    kept.place.chmod(0o755)
    done = kept("exec", "all", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (2, "")
    assert "mode 0755" in done.stderr and "--persist off" in done.stderr
    assert kept("exec", "all", "--persist", "off", "--", "echo", "ran").stdout.count("ran") == 3
    assert not list(kept.place.iterdir())
    kept.place.chmod(0o700)


def test_the_socket_is_for_the_user_alone(kept: Keeping) -> None:
    kept("exec", "node1", "--", "true")
    files = [path for path in kept.place.iterdir() if path.is_socket()]
    assert len(files) == 1
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in [*files, *kept.place.glob("*.log")])


def test_a_keeper_is_named_by_what_its_answers_depend_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = address.name()
    assert address.name() == first
    for variable in ("HOME", "XDG_CONFIG_HOME", "PYTHONPATH"):
        with monkeypatch.context() as change:
            change.setenv(variable, str(tmp_path))
            assert address.name() != first, variable
    code = tmp_path / "code"
    (code / "agent").mkdir(parents=True)
    (code / "agent" / "a.py").write_text("1")
    monkeypatch.setattr(address, "PACKAGE", str(code))
    before = address.name()
    (code / "agent" / "a.py").write_text("12")
    assert before not in (first, address.name())


# ---- the same, warm and cold


def test_warm_and_cold_commands_say_the_same(kept: Keeping) -> None:
    commands = [
        ["exec", "all", "-b", "--", "/bin/sh", "-c", "echo out; echo err >&2; exit 7"],
        ["exec", "node1", "--", "echo", "a b", "$HOME", "'", "ä"],
        ["exec", "node9", "--", "true"],
        ["exec", "all", "--no-such-option", "--", "true"],
        ["exec", "--help"],
        ["exec", "node1", "--timeout", "0.2", "--", "sleep", "30"],
    ]
    kept("exec", "all", "--", "true")
    for words in commands:
        warm, cold = kept(*words), kept(*words, CLUSTERCTL_PERSIST="off", XDG_RUNTIME_DIR="/nowhere")
        assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)
    # Whose first words are the shell's own where one is asked.
    missing = [
        "exec",
        "node1",
        "--",
        "/no/such/program",
    ]
    both = kept(*missing), kept(*missing, "--persist", "off")
    assert [(one.returncode, one.stdout, one.stderr.splitlines()[-1]) for one in both] == [
        (127, "", "node1: exit 127")
    ] * 2
    assert [len(one["links"]) for one in kept.status()] == [3]


def test_a_command_sees_its_own_folder_environment_and_input(kept: Keeping, tmp_path: Path) -> None:
    kept("exec", "node1", "--", "true")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "two.yaml").write_text(
        f"nodes: {{other: {{host: local, python: {sys.executable}}}}}\n"
    )

    words = [sys.executable, "-m", "clusterctl", "exec", "all", "-c", "two.yaml", "--stdin", "--", "cat"]
    done = subprocess.run(
        words, cwd=tmp_path / "elsewhere", env=kept.env, input="given\n", capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "other: given\n"), done.stderr
    assert len(kept.status()) == 1


def test_a_node_with_a_setup_and_a_container_is_reached(kept: Keeping, tmp_path: Path) -> None:
    inventory = tmp_path / "cluster.yaml"
    options = '{setup: {run: ["true"]}, container: {image: i}, '
    inventory.write_text(inventory.read_text().replace("node1: {", f"node1: {options}"))
    done = kept("exec", "node1", "--", "echo", "on")
    assert (done.returncode, done.stdout) == (0, "node1: on\n"), done.stderr


def test_another_inventory_gets_no_link_of_this_one(kept: Keeping, tmp_path: Path) -> None:
    kept("exec", "node1", "--", "true")
    (tmp_path / "two.yaml").write_text((tmp_path / "cluster.yaml").read_text())
    agent = "echo $PPID"
    asked = [
        kept("exec", "node1", "-c", name, "--shell", "--", agent).stdout
        for name in ("cluster.yaml", "two.yaml", "cluster.yaml")
    ]
    assert asked[0] == asked[2] != asked[1]
    (tmp_path / "cluster.yaml").write_text(
        (tmp_path / "cluster.yaml").read_text().replace("local,", "local, env: {A: b},")
    )
    assert kept("exec", "node1", "--shell", "--", agent).stdout not in asked


def test_an_interrupt_reaches_the_command_and_what_it_runs(kept: Keeping, tmp_path: Path) -> None:
    kept("exec", "node1", "--", "true")
    note = tmp_path / "pid"
    process = kept.start("exec", "node1", "--shell", "--", f"echo $$ > {note}; sleep 600")
    pid = int(until(lambda: note.exists() and note.read_text().strip(), "the command started"))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    until(lambda: not is_alive(pid), "the command on the node ends")
    assert kept("exec", "node1", "--", "echo", "on").stdout == "node1: on\n"


def test_killing_the_asking_process_ends_what_it_ran_and_keeps_the_link(
    kept: Keeping, tmp_path: Path
) -> None:
    first = kept("exec", "node1", "--shell", "--", "echo $PPID").stdout
    note = tmp_path / "pid"
    process = kept.start("exec", "node1", "--shell", "--", f"echo $$ > {note}; sleep 600")
    pid = int(until(lambda: note.exists() and note.read_text().strip(), "the command started"))
    process.kill()
    process.communicate()
    until(lambda: not is_alive(pid), "the command on the node ends")
    assert kept("exec", "node1", "--shell", "--", "echo $PPID").stdout == first


def test_push_and_pull_use_the_kept_links(kept: Keeping, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("first")
    kept("exec", "all", "--", "true")
    done = [kept("push", "tree", f"{tmp_path}/there", "--nodes", "node2", "--json") for _ in range(2)]
    assert [(one.returncode, json.loads(one.stdout)[0]["unchanged"]) for one in done] == [
        (0, False),
        (0, True),
    ]
    assert (tmp_path / "there" / "file").read_text() == "first"
    (tree / "file").write_text("second")
    assert kept("push", "tree", f"{tmp_path}/there", "--nodes", "node2").returncode == 0
    back = kept("pull", f"{tmp_path}/there", "back", "--nodes", "node2")
    assert (back.returncode, (tmp_path / "back/node2/there/file").read_text()) == (0, "second"), back.stderr
    missing = kept("push", "nothing", "--nodes", "node2")
    assert (missing.returncode, missing.stdout) == (2, "") and "no such file" in missing.stderr
    assert [len(one["links"]) for one in kept.status()] == [3]


# ---- its life


def test_two_commands_at_once_start_one_keeper(kept: Keeping) -> None:
    both = [kept.start("exec", "all", "--", "echo", str(n)) for n in range(3)]
    ends = [(process.communicate(timeout=60), process.returncode) for process in both]
    assert all(code == 0 and out.count("\n") == 3 for (out, _), code in ends), ends
    assert [len(one["links"]) for one in kept.status()] == [3]


def test_it_ends_when_nobody_used_it_for_long_enough(kept: Keeping) -> None:
    kept("exec", "all", "--persist", "1s", "--", "true")
    until(lambda: not kept.status(), "the keeper ends")
    until(lambda: not [one for one in kept.place.iterdir() if one.is_socket()], "its sockets are removed")
    assert kept("exec", "node1", "--", "echo", "on").stdout == "node1: on\n"


def test_stop_ends_it_and_its_agents(kept: Keeping) -> None:
    agent = int(kept("exec", "node1", "--shell", "--", "echo $PPID").stdout.split()[1])
    done = kept("keeper", "stop")
    assert (done.returncode, done.stderr) == (0, "1 stopped\n")
    assert kept("keeper", "stop").stderr == "no keeper is running\n"
    until(lambda: not is_alive(agent), "the agent ends")
    until(lambda: not list(kept.place.iterdir()), "nothing of it stays")


def test_a_killed_keeper_leaves_no_agent_and_is_replaced(kept: Keeping) -> None:
    agent = int(kept("exec", "node1", "--shell", "--", "echo $PPID").stdout.split()[1])
    os.kill(kept.status()[0]["pid"], signal.SIGKILL)
    until(lambda: not is_alive(agent), "the agent ends")
    assert kept("exec", "node1", "--", "echo", "on").stdout == "node1: on\n"
    assert len(kept.status()) == 1


def test_a_command_whose_keeper_is_killed_says_so(kept: Keeping, tmp_path: Path) -> None:
    kept("exec", "node1", "--", "true")
    note = tmp_path / "pid"
    process = kept.start("exec", "node1", "--shell", "--", f"echo $$ > {note}; sleep 600")
    pid = int(until(lambda: note.exists() and note.read_text().strip(), "the command started"))
    os.kill(kept.status()[0]["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 255 and "keeper" in err
    until(lambda: not is_alive(pid), "the command on the node ends")


# ---- values on the way


@pytest.mark.parametrize(
    "error",
    [
        errors.Unreachable("node1", "no answer", "look"),
        errors.HostKeyChanged("node1", "another key", "beware"),
        errors.LinkLost("node1", "cut"),
        errors.UsageError("wrong file", "mend it"),
        RequestFailed("node1", "usage", "no such folder", "hint"),
    ],
)
def test_an_error_is_the_same_on_the_other_side(error: errors.ClusterctlError) -> None:
    there = error_from_json(error_to_json(error))
    assert (type(there), there.message, there.hint, there.exit_code, vars(there)) == (
        type(error), error.message, error.hint, error.exit_code, vars(error),
    )  # fmt: skip


def test_a_node_is_the_same_on_the_other_side() -> None:
    import json

    node = Node(
        "n", "h", "a", devices=(0, 1), device_ips=("1.1.1.1",), env={"A": "b"}, setup=Setup(run=("true",))
    )
    request = LinkRequest("key", node, None, "", WayOptions(ssh="openssh"))
    assert decode(LinkRequest, json.loads(json.dumps(typed_json.encode(request)))) == request


def test_a_command_that_reads_slowly_holds_up_nobody_and_loses_nothing() -> None:
    ours, theirs = socket.socketpair()
    out = _Outgoing(ours)
    pieces = [bytes([n % 256]) * 65536 for n in range(64)]
    done = threading.Event()

    def put_all() -> None:
        for piece in pieces:
            out.put(piece)
        done.set()

    threading.Thread(target=put_all, daemon=True).start()
    # Though nobody read a byte of the four megabytes.
    assert done.wait(60)
    got = bytearray()
    while len(got) < sum(map(len, pieces)):
        got += theirs.recv(1 << 20)
    assert got == b"".join(pieces)
    theirs.close()
    # Nobody is there any more: no error, nothing kept.
    out.put(encode.__name__.encode())
    out.close()
