"""Where the processes of `generate`, `serve` and `eval` run: on the CPUs of nodes, or on their GPUs or NPUs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clusterctl.cli import options
from clusterctl.cli.commands import application
from clusterctl.cli.models.place import OnNodes, RankPlaces, job_on, ranks_of
from clusterctl.errors import UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.plan import make_plan
from clusterctl.jobs.run_folder import RunDir
from tests.support.records import record_of


def cluster(*kinds: str, devices: int = 4) -> Cluster:
    nodes = [
        Node(
            f"node{number}", f"10.0.0.{number}", f"10.0.0.{number}", kind=kind, devices=tuple(range(devices))
        )
        for number, kind in enumerate(kinds, 1)
    ]
    return Cluster("lab", tuple(nodes))


def environments(chosen: Cluster, ranks: RankPlaces) -> list[dict[str, str]]:
    job = job_on(OnNodes(chosen, local=Path("/step-1")), "generate", ["--json"], ranks)
    return [process.env for node in make_plan(chosen, job).nodes for process in node.processes]


@pytest.mark.parametrize(("kinds", "device"), [(("cpu", "cpu"), None), (("npu", "cuda"), "cpu")])
def test_a_cpu_gets_one_process_on_each_node(kinds: tuple[str, ...], device: str | None) -> None:
    chosen = cluster(*kinds)
    ranks = ranks_of(chosen, device, tensor=2, pipeline=1)
    assert [env["LOCAL_RANK"] for env in environments(chosen, ranks)] == ["0", "0"]
    assert job_on(OnNodes(chosen), "serve", [], ranks).share_devices


@pytest.mark.parametrize(
    ("kind", "visible"), [("npu", "ASCEND_RT_VISIBLE_DEVICES"), ("cuda", "CUDA_VISIBLE_DEVICES")]
)
def test_every_device_of_the_nodes_gets_a_rank_that_no_other_run_shares(kind: str, visible: str) -> None:
    chosen = cluster(kind, kind)
    ranks = ranks_of(chosen, None)
    found = environments(chosen, ranks)
    assert [(env["RANK"], env["LOCAL_RANK"]) for env in found] == [(str(at), str(at % 4)) for at in range(8)]
    assert {(env["CLUSTERCTL_DEVICE_KIND"], env["WORLD_SIZE"], env[visible]) for env in found} == {
        (kind, "8", "0,1,2,3")
    }
    assert not job_on(OnNodes(chosen), "serve", [], ranks).share_devices


def test_a_division_takes_as_many_devices_as_it_needs() -> None:
    chosen = cluster("npu", "npu")
    found = environments(chosen, ranks_of(chosen, "npu", tensor=2, pipeline=2))
    assert [env["ASCEND_RT_VISIBLE_DEVICES"] for env in found] == ["0,1"] * 4
    (alone,) = environments(cluster("npu"), ranks_of(cluster("npu"), None, 1, 1))
    assert alone["WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("kinds", "device", "division", "says"),
    [
        (("npu", "cuda"), None, (0, 0), "kinds cuda and npu, which cannot compute together"),
        (("npu", "cpu"), None, (0, 0), "kinds cpu and npu"),
        (("cpu",), "cuda", (0, 0), "--device cuda: node1 has the kind cpu"),
        (("npu", "npu"), None, (3, 1), "are 3 ranks, and the 2 nodes have 4 devices each"),
        (("npu",), None, (4, 2), "are 8 ranks, and the 1 nodes have 4 devices each"),
        (("cpu",), None, (3, 0), "--tensor 3 is 3 ranks, but 1 node of kind cpu has one each"),
        (
            ("cpu", "cpu"),
            None,
            (2, 2),
            "--tensor 2 x --pipeline 2 is 4 ranks, but 2 nodes of kind cpu have one each",
        ),
        (("cpu", "cpu", "cpu"), None, (0, 2), "--pipeline 2 is 2 ranks, but 3 nodes"),
    ],
)
def test_what_cannot_compute_is_refused_before_anything_starts(
    kinds: tuple[str, ...], device: str | None, division: tuple[int, int], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        ranks_of(cluster(*kinds), device, *division)
    assert caught.value.hint


def test_the_last_run_with_results_is_no_run_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERCTL_RUNS", str(tmp_path))
    reader = job_on(OnNodes(cluster("cpu")), "serve", [], RankPlaces())
    for age, (name, job) in enumerate(
        {
            "served": reader,
            "trained": replace(reader, train={"steps": 3}, trainer=False),
            "program": replace(reader, trainer=False),
        }.items()
    ):
        run = RunDir(tmp_path / name)
        run.write_record(replace(record_of({"node1": [0]}), run=name, job=job))
        os.utime(run.record, (1000 - age, 1000 - age))
    assert options.run_named("last").run_id == "served"
    assert options.run_with_results("last").run_id == "trained"
    os.utime(tmp_path / "program" / "run.json", (3000, 3000))
    assert options.run_with_results("last").run_id == "program"
    # A command that has saved nothing is not what `generate last` means.
    assert options.run_with_results("last", trains=True).run_id == "trained"
    (tmp_path / "program" / "checkpoints").mkdir()
    assert options.run_with_results("last", trains=True).run_id == "program"
    (tmp_path / "trained" / "run.json").unlink()
    # A program of the user's may save checkpoints too.
    assert options.run_with_results("last").run_id == "program"
    (tmp_path / "program" / "run.json").unlink()
    assert options.run_with_results("last", trains=True).run_id == "served"
    assert options.run_with_results("served").run_id == "served"


def test_a_report_of_the_last_run_is_not_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERCTL_RUNS", str(tmp_path))
    reader = job_on(OnNodes(cluster("cpu")), "serve", [], RankPlaces())
    trained = replace(reader, train={"steps": 3}, trainer=False)
    for age, (name, job) in enumerate({"served": reader, "trained": trained}.items()):
        run = RunDir(tmp_path / name)
        run.write_record(replace(record_of({"node1": [0]}), run=name, job=job))
        os.utime(run.record, (1000 - age, 1000 - age))
    result = CliRunner().invoke(application(), ["report", "last", "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert "trained" in (tmp_path / "page.html").read_text("utf-8")
