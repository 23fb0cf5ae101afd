"""The keeper over real SSH: one handshake, broken links are replaced, and nothing is left when it is killed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.keeping import Keeping, is_alive, until

pytestmark = pytest.mark.live
# A command's parent is the agent that runs it.
AGENT = ("--shell", "--", "echo $PPID")


@pytest.fixture
def kept(tmp_path: Path, cluster_file: Path) -> Iterator[Keeping]:
    keeping = Keeping.at(tmp_path, cluster_file)
    yield keeping
    keeping.stop()


def agents(keeping: Keeping) -> dict[str, str]:
    """Each node's agent, by its pid there."""
    done = keeping("exec", "all", *AGENT)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ") for line in done.stdout.splitlines())


def test_a_second_command_makes_no_connection(kept: Keeping) -> None:
    first = agents(kept)
    assert len(first) == 2 and agents(kept) == first
    assert [sorted(link["node"] for link in one["links"]) for one in kept.status()] == [["node1", "node2"]]


def test_a_broken_link_is_made_anew_at_the_next_use(kept: Keeping) -> None:
    first = agents(kept)
    kept("exec", "node1", "--shell", "--", "kill -9 $PPID")
    again = agents(kept)
    assert again["node1"] != first["node1"] and again["node2"] == first["node2"]


def test_a_frozen_node_is_given_up_and_reached_again(kept: Keeping) -> None:
    first = agents(kept)
    kept("exec", "node1", "--shell", "--", "kill -STOP $PPID & sleep 30", "--timeout", "1")
    until(lambda: [len(one["links"]) for one in kept.status()] == [1], "the silent link is given up")
    again = agents(kept)
    assert again["node1"] != first["node1"] and again["node2"] == first["node2"]


def test_a_killed_keeper_leaves_no_agent_on_the_nodes(kept: Keeping, cluster_file: Path) -> None:
    first = agents(kept)
    os.kill(kept.status()[0]["pid"], signal.SIGKILL)
    until(lambda: not kept.status(), "the other half ends too")

    def all_ended() -> bool:
        asked = " ".join(f"/proc/{pid}/cmdline" for pid in first.values())
        said = kept(
            "exec", "all", "--persist", "off", "--shell", "--", f"cat {asked} 2>/dev/null | tr '\\0' ' '"
        )
        return "sys.stdin.buffer.read" not in said.stdout

    until(all_ended, "the agents end")
    assert set(agents(kept).values()).isdisjoint(first.values())


def test_a_host_key_counts_when_a_connection_is_made(
    kept: Keeping, cluster_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    known = cluster_file.parent / "known_hosts"
    before = known.read_text()
    first = agents(kept)
    try:
        kind, key = other.with_suffix(".pub").read_text().split()[:2]
        known.write_text("".join(f"{line.split()[0]} {kind} {key}\n" for line in before.splitlines()))
        # An open link shows its key no more.
        assert agents(kept) == first
        kept.stop()
        refused = kept("exec", "all", "--", "echo", "ran")
        assert refused.returncode == 255 and "ran" not in refused.stdout
        assert refused.stderr.count("its host key changed") == 2
    finally:
        known.write_text(before)
    # The keeper reads the file anew for each command.
    assert len(agents(kept)) == 2


def test_files_travel_over_kept_links(kept: Keeping, tmp_path: Path) -> None:
    source = tmp_path / "code"
    source.mkdir()
    (source / "big").write_bytes(os.urandom(3 << 20))
    (source / "small.py").write_text("print('on')\n")
    # Each node has a home of its own.
    there = "~/kept-there"
    for _ in range(2):
        pushed = kept("push", str(source), there)
        assert pushed.returncode == 0, pushed.stderr
    pulled = kept("pull", f"{there}/big", str(tmp_path / "back"))
    assert pulled.returncode == 0, pulled.stderr
    for node in ("node1", "node2"):
        found = [path for path in (tmp_path / "back" / node).rglob("big") if path.is_file()]
        assert [path.read_bytes() for path in found] == [(source / "big").read_bytes()]
    assert [len(one["links"]) for one in kept.status()] == [2]


def test_much_output_neither_swells_the_keeper_nor_holds_up_others(kept: Keeping) -> None:
    agents(kept)
    loud = kept.start("exec", "node1", "--", "head", "-c", "60000000", "/dev/zero")
    assert loud.stdout is not None
    # It began, and from here on nobody reads it.
    loud.stdout.read(1)
    assert kept("exec", "all", "--", "echo", "on").stdout.count("on") == 2
    assert kept.status()[0]["memory_mb"] < 100
    loud.kill()
    loud.communicate()
    assert kept("exec", "node1", "--", "echo", "on").stdout == "node1: on\n"


def test_what_a_killed_command_ran_is_ended_on_the_node(kept: Keeping, tmp_path: Path) -> None:
    agents(kept)
    process = kept.start("exec", "node1", "--shell", "--", "echo $$; sleep 600")
    assert process.stdout is not None
    pid = process.stdout.readline().split()[1]
    process.kill()
    process.communicate()
    asked = f"kill -0 {pid} 2>/dev/null && echo there || echo gone"
    until(lambda: "gone" in kept("exec", "node1", "--shell", "--", asked).stdout, "it ends")
    assert not is_alive(process.pid)


def test_the_passphrase_of_a_locked_key_is_asked_at_the_commands_terminal(
    kept: Keeping, cluster_file: Path, tmp_path: Path
) -> None:
    locked = tmp_path / "locked"
    locked.write_bytes((cluster_file.parent / "keys" / "id_ed25519").read_bytes())
    locked.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", str(locked)], check=True)
    text = cluster_file.read_text().replace("./keys/id_ed25519", str(locked))
    (tmp_path / "cluster.yaml").write_text(
        text.replace("./known_hosts", str(cluster_file.parent / "known_hosts"))
    )
    words = ["exec", "all", "-c", "cluster.yaml", "--ssh", "paramiko", "--", "echo", "on"]
    # Nobody sits there.
    assert kept(*words).returncode == 255
    # The second time the links are there.
    for asked in (1, 0):
        code, said = _at_terminal(kept, words, b"open sesame\n")
        assert (code, said.count("Passphrase"), said.count(": on")) == (0, asked, 2), said


def _at_terminal(kept: Keeping, words: list[str], typed: bytes) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterctl", *words],
        cwd=kept.folder, env=kept.env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            # A terminal reports a closed other end in this way.
            break
        said += piece
        if b"Passphrase" in piece:
            os.write(ours, typed)
    os.close(ours)
    return process.wait(60), said.decode()
