"""A start that fails: who ends the ranks that it could not reach any more."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.client.attempts import Reports, begin
from clusterctl.errors import LinkLost
from clusterctl.jobs.record import Abandoned
from clusterctl.jobs.run_folder import RunDir
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport
from tests.support.records import record_of


class Breaking:
    """An attempt whose start fails."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def start(self, connections: Connections, tell: object) -> bool:
        raise LinkLost("a", "the connection broke")


@pytest.mark.parametrize("left", [True, False])
def test_a_start_that_leaves_ranks_behind_starts_a_process_that_ends_them(tmp_path: Path, left: bool) -> None:
    run, cleared = RunDir(tmp_path), list[RunDir]()
    record = record_of({"a": [0]})
    given_up = (Abandoned(record.cluster.nodes[0], "/run", 1),) if left else ()
    run.write_record(replace(record, abandoned=given_up))
    attempt: Any = Breaking(run)
    reports = Reports(lambda _: nullcontext(lambda *_: None), lambda *_: None, cleared.append)
    with Connections(LocalTransport()) as connections, pytest.raises(LinkLost, match="the connection broke"):
        begin(attempt, connections, reports)
    assert cleared == ([run] if left else [])
