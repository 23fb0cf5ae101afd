"""Runs from start to end over real agents on this machine: what comes home, what is stopped, what is left."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.frames import Frame
from clusterctl.agent.ranks import follow
from clusterctl.agent.reaper import Watcher
from clusterctl.agent.request import Request
from clusterctl.checks.query import query_node
from clusterctl.errors import ClusterctlError, LinkLost, UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job as jobs
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.runs import abandoned
from clusterctl.runs import start as runs
from clusterctl.runs.causes.cause import find_cause
from clusterctl.runs.controller import Control
from clusterctl.runs.decide.attempt import StopRequest
from clusterctl.runs.finish import finish
from clusterctl.runs.query import current_state
from clusterctl.runs.state import RunState, read_state
from clusterctl.runs.stop import stop_run
from clusterctl.runs.watching.kept_watch import KeptWatch
from clusterctl.runs.watching.watch import RunWatcher, open_watch
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections, Outcome
from clusterctl.transport.link import PendingRequest
from clusterctl.transport.local import LocalTransport


def lab(tmp_path: Path) -> Cluster:
    """Two nodes of two devices, both on this machine, each with a work folder of its own."""
    nodes = tuple(
        Node(
            f"node{n}",
            "local",
            f"127.0.0.{n}",
            port=n,
            devices=(0, 1),
            python=sys.executable,
            workdir=str(tmp_path / f"n{n}"),
            server_id=f"n{n}",
        )
        for n in (1, 2)
    )
    return Cluster("lab", nodes, source="cluster.yaml")


@pytest.fixture
def connections() -> Iterator[Connections]:
    with Connections(LocalTransport()) as opened:
        yield opened


def program(text: str, **more: object) -> jobs.Job:
    return jobs.Job(name="job", command=("python", "-c", text), source="job.yaml", **more)  # type: ignore[arg-type]


def launched(tmp_path: Path, connections: Connections, job: jobs.Job) -> RunDir:
    return runs.launch(lab(tmp_path), job, connections, tmp_path / "runs", lambda phase, text: None)


def to_the_end(run: RunDir, connections: Connections) -> RunState:
    with open_watch(run, connections) as watch:
        for _ in watch:
            pass
        return finish(run, connections)


def left_of(run: RunDir) -> int:
    """Living processes that carry the run's marker, as the kernel knows them."""
    mark = f"CLUSTERCTL_RUN_ID={run.run_id}".encode()
    count = 0
    for entry in Path("/proc").iterdir():
        try:
            count += entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
    return count


def test_every_rank_finds_its_place_and_its_output_comes_home_byte_for_byte(
    tmp_path: Path, connections: Connections
) -> None:
    text = """
import os, sys
print(*[os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")])
sys.stderr.buffer.write(b"\\xff\\x00no end")
"""
    run = launched(tmp_path, connections, program(text))
    state = to_the_end(run, connections)
    assert state.phase == "finished"
    assert [rank.exit_code for rank in state.ranks] == [0, 0, 0, 0]
    for node, rank, local in (("node1", 0, 0), ("node1", 1, 1), ("node2", 2, 0), ("node2", 3, 1)):
        assert run.log(node, rank, "out").read_text() == f"{rank} {local} 4\n"
        assert run.log(node, rank, "err").read_bytes() == b"\xff\x00no end"


def test_a_dead_rank_stops_all_others_and_is_named_as_the_cause(
    tmp_path: Path, connections: Connections
) -> None:
    text = """
import os, sys, time
if os.environ["RANK"] == "3":
    sys.exit("ZeroDivisionError: of its own making" if os.environ["CLUSTERCTL_NODE"] == "node2" else 1)
time.sleep(600)
"""
    run = launched(tmp_path, connections, program(text, grace=5.0))
    began = time.monotonic()
    state = to_the_end(run, connections)
    assert time.monotonic() - began < 10
    assert state.phase == "failed"
    assert state.failure is not None
    assert (state.failure.rank, state.failure.node, state.failure.exit_code) == (3, "node2", 1)
    cause = find_cause(run, state)
    assert cause.title == "rank 3 on node2 (device 1) exited with code 1"
    assert cause.tail == ("ZeroDivisionError: of its own making",)
    assert cause.others == "3 other ranks ended as a consequence: stopped"
    assert left_of(run) == 0


