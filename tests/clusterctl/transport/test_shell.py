from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from clusterctl.agent.child import MARKER
from clusterctl.agent.processes import group_members, marked
from clusterctl.errors import LinkLost, Unreachable
from clusterctl.inventory.cluster import Node
from clusterctl.transport.connection import Completed, Connection
from clusterctl.transport.link import RequestFailed
from clusterctl.transport.local import ChildStream, LocalTransport
from clusterctl.transport.shell import (
    LINE,
    MARK,
    ShellSession,
    carries,
    script,
)
from tests.support.nodes import local_node, wait_for
from tests.support.scripted import ScriptedTransport

# Each as the /bin/sh of a node.
SHELLS = ["sh", "dash", "bash", "busybox"]
# Each as what sshd gives LINE to.
LOGIN_SHELLS = ["bash", "dash", "tcsh", "fish", "zsh"]
ODD = [
    "two words",
    "'single' \"double\"",
    "$(touch owned) `touch owned` $HOME ${HOME}",
    "line\nbreak\r\n\ttab",
    "-n",
    "--",
    "*?[a-z]{a,b}~!#&;|<>()",
    "\\",
    "",
    "漢字 😀 é",
    bytes(range(1, 256)).decode("utf-8", "surrogateescape"),
    "x" * 100_000,
]
ECHO = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, [*sys.argv[1:], os.environ['ODD']])))"


class ShellTransport:
    """Nodes whose login shell is any program."""

    def __init__(self, argv: list[str], home: Path) -> None:
        self.argv = argv
        self.home = home

    def connect(self, node: Node) -> Connection:
        raise AssertionError("no agent is wanted here")

    def start(self, node: Node, command: str) -> ChildStream:
        env = {"HOME": str(self.home), "PATH": os.environ["PATH"]}
        return ChildStream(node.name, self.argv, env, str(self.home))


