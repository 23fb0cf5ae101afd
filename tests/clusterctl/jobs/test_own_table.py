"""`rank_table: FILE` in a job: checked against the job's ranks before anything starts, and given to every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import InputFaults
from clusterctl.jobs import job as jobs
from clusterctl.jobs import job_check
from clusterctl.ranktable.table import Device, RankTable, Server
from clusterctl.runs import start as runs
from clusterctl.transport.fanout import Connections
from tests.clusterctl.runs.test_run import connections as connections
from tests.clusterctl.runs.test_run import lab, to_the_end

# The table of `lab`: two servers n1 and n2, each with the devices 0 and 1.
SERVERS = tuple(
    Server(
        f"n{n}", tuple(Device(device, f"10.1.{n}.{device + 1}", 2 * (n - 1) + device) for device in (0, 1))
    )
    for n in (1, 2)
)


def written(tmp_path: Path, table: RankTable, job: str = "rank_table: table.json") -> Path:
    (tmp_path / "table.json").write_text(table.render())
    path = tmp_path / "job.yaml"
    path.write_text(
        f"command: [python, -c, 'import os; print(open(os.environ[\"RANK_TABLE_FILE\"]).read())']\n{job}\n"
    )
    return path


def faults_of(tmp_path: Path, table: RankTable) -> list[str]:
    job = jobs.load(written(tmp_path, table))
    with pytest.raises(InputFaults) as raised:
        job_check.check(job, lab(tmp_path))
    assert all("job.yaml:2 rank_table" in fault.where and fault.remedy for fault in raised.value.faults)
    return [fault.what for fault in raised.value.faults]


def test_a_table_that_fits_reaches_every_rank(tmp_path: Path, connections: Connections) -> None:
    table = RankTable(SERVERS)
    job = jobs.load(written(tmp_path, table))
    assert job_check.check(job, lab(tmp_path)) is None
    run = runs.launch(lab(tmp_path), job, connections, tmp_path / "runs", lambda phase, text: None)
    assert to_the_end(run, connections).phase == "finished"
    assert run.rank_table.read_text() == table.render()
    for node, rank in (("node1", 0), ("node2", 3)):
        assert run.log(node, rank, "out").read_text() == table.render() + "\n"


def test_a_table_that_does_not_fit_is_refused_with_what_differs(tmp_path: Path) -> None:
    first, second = SERVERS
    swapped = RankTable((replace(first, server_id="n2"), replace(second, server_id="n1")))
    assert "rank 0 is device 0 of node1 in the job, and device 0 of n2" in faults_of(tmp_path, swapped)[0]
    assert "has 2 ranks, and the job 4" in faults_of(tmp_path, RankTable((first,)))[0]
    other = RankTable((first, replace(second, server_id="n9")))
    assert "has no server n2 for node2; it has n1, n9" in faults_of(tmp_path, other)[0]
    (tmp_path / "table.json").write_text("{}")


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    job = jobs.load(written(tmp_path, RankTable(SERVERS)))
    (tmp_path / "table.json").write_text('{"version": "1.0"}')
    with pytest.raises(InputFaults, match=r"job\.yaml:2 rank_table"):
        job_check.check(job, lab(tmp_path))
    (tmp_path / "table.json").unlink()
    with pytest.raises(InputFaults, match=r"job\.yaml:2 rank_table: .*table\.json: no such file"):
        job_check.check(job, lab(tmp_path))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rank_table: nosuch.json", "no file"),
        ("rank_table: alwas", "unknown 'alwas'"),
        ("rank_table: table.json\nrestart: {max: 1, min_nodes: 1}", "fixed ones"),
    ],
)
def test_a_wrong_choice_is_refused_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(InputFaults) as raised:
        jobs.load(written(tmp_path, RankTable(SERVERS), line))
    fault = raised.value.faults[0]
    assert words in fault.what and "job.yaml:2 rank_table" in fault.where and fault.remedy