def test_a_rank_whose_first_thread_has_ended_is_stopped_all_the_same(
    tmp_path: Path, connections: Connections
) -> None:
    """The kernel shows such a process as a zombie; so it does for a moment with every one that has many threads."""
    text = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    run = launched(tmp_path, connections, program(text, grace=2.0))
    homes = [Path(home) / "attempts" / "1" for home in run.read_record().run_dirs.values()]
    pids = [json.loads(path.read_text())["pid"] for home in homes for path in home.glob("ranks/*.json")]
    wait_for(
        lambda: len(pids) == 4 and all("State:\tZ" in Path(f"/proc/{pid}/status").read_text() for pid in pids)
    )
    assert stop_run(run, connections) == {"node1": 0, "node2": 0}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    ended = [json.loads(path.read_text()) for home in homes for path in home.glob("ranks/*.json")]
    assert [(one["state"], one["signal"]) for one in ended] == [("exited", 9)] * 4


def test_stop_ends_what_hides_in_sessions_of_its_own_and_touches_no_other_run(
    tmp_path: Path, connections: Connections
) -> None:
    hiding = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
print("up", flush=True)
time.sleep(600)
"""
    first, second = (launched(tmp_path, connections, program(hiding, grace=2.0)) for _ in range(2))
    wait_for(lambda: left_of(first) >= 8 and left_of(second) >= 8)
    assert stop_run(first, connections) == {"node1": 0, "node2": 0}
    assert left_of(first) == 0
    assert left_of(second) >= 8
    assert current_state(first, connections).phase == "stopped"
    assert stop_run(second, connections) == {"node1": 0, "node2": 0}
    assert left_of(second) == 0


@pytest.mark.timeout(300)
def test_a_stop_on_64_nodes_ends_every_rank_whenever_supervisors_exit(
    tmp_path: Path, connections: Connections
) -> None:
    """Supervisors see the request to stop while their agents still look for them: many end in between."""
    node = lab(tmp_path).nodes[0]
    names = [f"node{number:03}" for number in range(64)]
    nodes = tuple(
        replace(
            node,
            name=name,
            address=f"127.0.1.{number + 1}",
            devices=(0,),
            workdir=str(tmp_path / name),
            server_id=name,
        )
        for number, name in enumerate(names)
    )
    job = program("import time; time.sleep(600)", grace=5.0)
    cluster = Cluster("lab", nodes, source="cluster.yaml")
    run = runs.launch(cluster, job, connections, tmp_path / "runs", lambda phase, text: None)
    assert stop_run(run, connections) == dict.fromkeys(names, 0)
    assert left_of(run) == 0
    assert current_state(run, connections).phase == "stopped"


def wait_for(condition, seconds: float = 15.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


def test_cut_connections_lose_and_double_no_byte(tmp_path: Path, connections: Connections) -> None:
    text = "import time\nfor n in range(60):\n    print(n, 'x' * 500, flush=True)\n    time.sleep(0.03)"
    run = launched(tmp_path, connections, program(text))
    cluster = run.read_record().cluster
    cuts = 0
    with open_watch(run, connections) as watch:
        for update in watch:
            starts = {line.split()[0] for line in update.chunk.data.splitlines()} if update.chunk else set()
            if starts & {b"10", b"30", b"50"} and cuts < 6:
                connections.drop(cluster.nodes[cuts % 2])
                cuts += 1
        state = finish(run, connections)
    assert cuts >= 4
    assert state.phase == "finished"
    wanted = "".join(f"{n} {'x' * 500}\n" for n in range(60))
    for node, rank in (("node1", 0), ("node1", 1), ("node2", 2), ("node2", 3)):
        assert run.log(node, rank, "out").read_text() == wanted


def test_a_run_goes_on_without_its_launcher_and_is_found_again(tmp_path: Path) -> None:
    text = "import time\nfor n in range(20):\n    print(n, flush=True)\n    time.sleep(0.05)"
    with Connections(LocalTransport()) as first:
        run = launched(tmp_path, first, program(text))
    with Connections(LocalTransport()) as second:
        assert current_state(run, second).phase in ("running", "finished")
        assert to_the_end(run, second).phase == "finished"
    assert run.log("node2", 3, "out").read_text().split() == [str(n) for n in range(20)]


def test_a_second_watcher_reads_what_the_first_brings_home(tmp_path: Path, connections: Connections) -> None:
    run = launched(tmp_path, connections, program("print('hello')"))
    with open_watch(run, connections) as mine:
        assert isinstance(mine, RunWatcher)
        with open_watch(run, connections) as other:
            assert isinstance(other, KeptWatch)
            for _ in mine:
                pass
            finish(run, connections)
            lines = [line for update in other if update.chunk for line in update.chunk.lines()]
    assert sorted((line.rank, line.text) for line in lines) == [(rank, "hello") for rank in range(4)]


def test_what_can_not_be_kept_here_ends_the_watch_and_not_the_run(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(tmp_path, connections, program("import time; time.sleep(1.0); print('done')"))
    in_the_way = run.logs() / "node2"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("a file where the folder should be")
    with pytest.raises(ClusterctlError, match="cannot write what node2 sends"):
        to_the_end(run, connections)
    in_the_way.unlink()
    assert to_the_end(run, connections).phase == "finished"
    assert run.log("node2", 2, "out").read_text() == "done\n"


def test_a_half_line_that_came_home_before_is_completed_by_the_next_watcher(
    tmp_path: Path, connections: Connections
) -> None:
    text = "import time; print('first half, ', end='', flush=True); time.sleep(1.5); print('second half')"
    run = launched(tmp_path, connections, program(text))
    wait_for(
        lambda: (
            any((tmp_path / "n1").rglob("rank-0.out"))
            and next((tmp_path / "n1").rglob("rank-0.out")).stat().st_size
        )
    )
    with open_watch(run, connections, now=True) as first:
        list(first)
    assert run.log("node1", 0, "out").read_text() == "first half, "
    with open_watch(run, connections) as second:
        lines = [update.chunk.data for update in second if update.chunk]
    assert lines == [b"first half, second half\n"] * 4


def test_when_one_node_can_not_start_nothing_runs_anywhere(tmp_path: Path, connections: Connections) -> None:
    cluster = lab(tmp_path)
    (tmp_path / "n2").write_text("a file where the work folder should be")
    with pytest.raises(ClusterctlError) as caught:
        runs.launch(
            cluster,
            program("import time; time.sleep(600)"),
            connections,
            tmp_path / "runs",
            lambda phase, text: None,
        )
    assert "node2" in str(caught.value)
    assert not list((tmp_path / "n1").rglob("rank-0.out"))


def test_a_missing_program_is_an_end_in_words_not_a_hang(tmp_path: Path, connections: Connections) -> None:
    run = launched(tmp_path, connections, jobs.Job(name="j", command=("/no/such/program",), source="j"))
    state = to_the_end(run, connections)
    assert state.phase == "failed"
    cause = find_cause(run, state)
    assert "cannot start '/no/such/program'" in cause.tail[-1]


def test_one_machine_under_two_names_is_refused(tmp_path: Path, connections: Connections) -> None:
    cluster = lab(tmp_path)
    twice = replace(cluster, nodes=(cluster.nodes[0], replace(cluster.nodes[0], name="other", port=9)))
    with pytest.raises(UsageError, match="node1 and other are the same machine"):
        runs.launch(twice, program("pass"), connections, tmp_path / "runs", lambda phase, text: None)


def test_a_forwarded_secret_reaches_the_rank_and_no_file_here(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret-value")
    text = "import os; print(len(os.environ['MY_TOKEN']), 'HOME' in os.environ, 'PYTEST_CURRENT_TEST' in os.environ)"
    run = launched(tmp_path, connections, program(text, forward=("MY_TOKEN",)))
    assert to_the_end(run, connections).phase == "finished"
    assert run.log("node1", 0, "out").read_text() == "12 True False\n"
    assert "s3cret-value" not in "".join(path.read_text() for path in run.root.rglob("*") if path.is_file())
    assert json.loads(run.plan.read_text())["nodes"][0]["processes"][0]["env"]["MY_TOKEN"] == "***"
    spec = next((tmp_path / "n1").rglob("spec.json"))
    assert os.stat(spec).st_mode & 0o077 == 0


def test_pushed_code_is_where_the_command_starts_and_stays_when_it_is_the_same(
    tmp_path: Path, connections: Connections
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "hello.py").write_text("import sys; print('hello', *sys.argv[1:])")
    said: list[tuple[str, str]] = []
    for _ in range(2):
        job = jobs.Job(
            name="j", command=("python", "hello.py", "a b", "$(id)", "--x='"), code=code, source="j"
        )
        run = runs.launch(
            lab(tmp_path), job, connections, tmp_path / "runs", lambda phase, text: said.append((phase, text))
        )
        assert to_the_end(run, connections).phase == "finished"
        assert run.log("node2", 3, "out").read_text() == "hello a b $(id) --x='\n"
    pushes = [text for phase, text in said if phase == "push code"]
    assert "to 2 of 2 nodes" in pushes[0]
    assert pushes[1].endswith(" B already on 2 nodes")


def test_a_resumed_run_is_the_next_attempt_with_the_same_code_and_all_logs_kept(
    tmp_path: Path, connections: Connections
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "go.py").write_text(
        "import os, sys; a = os.environ['CLUSTERCTL_ATTEMPT']; print(a); sys.exit(a == '1')"
    )
    job = jobs.Job(name="j", command=("python", "go.py"), code=code, source="j")
    run = runs.launch(lab(tmp_path), job, connections, tmp_path / "runs", lambda phase, text: None)
    assert to_the_end(run, connections).phase == "failed"
    (code / "go.py").write_text("raise SystemExit('this came after the launch')")
    runs.resume(run, connections, lambda phase, text: None)
    assert to_the_end(run, connections).phase == "finished"
    assert run.log("node2", 3, "out", attempt=2).read_text() == "2\n"
    firsts = [
        run.log(node, rank, "out", attempt=1).read_text() for node, rank in (("node1", 0), ("node2", 2))
    ]
    assert "1\n" in firsts
    events = [json.loads(line)["event"] for line in run.events.read_text().splitlines()]
    assert events.count("started") == 2
    assert run.read_record().job == job


def test_a_run_that_goes_on_is_not_resumed(tmp_path: Path, connections: Connections) -> None:
    run = launched(tmp_path, connections, program("import time; time.sleep(600)"))
    with pytest.raises(UsageError, match="is running, not ended"):
        runs.resume(run, connections, lambda phase, text: None)
    assert stop_run(run, connections, grace=0.5) == {"node1": 0, "node2": 0}


def test_a_start_that_comes_after_its_stop_starts_nothing(tmp_path: Path, connections: Connections) -> None:
    run = launched(tmp_path, connections, program("pass"))
    to_the_end(run, connections)
    node = run.read_record().cluster.nodes[0]
    where = {"run_dir": str(tmp_path / "n1" / "runs" / "late" / "node1"), "attempt": 1}
    link = connections.of(node)
    assert link.call("stop", {**where, "grace": 0.0})["left"] == 0
    spec = {"run_id": "late", "attempt": 1, "node": "node1", "ranks": [{"rank": 0, "argv": ["sleep", "600"]}]}
    with pytest.raises(ClusterctlError, match="stopped before it started"):
        link.call("start", {"run_dir": where["run_dir"], "spec": spec})


def test_a_reader_who_comes_after_a_restart_sees_the_attempts_that_it_asks_for(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(
        tmp_path, connections, program("import os; print('attempt', os.environ['CLUSTERCTL_ATTEMPT'])")
    )
    to_the_end(run, connections)
    runs.resume(run, connections, lambda phase, text: None)
    to_the_end(run, connections)
    ranks = sum(map(len, run.read_record().ranks.values()))

    def seen(first: int | None) -> list[bytes]:
        return sorted(update.chunk.data for update in KeptWatch(run, first) if update.chunk)

    assert seen(1) == [b"attempt 1\n"] * ranks + [b"attempt 2\n"] * ranks
    assert seen(None) == [b"attempt 2\n"] * ranks


def test_a_reader_who_comes_late_sees_a_half_line_that_never_grew(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(tmp_path, connections, program("print('done', end='')"))
    to_the_end(run, connections)
    watch = KeptWatch(run)
    watch.offsets.update({path: path.stat().st_size for path in run.root.rglob("rank-*.out")})
    ranks = sum(map(len, run.read_record().ranks.values()))
    assert [update.chunk.data for update in watch if update.chunk] == [b"done\n"] * ranks


class Counting(LocalTransport):
    """Notes what each node is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, list[str]] = {}

    def connect(self, node: Node) -> Connection:
        connection = super().connect(node)
        plain = connection.open

        def noted(op: str, params: Mapping[str, Any]) -> PendingRequest:
            self.asked.setdefault(node.name, []).append(op)
            return plain(op, params)

        connection.open = noted  # type: ignore[method-assign]
        return connection


