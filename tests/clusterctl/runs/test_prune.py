"""`runs prune` removes old runs here and on their nodes; a run that is alive or cannot be reached stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusterctl.errors import Unreachable, UsageError
from clusterctl.inventory.cluster import Cluster
from clusterctl.jobs.run_folder import RunDir, all_runs
from clusterctl.runs import prune
from clusterctl.runs.stop import stop_run
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport
from tests.clusterctl.conftest import Run
from tests.clusterctl.runs.test_run import connections as connections
from tests.clusterctl.runs.test_run import launched, program, to_the_end
from tests.support.run_folders import restarted_run
from tests.support.scripted import ScriptedTransport

HOUR = 3600.0


@contextmanager
def local(cluster: Cluster) -> Iterator[Connections]:
    with Connections(LocalTransport()) as opened:
        yield opened


def chosen(choice: prune.Choice, *ages: float) -> list[str]:
    """The names of those chosen among runs of these ages, named by their place."""
    listed = [(RunDir(Path(f"/r{place}")), 1e9 - age) for place, age in enumerate(ages)]
    return [run.run_id for run in choice.of(listed, 1e9)]


def test_age_and_number_choose_together() -> None:
    ages = (5 * HOUR, 1 * HOUR, 30 * HOUR, 3 * HOUR)
    assert chosen(prune.Choice(older_than=2 * HOUR), *ages) == ["r3", "r0", "r2"]
    assert chosen(prune.Choice(keep=3), *ages) == ["r2"]
    assert chosen(prune.Choice(older_than=2 * HOUR, keep=3), *ages) == ["r2"]
    assert chosen(prune.Choice(older_than=40 * HOUR, keep=0), *ages) == []
    assert chosen(prune.Choice(keep=0), *ages) == ["r1", "r3", "r0", "r2"]
    with pytest.raises(UsageError, match="say which runs are old"):
        chosen(prune.Choice(), *ages)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("12h", 12 * HOUR), ("30d", 720 * HOUR), ("1.5W", 252 * HOUR)]
)
def test_an_age_is_read_as_a_person_writes_it(text: str, seconds: float) -> None:
    assert prune.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1 month", "1e3", "٣d", "1" * 12])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a length of time"):
        prune.seconds_of(text)


def test_an_ended_run_goes_here_and_on_its_nodes_and_a_dry_run_only_says_so(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(tmp_path, connections, program("print(1)"))
    to_the_end(run, connections)
    there = [tmp_path / f"n{n}" / "runs" for n in (1, 2)]
    assert all(any(one.iterdir()) for one in there)
    rehearsed = prune.prune([run], local, dry_run=True)
    assert run.root.exists() and all(any(one.iterdir()) for one in there)
    done = prune.prune([run], local)
    assert [(one.run, one.nodes, one.kept) for one in done] == [(run.run_id, ("node1", "node2"), "")]
    assert rehearsed == done and done[0].size > 0
    assert not run.root.exists() and all_runs(tmp_path / "runs") == []
    # The lock of starts.
    assert all([path.name for path in one.iterdir()] == [".starting"] for one in there)


def test_the_last_line_counts_all_runs_that_stay(tmp_path: Path, command_line: Run) -> None:
    for number in range(3):
        restarted_run(tmp_path / "runs", f"run{number}")
    (tmp_path / "cluster.yaml").write_text("nodes: {node1: , node2: }\n")
    for words, text in (
        (("--keep", "1", "--dry-run"), "would delete 2 runs, "),
        (("--keep", "1", "--yes"), "deleted 2 runs, "),
        (("--keep", "1", "--yes"), "deleted 0 runs, 0 B"),
    ):
        code, _, err = command_line("runs", "prune", "--here", *words)
        kept = "would keep 1" if "--dry-run" in words else "kept 1"
        assert code == 0 and err.startswith(text) and err.endswith(f" here; {kept}\n"), err


def test_a_run_that_lives_stays_whatever_its_folder_says(tmp_path: Path, connections: Connections) -> None:
    run = launched(tmp_path, connections, program("import time; time.sleep(600)"))
    run.write_json(run.state, {"phase": "finished", "nodes": {}})
    try:
        done = prune.prune([run], local)
        assert [one.kept for one in done] == ["it runs on node1"]
        assert run.record.exists()
        with run.hold():
            held = prune.prune([run], local)
        assert "is its controller" in held[0].kept
    finally:
        stop_run(run, connections, grace=0.0)
    assert prune.prune([run], local)[0].kept == ""


def test_a_run_whose_nodes_are_gone_stays_unless_only_the_folder_here_is_meant(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(tmp_path, connections, program("print(1)"))

    @contextmanager
    def nowhere(cluster: Cluster) -> Iterator[Connections]:
        with Connections(ScriptedTransport({("*", "connect"): Unreachable("node1", "no answer")})) as opened:
            yield opened

    kept = prune.prune([run], nowhere)[0].kept
    assert kept == "node1 can't be asked whether it still runs there: no answer" and run.root.exists()
    assert "had not ended" in prune.prune([run], nowhere, here_only=True)[0].kept
    to_the_end(run, connections)
    gone = prune.prune([run], nowhere, here_only=True)
    assert (gone[0].kept, gone[0].nodes) == ("", ()) and not run.root.exists()


def test_a_folder_that_is_no_run_any_more_is_named_and_stays(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "broken-1")
    run.root.mkdir(parents=True)
    run.record.write_text("{")
    assert prune.started(run) <= time.time()
    assert "can't be read" in prune.prune([run], local)[0].kept and run.root.exists()
