"""Logs of runs on real SSH nodes: connections that are cut, following, folding, pulling."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.backends.reach import transport_to
from clusterctl.errors import ClusterctlError
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.jobs.job import Job
from clusterctl.jobs.run_folder import NodeFiles
from clusterctl.runs import start as runs
from clusterctl.runs.finish import finish
from clusterctl.runs.watching.watch import RunWatcher
from clusterctl.transport.fanout import Connections
from tests.live.conftest import Shell

pytestmark = pytest.mark.live

CUTS = 20
CHATTER = """
import os, sys, time
end, n = os.environ["CLUSTERCTL_RUN_DIR"] + "/enough", 0
while not os.path.exists(end):
    for _ in range(20):
        print(n, "x" * (n % 300), flush=n % 7 == 0)
        n += 1
    sys.stderr.write(f"{n}\\r")
    time.sleep(0.01)
print("the end, without one", end="")
"""


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_more(path: Path) -> None:
    size = path.stat().st_size if path.exists() else 0
    wait_for(lambda: path.exists() and path.stat().st_size > size)


# Ends the sshd that a process ($1) was started by: a shell may stand between the two.
CUT = r"""
pid=$1
while [ "$pid" -gt 1 ]; do
    while read -r key value; do [ "$key" = PPid: ] && parent=$value; done </proc/$pid/status
    pid=$parent
    read -r name </proc/$pid/comm
    case $name in sshd*) exec kill -9 "$pid" ;; esac
done
exit 1
"""


@pytest.mark.timeout(240)
def test_twenty_cut_connections_lose_and_double_no_line(tmp_path: Path, cluster_file: Path) -> None:
    cluster = inventory_cluster.load(cluster_file)
    job = Job(name="chatter", command=("python3", "-c", CHATTER), source="test")
    cuts = 0

    def cut() -> None:
        """Each time some lines came, end the agent that sends them or the sshd before it, as a broken line does."""
        nonlocal cuts
        while cuts < CUTS:
            node = cluster.nodes[cuts % 2]
            home = run.log(node.name, 2 * (cuts % 2), "out")
            wait_for_more(home)
            try:
                agent = connections.of(node).hello().pid
                argv = ["kill", "-9", str(agent)] if cuts % 4 < 2 else ["sh", "-c", CUT, "sh", str(agent)]
                cuts += others.of(node).run(argv).exit_code == 0
            except ClusterctlError:
                # The connection was just gone.
                continue
        for node in cluster.nodes:
            others.of(node).put(f"{run.read_record().run_dirs[node.name]}/enough", b"")

    with Connections(transport_to(cluster)) as connections, Connections(transport_to(cluster)) as others:
        run = runs.launch(cluster, job, connections, tmp_path / "runs", lambda *_: None)
        seen: dict[tuple[str, int, str], bytes] = defaultdict(bytes)
        cutter = threading.Thread(target=cut, daemon=True)
        cutter.start()
        for update in RunWatcher(run, connections):
            if update.chunk:
                seen[update.chunk.node, update.chunk.rank, update.chunk.stream] += update.chunk.data
        cutter.join(60)
        assert cuts == CUTS
        assert finish(run, connections).phase == "finished"
        for node, rank in (("node1", 0), ("node1", 1), ("node2", 2), ("node2", 3)):
            for stream in ("out", "err"):
                remote = NodeFiles(run.read_record().run_dirs[node]).log(rank, stream)
                kept = run.log(node, rank, stream).read_bytes()
                assert kept == connections.of(cluster.select(node).nodes[0]).get(remote)
                if stream == "out":
                    assert seen[node, rank, stream] == kept + b"\n"
            lines = run.log(node, rank, "out").read_text().splitlines()
            assert [int(line.split()[0]) for line in lines[:-1]] == list(range(len(lines) - 1))


TIMED = """
import os, sys, time
rank = int(os.environ["RANK"])
time.sleep(0.3 * rank)
for number in range(3):
    print(f"out {rank} {number}", flush=True)
    time.sleep(0.6)
    print(f"err {rank} {number}", file=sys.stderr, flush=True)
    time.sleep(0.6)
"""


def test_lines_of_ranks_and_streams_are_shown_in_the_order_in_which_they_were_written(shell: Shell) -> None:
    (shell.folder / "timed.py").write_text(TIMED)
    assert shell("launch", "-n", "node1", "--", "python3", "timed.py").returncode == 0
    lines = shell("logs", "show", "last", "--rank", "0,1", "--no-prefix").stdout.splitlines()
    assert lines == [
        f"{stream} {rank} {number}" for number in range(3) for stream in ("out", "err") for rank in (0, 1)
    ]
    told = [
        json.loads(line) for line in shell("logs", "show", "last", "-r", "0,1", "--json").stdout.splitlines()
    ]
    times = [line["time"] for line in told]
    assert times == sorted(times) and 2.5 < times[-1] - times[0] < 25
    middle = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(times[6]))
    early = shell("logs", "show", "last", "-r", "0,1", "--until", middle, "--no-prefix").stdout.splitlines()
    late = shell("logs", "show", "last", "-r", "0,1", "--since", middle, "--no-prefix").stdout.splitlines()
    assert early + late == lines and 3 <= len(early) <= 7
    ends = shell("logs", "show", "last", "-r", "0,1", "--tail", "2", "-t", "--no-prefix").stdout.splitlines()
    assert [line[24:] for line in ends] == lines[-2:]
    around = shell("logs", "show", "last", "-r", "0,1", "-g", "err 0 1", "-B", "1", "--no-prefix").stdout
    assert around.splitlines() == ["out 0 1", "err 0 1"]


VERBOSE = """
import time
print("the first line", flush=True)
for part in range(10):
    for number in range(50000):
        print(f"{part} {number}", "x" * 100)
    time.sleep(0.5)