def test_a_run_that_is_checked_started_and_watched_asks_a_node_only_what_is_needed(tmp_path: Path) -> None:
    """Each request costs every node of a large cluster a millisecond: facts and states are not asked for anew."""
    transport = Counting()
    with Connections(transport) as connections:
        for node in lab(tmp_path).nodes:
            query_node(node, connections.of(node), quick=True)
        run = launched(tmp_path, connections, program("pass"))
        with run.hold():
            for _ in Control(run, connections, lines=False, started=True):
                pass
    state = read_state(run)
    assert (
        state is not None
        and state.phase == "finished"
        and [rank.exit_code for rank in state.ranks] == [0] * 4
    )
    assert transport.asked["node2"] == ["hello", "examine", "start", "follow"]
    assert transport.asked["node1"] == ["hello", "examine", "run", "start", "follow"]


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_the_files_of_a_run_come_with_the_start_unless_they_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(runs, "MOST_WITH_START", most)
    transport = Counting()
    with Connections(transport) as connections:
        run = launched(tmp_path, connections, program("pass"))
        assert to_the_end(run, connections).phase == "finished"
    assert ("put" in transport.asked["node2"]) is (most == 0)
    hostfile = Path(NodeFiles(run.read_record().run_dirs["node2"]).hostfile)
    assert hostfile.read_text() == run.hostfile.read_text() and hostfile.stat().st_mode & 0o777 == 0o644


