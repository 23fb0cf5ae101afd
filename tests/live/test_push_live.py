"""Pushes to real nodes that are cut, whose client is killed, whose nodes die, and what listens meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.files import tree
from clusterctl.sandbox import cluster, namespaces
from clusterctl.sandbox.cluster import Sandbox
from tests.live.conftest import Shell, clean_environment

NODES = 5
SIZE = 16_000_000
# Of the launcher: 6 s for one copy, so that there is time to do harm.
LINE = "20mbit"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    if namespaces.why_not():
        pytest.skip(namespaces.why_not())
    directory = tmp_path_factory.mktemp("push") / "sandbox"
    there = cluster.up(directory, nodes=NODES, devices=1, mode="namespaces")
    yield there
    cluster.down(directory)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source") / "tree"
    (root / "deep").mkdir(parents=True)
    (root / "deep" / "big").write_bytes(os.urandom(SIZE))
    for number in range(200):
        (root / f"file{number}").write_text(f"{number}\n" * number)
    return root


@pytest.fixture
def typed(tmp_path: Path, made: Sandbox) -> Shell:
    own = {"CLUSTERCTL_CLUSTER": str(made.cluster_file), "XDG_CACHE_HOME": str(tmp_path)}
    return Shell(tmp_path, {**clean_environment(), **own})


def inside(made: Sandbox, name: str, *argv: str) -> str:
    """Return the output of a program that runs on a node but was not started over SSH."""
    pid = namespaces.first_process(made.layout, made.node(name))
    entered = ["nsenter", "-t", str(pid), "-m", "-n", "-p", *argv]
    return subprocess.run(entered, capture_output=True, text=True, check=True).stdout


def listening(made: Sandbox, name: str) -> list[str]:
    """Return the addresses at which programs of a node listen, without its SSH server."""
    at = [line.split()[3] for line in inside(made, name, "ss", "-Hltn").splitlines()]
    return [address.rpartition(":")[0] for address in at if not address.endswith(":22")]


@pytest.fixture
def slow_line(made: Sandbox) -> Iterator[None]:
    """What leaves the launcher is held to a rate; what goes between nodes is not."""
    switch = json.loads(made.layout.record(namespaces.RELAY).read_text())["pid"]
    shape = ["nsenter", "-t", str(switch), "-n", "tc", "qdisc"]
    limit = ["tbf", "rate", LINE, "burst", "64kb", "latency", "400ms"]
    tried = subprocess.run([*shape, "add", "dev", "br0", "root", *limit], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"tc: {tried.stderr.strip()}")
    yield
    subprocess.run([*shape, "del", "dev", "br0", "root"], check=True)


def start(typed: Shell, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "clusterctl", *words], cwd=typed.folder, env=typed.env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def node_path(made: Sandbox, name: str, path: str) -> Path:
    return Path(f"/proc/{namespaces.first_process(made.layout, made.node(name))}/root{path}")


def same(made: Sandbox, name: str, source: Path, path: str) -> bool:
    return tree.scan(str(source))[0] == tree.scan(str(node_path(made, name, path)))[0]


def wait_for(truth: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


def arrived(made: Sandbox, name: str, path: str) -> int:
    """Bytes of the large file that a node has aside."""
    aside = (
        node_path(made, name, os.path.dirname(path)) / f".{os.path.basename(path)}.incoming" / "deep" / "big"
    )
    return aside.stat().st_size if aside.exists() else 0


def rows(done: subprocess.Popen[str]) -> tuple[dict[str, dict[str, Any]], str]:
    out, err = done.communicate(timeout=200)
    return {row["node"]: row for row in json.loads(out or "[]")}, err


def test_a_relayed_push_brings_one_copy_from_here_and_listens_only_in_the_cluster(
    made: Sandbox, typed: Shell, source: Path, slow_line: None
) -> None:
    began = time.monotonic()
    push = start(typed, "push", str(source), "/tmp/relayed", "--json")
    wait_for(lambda: arrived(made, "node1", "/tmp/relayed") > 0)
    ends = ("node1", f"node{NODES}")
    # A node listens from the moment it has the list of files; the first one may be receiving by then.
    wait_for(lambda: all(listening(made, name) for name in ends))
    assert {name: listening(made, name) for name in ends} == {
        name: [made.node(name).address] for name in ends
    }
    there, err = rows(push)
    seconds = time.monotonic() - began
    assert push.returncode == 0, err
    assert sum(row["bytes_sent"] for row in there.values()) < 1.1 * SIZE
    assert all(same(made, node.name, source, "/tmp/relayed") for node in made.nodes)
    # What the line needs for a copy each.
    assert seconds < NODES * SIZE * 8 / 20e6
    assert not any(listening(made, node.name) for node in made.nodes)


def test_after_the_client_is_killed_the_next_push_sends_the_rest(
    made: Sandbox, typed: Shell, source: Path, slow_line: None
) -> None:
    push = start(typed, "push", str(source), "/tmp/killed", "-n", "node1")
    wait_for(lambda: arrived(made, "node1", "/tmp/killed") > SIZE / 2)
    push.send_signal(signal.SIGKILL)
    push.communicate()
    assert not node_path(made, "node1", "/tmp/killed").exists()
    again = start(typed, "push", str(source), "/tmp/killed", "-n", "node1", "--json")
    there, err = rows(again)
    assert again.returncode == 0, err
    assert there["node1"]["bytes_sent"] < 0.6 * SIZE and same(made, "node1", source, "/tmp/killed")


def test_a_node_that_is_cut_off_in_the_middle_stops_nobody_else(
    made: Sandbox, typed: Shell, source: Path, slow_line: None
) -> None:
    push = start(typed, "push", str(source), "/tmp/cut", "--json")
    wait_for(lambda: all(arrived(made, node.name, "/tmp/cut") > SIZE / 10 for node in made.nodes))
    typed("sandbox", "cut", "node3", "--dir", str(made.layout.directory))
    there, err = rows(push)
    typed("sandbox", "heal", "node3", "--dir", str(made.layout.directory))
    assert push.returncode == 3 and "node3" in err
    assert sorted(there) == [node.name for node in made.nodes if node.name != "node3"]
    assert all(same(made, name, source, "/tmp/cut") for name in there)
    again = start(typed, "push", str(source), "/tmp/cut", "--json")
    there, err = rows(again)
    assert again.returncode == 0, err
    assert there["node3"]["bytes_sent"] + there["node3"]["bytes_relayed"] < SIZE
    assert same(made, "node3", source, "/tmp/cut")


def test_nodes_that_can_not_reach_each_other_get_it_from_here(
    made: Sandbox, typed: Shell, tmp_path: Path, source: Path
) -> None:
    # Each its own loopback.
    wrong = made.cluster_file.read_text().replace('"address": "10.', '"address": "127.')
    inventory = made.cluster_file.with_name("wrong.yaml")
    inventory.write_text(wrong)
    push = start(typed, "push", str(source), "/tmp/alone", "-c", str(inventory), "--json")
    there, err = rows(push)
    assert push.returncode == 0, err
    assert sum(row["bytes_sent"] for row in there.values()) == NODES * sum(
        one.stat().st_size for one in source.rglob("*") if one.is_file()
    )
    assert "could not copy from" in err and all(same(made, name, source, "/tmp/alone") for name in there)


def test_what_was_pushed_comes_back_folded(made: Sandbox, typed: Shell, source: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config").write_text("the same on all nodes")
    assert typed("push", "small", "/tmp/small").returncode == 0
    assert typed("push", "small/config", "/tmp/small/own", "-n", "node2").returncode == 0
    done = typed("pull", "/tmp/small", "home", "--fold")
    assert done.returncode == 0 and f"{NODES} files stored once" in done.stderr, done.stderr
    assert (tmp_path / "home" / "node1" / "small" / "config").stat().st_nlink == NODES + 1
    assert (tmp_path / "home" / "node2" / "small" / "own").exists()
