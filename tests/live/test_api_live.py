"""The Python API on real nodes; the examples of its page are executed as they stand."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from clusterctl import api
from tests.live.conftest import clean_environment

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "python-api.md"


@pytest.fixture
def cluster(tmp_path: Path, cluster_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[api.Cluster]:
    """Two nodes of two devices; runs are kept in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", clean_environment()["PYTHONPATH"])
    with api.Cluster.load(cluster_file) as loaded:
        yield loaded


def own_rank(factor: int = 1) -> tuple[int, str]:
    print("hello from a call")
    return factor * int(os.environ["RANK"]), os.environ["CLUSTERCTL_NODE"]


def fail_on(rank: int) -> int:
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"no luck on {rank}")
    time.sleep(60)
    return rank


@pytest.mark.live
@pytest.mark.parametrize("each", [None, "nodes=1"])
def test_a_sweep_returns_its_variants_and_a_failure_does_not_end_it(
    cluster: api.Cluster, tmp_path: Path, each: str | None
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("command: [sh, -c, 'exit $CODE']\nenv: {CODE: 0}\nnodes: node1\n")
    chosen = cluster.select("node[1-2]") if each else cluster
    variants = chosen.sweep(job, {"env.CODE": [0, 7, 256]}, each=each, overrides={"devices": "[0]"})
    assert [variant.phase for variant in variants] == ["finished", "failed", "finished"]
    assert "7" in variants[1].problem and variants[0].settings == ("env.CODE=0",)
    assert {api.find_run(variant.run).phase for variant in variants} == {"finished", "failed"}
    with pytest.raises(api.InputFaults, match="no device") as refused:
        cluster.sweep(job, {"env.CODE": [0], "devices": [[8], [9]]})
    assert len(refused.value.faults) == 2


@pytest.mark.live
@pytest.mark.timeout(300)
def test_the_examples_of_the_page_run_as_they_stand(tmp_path: Path, cluster_file: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 8
    program = tmp_path / "example.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**clean_environment(), "CLUSTERCTL_CLUSTER": str(cluster_file)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[(0, 'node1'), (10, 'node1'), (20, 'node2'), (30, 'node2')]" in done.stdout
    assert "ZeroDivisionError: division by zero" in done.stdout


@pytest.mark.live
def test_every_name_of_the_api_is_on_its_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not [name for name in api.__all__ if not re.search(rf"\b{name}\b", text)]


@pytest.mark.live
def test_a_function_returns_by_rank_and_leaves_no_call_on_the_nodes(cluster: api.Cluster) -> None:
    started = cluster.start_function(functools.partial(own_rank, factor=3))
    # As another process would that knows only the id.
    found = api.FunctionRun[tuple[int, str]](api.find_run(started.id))
    assert found.results(60) == [(0, "node1"), (3, "node1"), (6, "node2"), (9, "node2")]
    assert [line.text for line in started.logs(rank=3)] == ["hello from a call"]
    paths = started._folder.read_record().data_paths
    left = cluster.run(["ls", paths["node1"]])[0].get()
    assert left.exit_code != 0 and b"call.pkl" not in left.stdout


@pytest.mark.live
def test_a_selection_runs_on_its_nodes_and_devices_alone(cluster: api.Cluster) -> None:
    assert cluster.select("node2").launch_function(own_rank, devices=[1]) == [(0, "node2")]
    assert cluster.select("node2").launch_function(lambda: os.environ["LOCAL_RANK"]) == ["0", "1"]


@pytest.mark.live
def test_a_module_below_code_is_imported_by_its_name(
    cluster: api.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "project"
    (code / "parts").mkdir(parents=True)
    (code / "parts" / "__init__.py").touch()
    (code / "parts" / "work.py").write_text("import parts\n\ndef where():\n    return parts.__file__\n")
    monkeypatch.syspath_prepend(str(code))
    from parts.work import where  # type: ignore[import-not-found]

    found = cluster.select("node1").launch_function(where, devices=[0], code=code)
    assert "work" in Path(found[0]).parts


@pytest.mark.live
def test_an_exception_on_one_rank_ends_the_others_and_keeps_its_traceback(cluster: api.Cluster) -> None:
    began = time.monotonic()
    with pytest.raises(api.FunctionFailed) as caught:
        cluster.launch_function(fail_on, 2)
    assert time.monotonic() - began < 40
    (failure,) = caught.value.failures
    assert (failure.rank, failure.node, failure.type) == (2, "node2", "ValueError")
    assert "in fail_on" in failure.traceback and "no luck on 2" in str(caught.value)


@pytest.mark.live
def test_a_rank_that_a_signal_ends_is_a_failed_run_with_its_cause(cluster: api.Cluster) -> None:
    with pytest.raises(api.RunFailed, match="rank 1") as caught:
        cluster.launch_function(
            lambda: os.kill(os.getpid(), 9) if os.environ["RANK"] == "1" else time.sleep(60)
        )
    assert not isinstance(caught.value, api.FunctionFailed)


@pytest.mark.live
def test_a_class_is_a_result_only_for_a_caller_who_trusts_the_nodes(cluster: api.Cluster) -> None:
    part = cluster.select("node1")
    # The module of this class has another name in Python 3.13.
    held = rf"TypeError: the result holds a {PurePosixPath.__module__}\.PurePosixPath"
    with pytest.raises(api.FunctionFailed, match=held):
        part.launch_function(PurePosixPath, "/x", devices=[0])
    found = part.launch_function(PurePosixPath, "/x", devices=[0], trust_results=True)
    assert found == [PurePosixPath("/x")]


@pytest.mark.live
def test_a_timeout_stops_the_run(cluster: api.Cluster) -> None:
    with pytest.raises(TimeoutError, match="still running after 1 s"):
        cluster.select("node1").launch_function(time.sleep, 600, timeout=1)
    last = api.find_run("last")
    assert last.is_ended and last.phase == "stopped"
    assert api.list_runs()[0].id == last.id


@pytest.mark.live
def test_what_cannot_be_pickled_is_an_error_before_anything_starts(cluster: api.Cluster) -> None:
    with pytest.raises(api.UsageError, match="cannot be sent to the nodes"):
        cluster.launch_function(print, threading.Lock())
    assert api.list_runs() == []


@pytest.mark.live
def test_a_job_file_is_launched_with_its_overrides_and_nodes(cluster: api.Cluster, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("command: [sh, -c, 'echo $WORD $RANK']\nnodes: node2\nenv: {WORD: before}\n")
    run = cluster.launch(job, overrides={"env.WORD": "after"}).wait(60)
    assert sorted(line.text for line in run.logs(stream="out")) == ["after 0", "after 1"]
    assert run.state().nodes == {"node2": "finished"}
    failing = cluster.select("node1").launch(["false"], devices=[0])
    with pytest.raises(api.RunFailed, match="exited with code 1"):
        failing.wait(60)


@pytest.mark.live
def test_an_ended_run_starts_again_on_its_nodes_or_on_others(cluster: api.Cluster) -> None:
    run = cluster.launch(["sh", "-c", "echo on $CLUSTERCTL_NODE"], devices=[0]).wait(60)
    phases: list[str] = []
    assert api.resume(run, report=lambda phase, text: phases.append(phase)) is run and phases
    assert [line.text for line in run.wait(60).logs()] == ["on node1", "on node2"]
    api.resume(run, on=cluster.select("node2")).wait(60)
    assert [line.text for line in run.logs()] == ["on node2"]
    with pytest.raises(api.UsageError, match="keeps its job"):
        api.resume(run, overrides={"train.steps": 9})


@pytest.mark.live
def test_an_active_run_is_observed_with_the_usage_of_its_devices(cluster: api.Cluster) -> None:
    run = cluster.launch(["sleep", "600"], devices=[0])
    observed = run.observe(10)
    for state, usage in (next(observed), next(observed)):
        assert (state.phase, [rank.node for rank in state.ranks]) == ("running", ["node1", "node2"])
        assert set(usage) == {0, 1} and all(device.used for device in usage.values())
    run.stop(0)
    assert not list(observed)


@pytest.mark.live
def test_a_node_that_cannot_be_reached_is_an_outcome(tmp_path: Path, cluster: api.Cluster) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: {gone: {host: 127.0.0.1, port: 1}}\n")
    with api.Cluster.load(path) as absent:
        (outcome,) = absent.run(["true"])
    assert isinstance(outcome.error, api.NodeError)
    with pytest.raises(api.NodeError, match="gone: nothing listens"):
        outcome.get()
    with pytest.raises(api.UsageError, match="not a list"):
        cluster.run("uname -n")


@pytest.mark.live
def test_checks_and_hostfiles_are_those_of_the_command_line(cluster: api.Cluster) -> None:
    findings = cluster.check()
    assert {finding.where for finding in findings} >= {"node1", "node2"}
    assert not [finding for finding in findings if finding.level == "bad"]
    assert cluster.hostfile("slurm").startswith("SLURM_JOB_NODELIST=")
    lines = cluster.select("node2").hostfile("openmpi").splitlines()
    assert len(lines) == 1 and lines[0].endswith("slots=2")
    table = cluster.rank_table(devices=[1])
    assert [device.device_id for _, device in table.by_rank()] == [1, 1]
