"""The readers of files that runs and nodes write, and of reports from nodes.

A value that was read can be summarised, explained and written again. A damaged file that carries a hash is never
accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from clusterctl.agent import bootstrap
from clusterctl.agent.files import fingerprint, transfer, tree_cache
from clusterctl.agent.processes import identity
from clusterctl.agent.ranks import attempts, conflicts, hangs, kernel
from clusterctl.agent.records import AttemptFiles, blank_secrets, read_beat, read_json
from clusterctl.agent.request import Refused
from clusterctl.errors import ClusterctlError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import Job
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import FORMAT, RunRecord, to_json
from clusterctl.jobs.restarts import Restart
from clusterctl.jobs.run_folder import RunDir
from clusterctl.jobs.run_lines import Metric
from clusterctl.logs.times import index_of, offset_since
from clusterctl.runs.causes.cause import Cause, find_cause, read_cause
from clusterctl.runs.controller import history_of
from clusterctl.runs.finish import superseded_steps
from clusterctl.runs.overview import make_overview, read_progress
from clusterctl.runs.query import combine
from clusterctl.runs.state import NodeAnswer, RankState, RunState, read_state
from clusterctl.runs.watching.updates import from_report
from clusterctl.transport.connection import read_answer
from clusterctl.transport.fanout import Outcome
from clusterctl.wire.typed_json import BadValue, parse
from tests.fuzz.inputs import as_json, as_lines, damaged

NODES = (Node("a", "10.0.0.1", "10.0.0.1"), Node("b", "10.0.0.2", "10.0.0.2", devices=(0, 1)))
RECORD = RunRecord(
    run="r-1",
    attempt=2,
    job=Job("r", ("python", "x.py"), env={"A": "1"}, code=Path("/c"), restart=Restart(max=2)),
    cluster=Cluster("lab", NODES),
    run_dirs={"a": "/n/a/r-1", "b": "/n/b/r-1"},
    ranks={"a": (0, 1), "b": (2, 3)},
    devices={"a": (0, 1), "b": (0, 1)},
    created=1.7e9,
    format=FORMAT,
)
FAILED = RankState(1, node="a", device=1, exit_code=1, ended=1.7e9, monotonic=50.0, at=1.7e9)
LAST = Metric("step", 3, facts={"event": "step", "step": 3})
STATE = RunState(Phase.FAILED, {"a": Phase.FAILED, "b": Phase.STOPPED}, (FAILED,), FAILED, LAST)
ANSWER = {
    "supervisor": {"pid": 7, "start_time": 5, "boot_id": "x", "alive": True, "silent": 0.5, "process": "S"},
    "node": {
        "state": "failed",
        "first_failure": {"rank": 1, "exit_code": 1, "ended": 1.7e9, "monotonic": 9.5},
    },
    "ranks": [
        {"rank": 0, "state": "running", "pid": 8, "started": 1.7e9},
        {"rank": 1, "state": "exited", "pid": 9, "exit_code": 1, "signal": None, "ended": 1.7e9},
    ],
    "heartbeats": {"0": {"text": "12     0.2500", "age": 0.5}},
    "pace": {"0": 0.1, "1": 0.3},
}
SUPERVISOR = {"pid": 999_999_999, "start_time": 5, "boot_id": "x", "started": 1.7e9}
SPEC = {
    "run_id": "r-1",
    "attempt": 1,
    "node": "a",
    "ranks": [{"rank": 0, "local_rank": 0, "argv": ["x"], "env": {"T": "secret"}, "cwd": "~"}],
    "grace": 30.0,
    "kind": "npu",
    "devices": [0, 1],
    "secrets": ["T"],
}
EVENTS = [
    {"time": 1.0, "event": "started", "ranks": 4, "attempt": 1, "nodes": ["a"]},
    {"time": 2.0, "event": "restart", "why": "w", "restarts": 1, "stalled": 0, "step": 3},
    {"time": 3.0, "event": "note", "node": "a", "text": "hello"},
    {"time": 4.0, "event": "ended", "phase": "failed", "verdict": "v"},
]
METRICS = [
    {"event": "start", "step": 0, "time": 1.0, "parameters": 100},
    {"event": "step", "step": 1, "steps": 9, "loss": 2.5, "step_seconds": 0.5, "time": 2.0},
    {"event": "eval", "step": 1, "loss": 2.25},
    {"event": "checkpoint", "step": 1, "path": "x", "time": 3.0},
]


def write_again(found: tuple[RunDir, RunRecord]) -> bool:
    run, record = found
    for name in record.cluster.names:
        assert isinstance(record.run_dirs[name], str)
        assert len(record.ranks[name]) == len(record.devices[name])
    assert record.world_size >= 0 and record.full_size > -1 << 80
    run.write_record(record)
    assert run.read_record() == record
    return True


def load_state(folder: Path) -> tuple[RunDir, RunState | None]:
    run = RunDir(folder)
    assert isinstance(run.phase(), Phase)
    return run, read_state(run)


def explain(found: tuple[RunDir, RunState | None]) -> bool:
    """Explain and summarise a state, as `status` does."""
    run, state = found
    assert state is not None
    json.dumps(state.as_json())
    assert find_cause(run, state, 1).title
    overview = make_overview(RECORD, state, read_progress([]), run.read_events(), 1.7e9)
    json.dumps(overview.as_json())
    return True


def run_events(folder: Path) -> bool:
    run = RunDir(folder)
    history = run.read_events()
    lines = run.events.read_bytes().count(b"\n")
    assert len(history.events) + history.damaged == lines, "a line was neither read nor counted"
    for event in history.events:
        history_of(event)
    overview = make_overview(RECORD, STATE, read_progress([]), history, 1.7e9)
    assert all(isinstance(event["text"], str) for event in overview.as_json()["events"])
    return not history.damaged


def run_metrics(folder: Path) -> bool:
    run = RunDir(folder)
    metrics = list(run.metric_lines())
    progress = read_progress(metrics)
    assert progress.left is None or isinstance(progress.left, float)
    superseded_steps(metrics)
    steps = [metric for metric in metrics if metric.kind == "step"]
    assert run.last_step() == (steps[-1] if steps else None)
    return len(metrics) == run.metrics.read_bytes().count(b"\n")


def run_cause(folder: Path) -> bool:
    cause = read_cause(RunDir(folder))
    assert cause is None or isinstance(cause.title, str)
    return cause is not None


def controller_lock(folder: Path) -> bool:
    run = RunDir(folder)
    assert run.controller() is None, "the controller is a process that does not exist"
    with run.hold(0.0) as ours:
        assert ours
    return True


def explain_answer(answer: NodeAnswer) -> bool:
    return explain((RunDir(Path("/nowhere")), combine(RECORD, [Outcome(NODES[0], answer)], None)))


def node_report(data: bytes) -> bool:
    for word in ("failure", "pace", "supervisor", "new"):
        update = from_report("a", word, data)
        assert update.node == "a" and all(seconds >= 0 for seconds in update.pace.values())
    return True


def node_files(folder: Path) -> list[object]:
    """Replace each file of an attempt on a node; return what the agent answers, which the launcher may refuse."""
    found: list[object] = []
    for name in ("supervisor.json", "node.json", "ranks/0.json", "pace.json", "supervisor.beat", "stop.json"):
        files = AttemptFiles(str(folder / name.replace("/", "-")), 1)
        os.makedirs(files.ranks)
        (Path(files.root) / name).write_bytes((folder / "file").read_bytes())
        if name != "supervisor.json":
            Path(files.supervisor).write_text(json.dumps(SUPERVISOR))
        read_json(files.stop)
        read_beat(files.beat)
        found.append(json.loads(json.dumps(attempts.read_state(str(folder / name.replace("/", "-")), 1))))
    return found


def are_answers(found: list[object]) -> bool:
    read = []
    for answer in found:
        try:
            read.append(read_answer(NodeAnswer, answer, "a", "state"))
        except ClusterctlError as error:
            assert error.message.strip(), "a refusal without a message"
    return len(read) == len(found)


def specification(folder: Path) -> dict[str, Any] | None:
    root = folder / "runs" / "r-2" / "a" / "attempts" / "1"
    root.mkdir(parents=True)
    (folder / "spec.json").rename(root / "spec.json")
    (root / "supervisor.json").write_text(json.dumps(identity(os.getpid())))
    conflicts.conflicts(str(folder / "runs" / "r-1" / "a"), SPEC)
    spec = read_json(str(root / "spec.json"))
    if spec is not None:
        attempts.check_spec(spec)
    return spec


def hide_secrets(spec: dict[str, Any] | None) -> bool:
    if spec is not None:
        blank_secrets(AttemptFiles("/nowhere", 1), spec)
    return spec is not None


def heartbeat(folder: Path) -> bool:
    steps = hangs.Steps(str(folder), [0], None, 0.0)
    steps.stale = {0: None}
    for now in (1.0, 2.0):
        steps.find_hung(now)
    steps.pace(100.0)
    return bool(json.dumps(attempts.heartbeats(str(folder))))


LOG = Path("rank-0.out")


def log_index(folder: Path) -> bool:
    (folder / LOG).write_bytes(b"x" * 100)
    return 0 <= offset_since(folder / LOG, 1.5) <= 100


def caches(folder: Path) -> bool:
    rows = tree_cache.load(str(folder / "cache"))
    record = transfer.read_record(str(folder / "cache"))
    # A wrong row only causes another check of the file; but its types must be right.
    assert all(isinstance(name, str) for name in rows)
    assert record is None or isinstance(record.tree, str)
    return bool(rows or record)


def kernel_texts(folder: Path) -> bool:
    path = folder / "memory.events"
    assert all(isinstance(value, int) for value in kernel.read(str(path)).values())
    text = path.read_bytes().decode("utf-8", "replace")
    kernel.counter_of(text, "/nowhere")
    kernel.about(42, 100.0, 9, [(100.0, line) for line in text.splitlines()])
    return True


AGENT_FILE = "import os\nprint(os.getpid())\n" * 20


def agent_file(folder: Path) -> bool:
    """Damage a file of an installed agent: its checksum must expose the damage."""
    (folder / "clusterctl").mkdir()
    path = (folder / "x.py").rename(folder / "clusterctl" / "x.py")
    whole = bootstrap.is_whole(str(folder), bootstrap.sums({"x.py": AGENT_FILE}))
    assert whole == (path.read_bytes() == AGENT_FILE.encode()), "a damaged file was accepted"
    return whole


BUILT = bytes(range(200)) * 10


def built_data(folder: Path) -> bool:
    """Damage a file of training data: the hash in its manifest must expose the damage."""
    outputs = {"bin": {"bytes": len(BUILT), "sha256": hashlib.sha256(BUILT).hexdigest()}}
    (folder / "d.manifest.json").write_text(json.dumps({"outputs": outputs}))
    faults = _faults_of(folder)
    assert bool(faults) == ((folder / "d.bin").read_bytes() != BUILT), "a damaged file was accepted"
    return not faults


def build_manifest(folder: Path) -> bool:
    (folder / "d.bin").write_bytes(BUILT)
    faults = _faults_of(folder)
    assert all(fault.strip() for fault in faults)
    return not faults


def _faults_of(folder: Path) -> list[str]:
    files = {}
    for path in folder.iterdir():
        size = path.stat().st_size
        files[path.name] = [size, fingerprint.fingerprint_of(str(path), size)]
    return [fault for name in files for fault in fingerprint.faults_of(str(folder), name, files)]


TREE = {
    "tree": "t",
    "version": 1,
    "entries": [["a", "f", 420, 3, "x"]],
    "rows": [["a", 1, 2, 3, 4, "h", "d"]],
}
KERNEL = b"low 0\nhigh 0\nmax 2\noom 1\noom_kill 1\n"
CGROUPS = (
    b"0::/user.slice/x\n5:memory:/docker/abc\nOut of memory: Killed process 42 (python) total-vm:9000kB\n"
)
OLD_RECORD = {key: value for key, value in to_json(RECORD).items() if key not in ("format", "size", "spares")}
MANIFEST = {"outputs": {"bin": {"bytes": len(BUILT), "sha256": "0" * 64}}}

RUN = RunDir(Path())


READERS = {
    "record": damaged(
        as_json(to_json(RECORD), OLD_RECORD),
        lambda folder: (RunDir(folder), RunDir(folder).read_record()),
        write_again,
        RUN.record.name,
    ),
    "state": damaged(as_json(STATE.as_json()), load_state, explain, RUN.state.name),
    "events": damaged(as_lines(EVENTS), run_events, file=RUN.events.name, refusals=()),
    "metrics": damaged(as_lines(METRICS), run_metrics, file=RUN.metrics.name, refusals=()),
    "cause": damaged(
        as_json(Cause("t", ("line",), "/log").as_json()), run_cause, file=RUN.cause.name, refusals=()
    ),
    "lock": damaged(as_json(SUPERVISOR), controller_lock, file=RUN.lock.name, refusals=()),
    "nodestate": damaged(
        as_json(ANSWER),
        lambda data: read_answer(NodeAnswer, parse(data), "a", "state"),
        explain_answer,
        refusals=(BadValue, ClusterctlError),
    ),
    "report": damaged(
        as_json(ANSWER["pace"], {"rank": 1, "hang": 9.5}, ANSWER["supervisor"]), node_report, refusals=()
    ),
    "nodefiles": damaged(
        as_json(*ANSWER["ranks"], ANSWER["node"], SUPERVISOR, ANSWER["pace"]),
        node_files,
        are_answers,
        "file",
        refusals=(),
    ),
    "spec": damaged(as_json(SPEC), specification, hide_secrets, "spec.json", refusals=(Refused,)),
    "heartbeat": damaged([b"12     0.2500\npause", b"7\n"], heartbeat, file="rank-0", refusals=()),
    "logindex": damaged([b"1.000 10\n2.000 50\n3.500 90\n"], log_index, file=index_of(LOG).name, refusals=()),
    "cache": damaged(as_json(TREE), caches, file="cache", refusals=()),
    "kernel": damaged([KERNEL, CGROUPS], kernel_texts, file="memory.events", refusals=()),
    "agentfile": damaged([AGENT_FILE.encode()], agent_file, file="x.py", refusals=()),
    "built": damaged([BUILT], built_data, file="d.bin", refusals=()),
    "manifest": damaged(as_json(MANIFEST), build_manifest, file="d.manifest.json", refusals=()),
}
