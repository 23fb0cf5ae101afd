"""The lines of doctor: checks that passed are counted, and nodes with the same problem share a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl.checks import doctor
from clusterctl.cli.main import run
from tests.clusterctl.conftest import Run


@pytest.mark.slow
def test_a_pod_of_one_node_passes_doctor(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path_factory.mktemp("pod")
    monkeypatch.chdir(folder)
    for name, value in {
        "JOB_COMPLETION_INDEX": "0",
        "CLUSTERCTL_PODS": "1",
        "CLUSTERCTL_PEERS": "localhost",
        "CLUSTERCTL_DEVICES": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CLUSTERCTL_CLUSTER", raising=False)
    assert run(["doctor"]) in (0, 1)
    out, err = capfd.readouterr()
    assert "can't contain" not in err and "passed" in out


def test_nodes_that_cannot_be_reached_for_the_same_reason_share_a_line(
    tmp_path: Path, command_line: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "here", list)
    (tmp_path / "cluster.yaml").write_text(
        'nodes:\n  node[1-3]: {host: "127.0.0.{n}", port: 1}\n  gate: {host: 127.0.0.9, port: 2}\n'
    )
    code, out, err = command_line("doctor", "--fix-hints")
    assert code == 1 and "4 of " in err, err
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "bad node[1-3] nothing listens at 127.0.0.[1-3] port 1",
        "check `host` and `port`, and that sshd runs there",
        "$ clusterctl exec 'node[1-3]' -- true",
        "bad gate nothing listens at 127.0.0.9 port 2",
        "check `host` and `port`, and that sshd runs there",
        "$ clusterctl exec gate -- true",
    ]
    code, out, _ = command_line("doctor", "--json")
    unreachable = [finding["where"] for finding in json.loads(out) if finding["check"] == "ssh"]
    assert code == 1 and unreachable == ["node1", "node2", "node3", "gate"]
