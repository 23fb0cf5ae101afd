"""The rank table that a platform mounts: waited for until it is complete, and checked before the start."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from clusterctl.backends.pods import rank_table
from clusterctl.errors import InputFaults, WorkFailed

GOOD = json.loads((Path(__file__).parents[2] / "cases" / "ranktable" / "good-1.2.json").read_text())["table"]


def ignore(phase: str, text: str) -> None:
    pass


def test_a_table_is_waited_for_until_it_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_table, "POLL", 0.01)
    path, told = tmp_path / "hccl.json", []

    def operator() -> None:
        time.sleep(0.05)
        path.write_text('{"status": "initializing"}')
        time.sleep(0.05)
        path.write_text(json.dumps(GOOD)[:-40])
        time.sleep(0.05)
        path.write_text(json.dumps(GOOD))

    writer = threading.Thread(target=operator)
    writer.start()
    table = rank_table.wait(path, lambda phase, text: told.append(text), 10.0)
    writer.join()
    assert table.ranks == 4
    assert told[0].endswith("does not exist yet") and any('"initializing"' in text for text in told)


def test_a_table_that_stays_incomplete_is_an_error_that_says_how(tmp_path: Path) -> None:
    path = tmp_path / "hccl.json"
    path.write_text('{"status": "initializing"}')
    with pytest.raises(
        WorkFailed, match=r'no complete rank table after 0 s: the status .* is "initializing"'
    ):
        rank_table.wait(path, ignore, 0.0)


def test_a_complete_table_that_hccl_would_refuse_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hccl.json"
    path.write_text(json.dumps({**GOOD, "server_count": "7"}))
    with pytest.raises(InputFaults, match="server_count"):
        rank_table.wait(path, ignore, 0.0)


def test_the_tables_of_modelarts_and_of_the_operator_are_found(tmp_path: Path) -> None:
    assert rank_table.find({}, tmp_path) is None
    mounted = tmp_path / "user/serverid/devindex/config"
    mounted.mkdir(parents=True)
    # It is mounted, and not written yet.
    assert rank_table.find({}, tmp_path) == mounted / "hccl.json"
    modelarts = tmp_path / "user/config/jobstart_hccl.json"
    modelarts.parent.mkdir(parents=True)
    modelarts.write_text("{}")
    assert rank_table.find({}, tmp_path) == modelarts
    assert rank_table.find({"RANK_TABLE_FILE": "/a/b.json"}, tmp_path) == tmp_path / "a/b.json"


# The form of ModelArts: no version, groups of instances, no rank ids.
JOBSTART = {
    "status": "completed", "group_count": "1",
    "group_list": [{"group_name": "worker", "device_count": "2", "instance_count": "2", "instance_list": [
        {"pod_name": f"job-worker-{n}", "server_id": f"10.0.0.{n + 1}",
         "devices": [{"device_id": "0", "device_ip": f"192.168.1.{n + 1}"}]} for n in range(2)]}],
}  # fmt: skip


def test_the_table_of_modelarts_becomes_one_that_hccl_reads(tmp_path: Path) -> None:
    path = tmp_path / "jobstart_hccl.json"
    path.write_text(json.dumps(JOBSTART))
    table = rank_table.wait(path, ignore, 0.0)
    assert [(server.server_id, device.rank_id) for server, device in table.by_rank()] == [
        ("10.0.0.1", 0),
        ("10.0.0.2", 1),
    ]
