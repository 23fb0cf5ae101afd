"""Fuzz the readers of files that runs and nodes write, and of reports from nodes.

Every input is read, or refused with a message. A value that was read can be summarised, explained and
written again. A damaged file that carries a hash is never accepted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from bench.fuzz.inputs import mutate_json
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


def damage(random: Random, seeds: list[bytes]) -> bytes:
    """Return one of the seeds after damage: flipped bits, cuts, overwritten bytes, other types, or deep nesting."""
    data = random.choice(seeds)
    roll = random.randrange(10)
    if roll < 4 and data[:1] in (b"{", b"["):
        with contextlib.suppress(ValueError):
            return mutate_json(random, [data.decode()])
    if roll == 4:
        return data[: random.randrange(len(data) + 1)]
    if roll == 5:
        deep = random.choice((b"[", b'{"a":', b'[{"ranks":')) * random.choice((10, 900, 40_000))
        return deep if random.random() < 0.5 else data[:-2] + b', "deep": ' + deep + data[-2:]
    if roll == 6:
        begin, size = random.randrange(len(data) + 1), random.choice((1, 16, 512))
        return data[:begin] + random.choice((b"\0", b"\xff", b" ", b"\n")) * size + data[begin + size :]
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def as_json(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def as_lines(values: list[Any]) -> list[bytes]:
    return ["".join(json.dumps(value) + "\n" for value in values).encode()]


@contextlib.contextmanager
def a_folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="clusterctl-fuzz-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def in_words(error: Exception) -> str:
    text = error.message if isinstance(error, ClusterctlError) else str(error)
    assert text.strip(), "a refusal without a message"
    return "refused"


def run_record(data: bytes) -> str:
    with a_folder() as folder:
        run = RunDir(folder)
        run.record.write_bytes(data)
        try:
            record = run.read_record()
        except ClusterctlError as error:
            return in_words(error)
        for name in record.cluster.names:
            assert isinstance(record.run_dirs[name], str)
            assert len(record.ranks[name]) == len(record.devices[name])
        assert record.world_size >= 0 and record.full_size > -1 << 80
        run.write_record(record)
        assert run.read_record() == record
    return "read"


def run_state(data: bytes) -> str:
    with a_folder() as folder:
        run = RunDir(folder)
        run.state.write_bytes(data)
        assert isinstance(run.phase(), Phase)
        try:
            state = read_state(run)
        except ClusterctlError as error:
            return in_words(error)
        assert state is not None
        _use(run, state)
    return "read"


def _use(run: RunDir, state: RunState) -> None:
    """Explain and summarise a state, as `status` does."""
    json.dumps(state.as_json())
    assert find_cause(run, state, 1).title
    overview = make_overview(RECORD, state, read_progress([]), run.read_events(), 1.7e9)
    json.dumps(overview.as_json())


def run_events(data: bytes) -> str:
    with a_folder() as folder:
        run = RunDir(folder)
        run.events.write_bytes(data)
        history = run.read_events()
        lines = data.count(b"\n")
        assert len(history.events) + history.damaged == lines, "a line was neither read nor counted"
        for event in history.events:
            history_of(event)
        overview = make_overview(RECORD, STATE, read_progress([]), history, 1.7e9)
        assert all(isinstance(event["text"], str) for event in overview.as_json()["events"])
    return "refused" if history.damaged else "read"


def run_metrics(data: bytes) -> str:
    with a_folder() as folder:
        run = RunDir(folder)
        run.metrics.write_bytes(data)
        metrics = list(run.metric_lines())
        progress = read_progress(metrics)
        assert progress.left is None or isinstance(progress.left, float)
        superseded_steps(metrics)
        steps = [metric for metric in metrics if metric.kind == "step"]
        assert run.last_step() == (steps[-1] if steps else None)
    return "read" if len(metrics) == data.count(b"\n") else "refused"


def run_cause(data: bytes) -> str:
    with a_folder() as folder:
        run = RunDir(folder)
        run.cause.write_bytes(data)
        cause = read_cause(run)
        assert cause is None or isinstance(cause.title, str)
    return "read" if cause else "refused"


def controller_lock(data: bytes) -> str:
    with a_folder() as folder:
        run = RunDir(folder)
        run.lock.write_bytes(data)
        assert run.controller() is None, "the controller is a process that does not exist"
        with run.hold(0.0) as ours:
            assert ours
    return "read"


def node_answer(data: bytes) -> str:
    try:
        answer = read_answer(NodeAnswer, parse(data), "a", "state")
    except (BadValue, ClusterctlError) as error:
        return in_words(error)
    with a_folder() as folder:
        _use(RunDir(folder), combine(RECORD, [Outcome(NODES[0], answer)], None))
    return "read"


def node_report(data: bytes) -> str:
    for word in ("failure", "pace", "supervisor", "new"):
        update = from_report("a", word, data)
        assert update.node == "a" and all(seconds >= 0 for seconds in update.pace.values())
    return "read"


def node_files(data: bytes) -> str:
    """Replace each file of an attempt on a node: the agent must answer, and the launcher must accept or refuse it."""
    output = "read"
    for name in ("supervisor.json", "node.json", "ranks/0.json", "pace.json", "supervisor.beat", "stop.json"):
        with a_folder() as folder:
            files = AttemptFiles(str(folder), 1)
            os.makedirs(files.ranks)
            (Path(files.root) / name).write_bytes(data)
            if name != "supervisor.json":
                Path(files.supervisor).write_text(json.dumps(SUPERVISOR))
            read_json(files.stop)
            read_beat(files.beat)
            answer = json.loads(json.dumps(attempts.read_state(str(folder), 1)))
            try:
                read_answer(NodeAnswer, answer, "a", "state")
            except ClusterctlError as error:
                output = in_words(error)
    return output


def specification(data: bytes) -> str:
    with a_folder() as folder:
        root = folder / "runs" / "r-2" / "a" / "attempts" / "1"
        root.mkdir(parents=True)
        (root / "spec.json").write_bytes(data)
        (root / "supervisor.json").write_text(json.dumps(identity(os.getpid())))
        conflicts.conflicts(str(folder / "runs" / "r-1" / "a"), SPEC)
        spec = read_json(str(root / "spec.json"))
        if spec is None:
            return "refused"
        try:
            attempts.check_spec(spec)
        except Refused as error:
            return in_words(error)
        blank_secrets(AttemptFiles(str(folder), 1), spec)
    return "read"


def heartbeat(data: bytes) -> str:
    with a_folder() as folder:
        (folder / "rank-0").write_bytes(data)
        steps = hangs.Steps(str(folder), [0], None, 0.0)
        steps.stale = {0: None}
        for now in (1.0, 2.0):
            steps.find_hung(now)
        steps.pace(100.0)
        json.dumps(attempts.heartbeats(str(folder)))
    return "read"


def log_index(data: bytes) -> str:
    with a_folder() as folder:
        log = folder / "rank-0.out"
        log.write_bytes(b"x" * 100)
        index_of(log).write_bytes(data)
        assert 0 <= offset_since(log, 1.5) <= 100
    return "read"


def caches(data: bytes) -> str:
    with a_folder() as folder:
        path = folder / "cache"
        path.write_bytes(data)
        rows = tree_cache.load(str(path))
        record = transfer.read_record(str(path))
        # A wrong row only causes another check of the file; but its types must be right.
        assert all(isinstance(name, str) for name in rows)
        assert record is None or isinstance(record.tree, str)
    return "read" if rows or record else "refused"


def kernel_texts(data: bytes) -> str:
    with a_folder() as folder:
        path = folder / "memory.events"
        path.write_bytes(data)
        assert all(isinstance(value, int) for value in kernel.read(str(path)).values())
    kernel.counter_of(data.decode("utf-8", "replace"), "/nowhere")
    text = data.decode("utf-8", "replace")
    kernel.about(42, 100.0, 9, [(100.0, line) for line in text.splitlines()])
    return "read"


AGENT_FILE = "import os\nprint(os.getpid())\n" * 20


def agent_file(data: bytes) -> str:
    """Damage a file of an installed agent: its checksum must expose the damage."""
    with a_folder() as folder:
        (folder / "clusterctl").mkdir()
        (folder / "clusterctl" / "x.py").write_bytes(data)
        whole = bootstrap.is_whole(str(folder), bootstrap.sums({"x.py": AGENT_FILE}))
        assert whole == (data == AGENT_FILE.encode()), "a damaged file was accepted"
    return "read" if whole else "refused"


BUILT = bytes(range(200)) * 10


def built_data(data: bytes) -> str:
    """Damage a file of training data: the hash in its manifest must expose the damage."""
    import hashlib

    with a_folder() as folder:
        (folder / "d.bin").write_bytes(data)
        outputs = {"bin": {"bytes": len(BUILT), "sha256": hashlib.sha256(BUILT).hexdigest()}}
        (folder / "d.manifest.json").write_text(json.dumps({"outputs": outputs}))
        faults = _faults_of(folder)
        assert bool(faults) == (data != BUILT), "a damaged file was accepted"
    return "refused" if faults else "read"


def build_manifest(data: bytes) -> str:
    with a_folder() as folder:
        (folder / "d.bin").write_bytes(BUILT)
        (folder / "d.manifest.json").write_bytes(data)
        faults = _faults_of(folder)
        assert all(fault.strip() for fault in faults)
    return "refused" if faults else "read"


def _faults_of(folder: Path) -> list[str]:
    files = {}
    for path in folder.iterdir():
        size = path.stat().st_size
        files[path.name] = [size, fingerprint.fingerprint_of(str(path), size)]
    return [fault for name in files for fault in fingerprint.faults_of(str(folder), name, files)]


def maker(seeds: list[bytes]) -> Callable[[Random], bytes]:
    return lambda random: damage(random, seeds)


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

# For each reader the function that makes inputs, and the function that checks the rules for an input.
READERS: dict[str, tuple[Callable[[Random], bytes], Callable[[bytes], str]]] = {
    "record": (maker(as_json(to_json(RECORD), OLD_RECORD)), run_record),
    "state": (maker(as_json(STATE.as_json())), run_state),
    "events": (maker(as_lines(EVENTS)), run_events),
    "metrics": (maker(as_lines(METRICS)), run_metrics),
    "cause": (maker(as_json(Cause("t", ("line",), "/log").as_json())), run_cause),
    "lock": (maker(as_json(SUPERVISOR)), controller_lock),
    "nodestate": (maker(as_json(ANSWER)), node_answer),
    "report": (maker(as_json(ANSWER["pace"], {"rank": 1, "hang": 9.5}, ANSWER["supervisor"])), node_report),
    "nodefiles": (maker(as_json(*ANSWER["ranks"], ANSWER["node"], SUPERVISOR, ANSWER["pace"])), node_files),
    "spec": (maker(as_json(SPEC)), specification),
    "heartbeat": (maker([b"12     0.2500\npause", b"7\n"]), heartbeat),
    "logindex": (maker([b"1.000 10\n2.000 50\n3.500 90\n"]), log_index),
    "cache": (maker(as_json(TREE)), caches),
    "kernel": (maker([KERNEL, CGROUPS]), kernel_texts),
    "agentfile": (maker([AGENT_FILE.encode()]), agent_file),
    "built": (maker([BUILT]), built_data),
    "manifest": (maker(as_json(MANIFEST)), build_manifest),
}