def test_ranks_on_a_node_that_breaks_off_during_a_start_are_recorded_and_ended_later(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = threading.Event()
    start_one, stop_all = runs._start, runs.send_stop

    def start(link: Connection, *plan: Any) -> object:
        answer = start_one(link, *plan)
        if link.node == "node1":
            broken.set()
            raise LinkLost("node1", "the connection broke")
        return answer

    def stop(
        opened: Connections, nodes: Sequence[Node], run: RunDir, request: StopRequest
    ) -> list[Outcome[int]]:
        away = [node for node in nodes if node.name == "node1"]
        others = stop_all(opened, [node for node in nodes if node not in away], run, request)
        return [*others, *(Outcome[int](node, error=LinkLost(node.name, "no answer")) for node in away)]

    monkeypatch.setattr(runs, "_start", start)
    monkeypatch.setattr(runs, "send_stop", stop)
    with pytest.raises(LinkLost, match="node1"):
        launched(tmp_path, connections, program("import time; time.sleep(600)", grace=0.0))
    (root,) = (tmp_path / "runs").iterdir()
    run = RunDir(root)
    assert broken.is_set() and left_of(run) > 0
    assert [entry.node.name for entry in run.read_record().abandoned] == ["node1"]
    assert abandoned.clear(run, connections) == ["node1"]
    assert left_of(run) == 0 and not run.read_record().abandoned


def test_an_attempt_that_nobody_starts_on_a_node_is_lost_there(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "STARTING", 0.5)
    sent: list[Frame] = []
    until = {"run_dir": str(tmp_path), "attempt": 1}
    request = Request(
        1, "follow", {"until": until}, workdir=str(tmp_path), watcher=Watcher(), send_frame=sent.append
    )
    assert follow.follow(request) == {"state": "lost", "report": None}
