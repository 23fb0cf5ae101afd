from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.errors import Unreachable, UsageError
from clusterctl.inventory.cluster import Node
from clusterctl.transport import open_files
from clusterctl.transport.fanout import on_each

NODES = [Node(name=f"node{number}", host="h", address="127.0.0.1") for number in range(100)]


def test_too_many_nodes_for_the_limit_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_files, "raise_limit", lambda: 64)
    with pytest.raises(UsageError, match=r"100 nodes need 248 open files; this shell allows 64"):
        open_files.require(NODES, 100, children=False)
    with pytest.raises(UsageError, match="need 448"):
        open_files.require(NODES, 1000, children=True)
    open_files.require(NODES, 8, children=False)


def test_a_node_without_a_free_file_is_its_own_outcome() -> None:
    def work(node: Node) -> str:
        if node.name == "node1":
            raise OSError(errno.EMFILE, "Too many open files")
        return node.name

    outcomes = on_each(NODES[:3], work)
    assert [outcome.ok for outcome in outcomes] == [True, False, True]
    assert isinstance(outcomes[1].error, Unreachable)
    assert "node1: too many open files here" in outcomes[1].error.message


def test_a_low_soft_limit_is_raised(tmp_path: Path) -> None:
    code = (
        "import resource; from clusterctl.transport.open_files import raise_limit;"
        "print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", f"ulimit -Sn 64; exec {sys.executable} -c '{code}'"],
        capture_output=True,
        text=True,
        check=True,
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = open_files.MOST if hard == resource.RLIM_INFINITY else min(hard, open_files.MOST)
    assert done.stdout.split() == [str(wanted)] * 2


def test_exec_on_more_nodes_than_files_says_how_many_it_needs(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text('nodes:\n  node[1-100]: {host: "10.255.255.{n}"}\n')
    words = ["-m", "clusterctl", "exec", "-c", "cluster.yaml", "all", "--fanout", "100", "--", "true"]
    done = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -n 64; exec "$0" "$@"', sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "100 nodes need" in done.stderr and "64" in done.stderr and "Traceback" not in done.stderr
