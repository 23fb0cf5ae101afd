"""`exec` on real SSH nodes: what ends it, and what it leaves; how it bears floods, slow readers and dead links."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterctl.agent.processes import marked
from clusterctl.sandbox import cluster
from tests.live.conftest import Shell, clean_environment

pytestmark = pytest.mark.live
WAYS = pytest.mark.parametrize("way", [(), ("--stdin",)], ids=["light", "agent"])
MB = 1 << 20


def begun(shell: Shell, *words: str, **more: object) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "clusterctl", "exec", *words]
    return subprocess.Popen(argv, cwd=shell.folder, env=shell.env, **more)  # type: ignore[call-overload, no-any-return]


def wait_for(truth: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def sleepers(name: str) -> set[int]:
    """The processes that carry a mark of this test, whichever node they are on."""
    return set(marked({"MARK_OF_THE_TEST": name}))


def stubborn(name: str) -> list[str]:
    """A command that ignores a polite request, with children in its group and out of it."""
    script = "trap '' TERM; setsid sleep 600 & sleep 600 & while :; do sleep 1; done"
    return ["env", f"MARK_OF_THE_TEST={name}", "sh", "-c", script]


@WAYS
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9), (signal.SIGTERM, 143)]
)
def test_whatever_ends_the_launcher_ends_the_command_everywhere(
    shell: Shell, tmp_path: Path, way: tuple[str, ...], number: int, code: int
) -> None:
    name = str(tmp_path)
    launcher = begun(shell, "all", *way, "--", *stubborn(name), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(sleepers(name)) >= 6)
    launcher.send_signal(number)
    assert launcher.wait(60) == code
    wait_for(lambda: not sleepers(name))


def test_a_second_interrupt_leaves_at_once(shell: Shell, tmp_path: Path) -> None:
    name = str(tmp_path)
    launcher = begun(shell, "all", "--", *stubborn(name), stderr=subprocess.PIPE)
    wait_for(lambda: len(sleepers(name)) >= 6)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stderr is not None
    assert b"Ctrl-C again" in launcher.stderr.readline()
    # Within a millisecond of the words both would be the first.
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 130
    # It did not wait for those that take two seconds to die.
    assert sleepers(name)
    wait_for(lambda: not sleepers(name))


@WAYS
def test_a_reader_that_leaves_ends_the_command(shell: Shell, tmp_path: Path, way: tuple[str, ...]) -> None:
    name = str(tmp_path)
    flood = ["env", f"MARK_OF_THE_TEST={name}", "yes"]
    launcher = begun(shell, "all", *way, "--", *flood, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launcher.stdout is not None and launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(60) == 141
    wait_for(lambda: not sleepers(name))


@WAYS
def test_a_flood_with_a_slow_reader_fills_no_memory_and_holds_up_nobody(
    shell: Shell, way: tuple[str, ...]
) -> None:
    script = "[ {node} = node1 ] && exec head -c 100000000 /dev/zero | tr '\\0' '\\n'; echo the other one"
    launcher = begun(
        shell, "all", *way, "--shell", "--", script, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    seen = b""
    # while the flood is on its way.
    while b"node2: the other one\n" not in seen:
        seen = seen[-100:] + os.read(launcher.stdout.fileno(), 4096)
    # Nobody reads.
    time.sleep(1.0)
    held = resident(launcher.pid)
    size = 0
    while data := os.read(launcher.stdout.fileno(), MB):
        size += len(data)
        held = max(held, resident(launcher.pid))
    assert launcher.wait(60) == 0
    assert size > 700_000_000 and held < 150 * MB


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0


def test_input_without_an_end_reaches_all_nodes_in_bounded_memory(shell: Shell) -> None:
    launcher = begun(shell, "all", "--stdin", "--", "wc", "-c", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launcher.stdin is not None and launcher.stdout is not None
    held = 0
    for _ in range(100):
        launcher.stdin.write(bytes(MB))
        held = max(held, resident(launcher.pid))
    launcher.stdin.close()
    said = launcher.stdout.read().decode().splitlines()
    assert launcher.wait(60) == 0
    assert sorted(said) == [f"node1: {100 * MB}", f"node2: {100 * MB}"] and held < 150 * MB


# ---- links that die


@pytest.fixture(scope="module")
def whole_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cluster.Sandbox]:
    if os.geteuid() != 0:
        pytest.skip("links are cut in namespaces, which need root")
    made = cluster.up(tmp_path_factory.mktemp("machines") / "sandbox", nodes=2, devices=1, mode="namespaces")
    yield made
    cluster.down(made.directory)


@WAYS
def test_a_cut_link_is_noticed_in_time_and_what_ran_behind_it_ends(
    whole_machines: cluster.Sandbox, tmp_path: Path, way: tuple[str, ...]
) -> None:
    env = {**clean_environment(), "CLUSTERCTL_CLUSTER": str(whole_machines.cluster_file)}
    name = str(tmp_path)
    command = ["env", f"MARK_OF_THE_TEST={name}", "sleep", "600"]
    launcher = begun(
        Shell(tmp_path, env), "node1", *way, "--", *command, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(lambda: sleepers(name))
    # The first sign of life of the launcher came.
    time.sleep(1.5)
    whole_machines.cut("node1")
    cut = time.monotonic()
    assert launcher.wait(60) == 255
    # 10 s of silence, on a busy machine.
    assert time.monotonic() - cut < 25
    # The node waits as long for the launcher.
    wait_for(lambda: not sleepers(name))
    whole_machines.heal("node1")


def test_the_words_of_pdsh_and_clush_work(shell: Shell) -> None:
    (shell.folder / "nodes").write_text("node2\nnode1\n")
    for words in (
        ["-a"],
        ["-w", "^nodes"],
        ["-f", "1", "-t", "20", "-u", "30", "-a"],
        ["-w", f"{getpass.getuser()}@node1,node2"],
        ["-l", getpass.getuser(), "all"],
    ):
        done = shell("exec", *words, "--", "echo", "hi")
        assert sorted(done.stdout.splitlines()) == ["node1: hi", "node2: hi"], (words, done.stderr)
    other = shell("exec", "-w", "nobody-here@node1,node2", "--", "echo", "hi")
    assert other.stdout == "node2: hi\n" and "for nobody-here@" in other.stderr
    assert "port 1" in shell("exec", "--port", "1", "node1", "--", "true").stderr


def test_bytes_reach_a_pipe_unchanged_and_a_terminal_escaped(shell: Shell) -> None:
    words = ["exec", "node1", "--", "printf", r"a\033[31mb\377\n"]
    argv = [sys.executable, "-m", "clusterctl", *words]
    done = subprocess.run(argv, cwd=shell.folder, env=shell.env, capture_output=True)
    assert done.stdout == b"node1: a\x1b[31mb\xff\n"
    ours, theirs = os.openpty()
    subprocess.run(argv, cwd=shell.folder, env=shell.env, stdout=theirs, check=True)
    os.close(theirs)
    assert os.read(ours, 100) == b"node1: a\\x1b[31mb\\xff\r\n"
    os.close(ours)