def shell(name: str, tmp_path: Path) -> list[str]:
    """A shell under the name `sh`, as it is when it is a system's /bin/sh."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here")
    (tmp_path / "sh").symlink_to(found)
    return [str(tmp_path / "sh")]


@pytest.mark.parametrize("name", SHELLS)
def test_every_shell_hands_on_arguments_and_environment_byte_by_byte(name: str, tmp_path: Path) -> None:
    with ShellSession(ShellTransport(shell(name, tmp_path), tmp_path)) as once:
        for value in ODD:
            done = once.run(
                local_node(tmp_path), [sys.executable, "-c", ECHO, *ODD, value], env={"ODD": value}
            )
            assert done.ok and done.stdout.split(b"\0") == [os.fsencode(one) for one in [*ODD, value, value]]
    assert not list(tmp_path.glob("**/owned"))


@pytest.mark.parametrize("name", LOGIN_SHELLS)
def test_every_login_shell_takes_the_one_line(name: str, tmp_path: Path) -> None:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here")
    with ShellSession(ShellTransport([found, "-c", LINE], tmp_path)) as once:
        done = once.run(local_node(tmp_path), ["printf", "%s|", "it's", "a b", "$HOME"])
    assert done == Completed(0, stdout=b"it's|a b|$HOME|")


@pytest.mark.parametrize("name", SHELLS)
def test_every_shell_tells_exit_codes_from_signals(name: str, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    with ShellSession(ShellTransport(shell(name, tmp_path), tmp_path)) as once:

        def ends(*argv: str) -> tuple[int | None, int | None]:
            done = once.run(local_node(tmp_path), argv)
            return done.exit_code, done.signal

        assert ends("true") == (0, None) and ends("sh", "-c", "exit 143") == (143, None)
        assert ends("sh", "-c", "kill -TERM $$") == (None, 15)
        assert ends("no-such-program") == (127, None) and ends(str(plain)) == (126, None)


@pytest.mark.parametrize("name", SHELLS)
def test_what_hangs_up_ends_the_command_and_all_that_it_started(name: str, tmp_path: Path) -> None:
    stream = ShellTransport(shell(name, tmp_path), tmp_path).start(local_node(tmp_path), LINE)
    marker = uuid.uuid4().hex
    stubborn = (
        "trap '' TERM; setsid sleep 600 & sleep 601 & env -i sleep 602 & echo up; while :; do sleep 1; done"
    )
    stream.send(script(["sh", "-c", stubborn], {}, marker))
    wait_for(lambda: len(marked({MARKER: marker})) >= 3)
    bare = [one for one in group(stream) if one not in marked({MARKER: marker})]
    # The watcher, and what has no environment at all.
    assert bare
    stream.finish()
    wait_for(lambda: not marked({MARKER: marker}) and not group(stream))
    stream.close()


def group(stream: ChildStream) -> set[int]:
    return group_members([stream._process.pid])


def test_a_launcher_that_falls_silent_is_not_waited_for_but_one_that_beats_is(tmp_path: Path) -> None:
    transport = LocalTransport(home=tmp_path)
    marker = uuid.uuid4().hex
    stream = transport.start(local_node(tmp_path), LINE)
    stream.send(script(["sleep", "600"], {}, marker, silence=2))
    wait_for(lambda: bool(marked({MARKER: marker})))
    for _ in range(8):
        time.sleep(0.5)
        stream.send(b"\n")
    assert marked({MARKER: marker})
    wait_for(lambda: not marked({MARKER: marker}))
    stream.close()
    wait_for(lambda: not group(stream))


def test_a_command_that_takes_too_long_is_ended_and_what_it_said_is_kept(tmp_path: Path) -> None:
    with ShellSession(LocalTransport(home=tmp_path)) as once:
        done = once.run(
            local_node(tmp_path),
            ["sh", "-c", "trap 'echo bye; exit 3' TERM; echo hi; sleep 600 & wait"],
            timeout=0.5,
        )
    assert (done.code, done.timed_out, done.stdout) == (124, True, b"hi\nbye\n")


def test_what_a_command_leaves_behind_neither_holds_it_up_nor_is_ended(tmp_path: Path) -> None:
    with ShellSession(LocalTransport(home=tmp_path)) as once:
        done = once.run(local_node(tmp_path), ["sh", "-c", "sleep 600 & echo $!; exit 5"])
        assert done.exit_code == 5
        left = int(done.stdout)
        # A watcher that is wrong would act now.
        time.sleep(0.3)
        os.kill(left, 15)


def test_closing_ends_what_runs_everywhere(tmp_path: Path) -> None:
    once = ShellSession(LocalTransport(home=tmp_path))
    said: list[bytes] = []
    ended: list[Completed] = []

    def work() -> None:
        argv = ["sh", "-c", "echo $$; exec sleep 600"]
        ended.append(once.run(local_node(tmp_path), argv, on_output=lambda name, data: said.append(data)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    wait_for(lambda: bool(said))
    once.close()
    thread.join(60.0)
    assert ended == [Completed(None, 15)] and not Path(f"/proc/{int(said[0])}").exists()
    with pytest.raises(LinkLost, match="interrupted"):
        once.run(local_node(tmp_path), ["true"])


def test_what_login_scripts_print_is_not_the_commands(tmp_path: Path) -> None:
    noisy = ["sh", "-c", "echo welcome; printf motd; echo trouble >&2; exec /bin/sh"]
    with ShellSession(ShellTransport(noisy, tmp_path)) as once:
        done = once.run(local_node(tmp_path), ["sh", "-c", "echo out; echo err >&2"])
    assert done == Completed(0, stdout=b"out\n", stderr=b"err\n")


def test_a_login_that_begins_nothing_is_named_with_its_words(tmp_path: Path) -> None:
    with (
        ShellSession(
            ShellTransport(["sh", "-c", "echo 'This account is not available' >&2; exit 1"], tmp_path)
        ) as once,
        pytest.raises(Unreachable, match="This account is not available"),
    ):
        once.run(local_node(tmp_path), ["true"])


def test_a_folder_to_run_in_is_gone_to_or_missed(tmp_path: Path) -> None:
    (tmp_path / "a 'b").mkdir()
    with ShellSession(LocalTransport(home=tmp_path)) as once:
        for cwd in ("~/a 'b", "a 'b", str(tmp_path / "a 'b")):
            assert once.run(local_node(tmp_path), ["pwd"], cwd=cwd).text == f"{tmp_path}/a 'b\n"
        with pytest.raises(RequestFailed, match="no folder /no/such to run in"):
            once.run(local_node(tmp_path), ["pwd"], cwd="/no/such")


def test_what_a_shell_would_not_hand_on_is_left_to_the_agent() -> None:
    assert carries(["a"], {"NAME_1": "x"})
    assert not carries(["-a"], {}) and not carries([""], {})
    assert not any(carries(["a"], {name: "1"}) for name in ("UID", "SHLVL", "a.b", "1A", "", "a\n"))


def test_nothing_of_a_users_is_on_the_command_line() -> None:
    answer = Completed(0, stdout=b"", stderr=b"")
    transport = ScriptedTransport({("*", LINE): answer})
    with ShellSession(transport) as once, pytest.raises(Unreachable, match="did not start the command"):
        once.run(Node(name="node1", host="x", address="x"), ["echo", "secret"], env={"KEY": "secret"})
    (_, line, sent), *_ = transport.asked
    assert "secret" not in line and b"secret" in sent["stdin"] and MARK.encode() in sent["stdin"]


def test_a_slow_terminal_is_no_silent_launcher(tmp_path: Path) -> None:
    said: list[bytes] = []

    def slow(name: str, data: bytes) -> None:
        said.append(data)
        time.sleep(4 if len(said) == 1 else 0)

    with ShellSession(LocalTransport(home=tmp_path), silence=2) as once:
        done = once.run(local_node(tmp_path), ["sh", "-c", "echo a; sleep 4.5; echo b"], on_output=slow)
    assert done.ok and b"".join(said) == b"a\nb\n"