print("the last line")
"""


def test_a_log_takes_no_more_of_a_disk_than_its_limit(shell: Shell) -> None:
    (shell.folder / "verbose.py").write_text(VERBOSE)
    job = {"command": ["python3", "verbose.py"], "code": ".", "nodes": "node1", "devices": 1}
    (shell.folder / "job.yaml").write_text(json.dumps({**job, "log_limit": "16MB"}))
    done = shell("launch", "job.yaml", timeout=300)
    assert done.returncode == 0, done.stderr
    size = 10 * sum(len(f"0 {number} ") + 101 for number in range(50000)) + 29
    home = Path(os.environ.get("CLUSTERCTL_CLUSTER", shell.env["CLUSTERCTL_CLUSTER"])).parent
    here = list((shell.folder / "runs").glob("*/attempts/1/logs/node1/rank-0.out"))
    there = [path for path in home.rglob("logs/rank-0.out") if path.stat().st_size == size]
    for log in (*here, *there):
        status = log.stat()
        # A log grows between two checks.
        assert status.st_size == size and status.st_blocks * 512 < 45 << 20, (log, status)
    assert here and there
    shown = shell("logs", "show", "last").stdout.splitlines()
    assert shown[0] == "node1:0 the first line" and shown[-1] == "node1:0 the last line"
    (gap,) = (index for index, line in enumerate(shown) if "of this log were dropped: log_limit" in line)
    assert 1000 < gap < len(shown) - 1000 and max(map(len, shown)) < 150
    assert shell("logs", "pull", "last", "pulled").returncode == 0
    (text,) = (shell.folder / "pulled").rglob("rank-0.txt")
    assert text.stat().st_size < 45 << 20 and b"\0" not in text.read_bytes()


def test_logs_are_followed_folded_and_pulled(shell: Shell, tmp_path: Path) -> None:
    code = """
import os, sys, time
rank = os.environ["RANK"]
print("loading\\nstep 1 loss", rank, flush=True)
sys.stderr.write("10%\\r50%\\r100%\\n")
log = os.path.expanduser("~/ascend/log/debug/plog")
os.makedirs(log, exist_ok=True)
open(f"{log}/plog-{os.getpid()}_20260101000000000.log", "w").write("mine")
open(f"{log}/plog-1_20260101000000000.log", "w").write("another's")
time.sleep(1)
print("done", end="")
"""
    started = shell("launch", "--no-code", "--detach", "--", "python3", "-c", code)
    assert started.returncode == 0, started.stderr
    followed = shell("logs", "tail", "last", "-f", "--rank", "0-3", "--exclude", "%")
    assert followed.returncode == 0, followed.stderr
    wanted = [
        f"node{1 + rank // 2}:{rank} {text}"
        for rank in range(4)
        for text in ("loading", f"step 1 loss {rank}", "done")
    ]
    assert sorted(followed.stdout.splitlines()) == sorted(wanted)
    assert shell("logs", "tail", "last", "-n", "1", "--rank", "1", "--no-prefix").stdout == "100%\ndone\n"
    assert (
        shell("logs", "show", "last", "--since", "1h", "--rank", "1", "--node", "node1").stdout.count("\n")
        == 4
    )
    assert shell("logs", "show", "last", "--fold").stdout.splitlines() == [
        "[0-3] loading", "[0] step 1 loss 0", "[1] step 1 loss 1", "[2] step 1 loss 2", "[3] step 1 loss 3",
        "[0-3] done", "[0-3] 100%",
    ]  # fmt: skip
    fuzzy = shell("logs", "show", "last", "--fold", "--fuzzy", "--json", "--grep", "step").stdout
    everybody = {"ranks": [0, 1, 2, 3], "nodes": ["node1", "node2"], "times": 4}
    assert json.loads(fuzzy) == {**everybody, "text": "step # loss #"}
    pulled = shell("logs", "pull", "last", str(tmp_path / "out"), "--json")
    assert pulled.returncode == 0, pulled.stderr
    files = json.loads(pulled.stdout)["files"]
    place = tmp_path / "out" / "attempt-1"
    assert (place / "node1" / "rank-0.txt").read_bytes() == b"loading\nstep 1 loss 0\ndone\n10%\r50%\r100%\n"
    assert {f"attempt-1/node{1 + rank // 2}/rank-{rank}.txt" for rank in range(4)} <= set(files)
    assert all((tmp_path / "out" / name).is_file() for name in files)
    plogs = sorted((place / "node1" / "process_log/debug/plog").iterdir())
    assert [path.read_text() for path in plogs] == ["mine", "mine"]
    assert shell("logs", "pull", "last", str(tmp_path / "out")).returncode == 2
    assert shell("logs", "pull", "last", "--dry-run").stdout.count("rank-") == 4
