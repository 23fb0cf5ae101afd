"""What passed in doctor: checks of nodes and of all nodes together, counted alike, are one line."""

from __future__ import annotations

import pytest

from clusterctl.cli.main import run


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
