"""Name the files of a run, here and on its nodes, and read and write those that are here."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import posixpath
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.agent.processes import read_limited
from clusterctl.errors import UsageError, did_you_mean
from clusterctl.files import InFolder, add_lines, make_private_folder, replace_file
from clusterctl.inventory.cluster import Cluster
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.record import Placement, RunRecord, from_json, placement_of, to_json
from clusterctl.jobs.run_lines import Event, Events, Metric, read_event, read_metric
from clusterctl.jobs.run_lock import hold_lock, owner_of
from clusterctl.wire import contract
from clusterctl.wire.typed_json import BadValue, parse

# Limit of bytes of a JSON file in the run folder; the record of 10,000 nodes has 10 MB.
LARGEST_JSON = 256 << 20
# Limit of bytes of a line of events or metrics; a longer line counts as damaged.
LONGEST_LINE = 1 << 20
# Bytes at the end of the metrics in which the last step is looked for.
METRICS_TAIL = 1 << 14


def make_runs(folder: Path) -> Path:
    """Create the folder of runs before anything starts, and return it; raise a UsageError if it is not writable."""
    reason = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "you may not write to it"
    except OSError as problem:
        reason = problem.strerror or str(problem)
    if reason:
        raise UsageError(
            f"{folder}: cannot keep runs here: {reason}",
            "name another folder with $CLUSTERCTL_RUNS, or with `runs` in clusterctl.yaml",
        )
    return folder


def new_run_id(name: str) -> str:
    """Return a new unique id such as `demo-1120-142501-3fa9`; ids of one name sort by time."""
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def new_run(name: str, runs: Path) -> RunDir:
    """Return the folder of a new run, before anything starts, so that an interrupt handler knows it."""
    return RunDir(make_runs(runs) / new_run_id(name))


class OnNode:
    """The path of a file in the folder of a run on a node."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: NodeFiles, kind: type[object]) -> str:
        return posixpath.join(owner.root, self._name)


@dataclass(frozen=True)
class NodeFiles:
    """Name the files of a run on one of its nodes."""

    root: str
    attempt: int = 1

    @property
    def attempt_dir(self) -> str:
        return posixpath.join(self.root, "attempts", str(self.attempt))

    train_config = OnNode(contract.TRAIN_CONFIG_FILE)
    rank_table = OnNode("rank_table.json")
    hostfile = OnNode("hostfile")
    mpi_links = OnNode("mpi_links.py")
    """The program that links the nodes for mpirun."""
    metrics = OnNode(contract.METRICS_FILE)
    checkpoints = OnNode(contract.CHECKPOINT_DIR)

    @property
    def plogs(self) -> str:
        """CANN's logs of this attempt's processes, including those that a wrapper script starts."""
        return posixpath.join(self.attempt_dir, "plogs")

    @property
    def npu_info(self) -> str:
        """The output of npu-smi at the start of the attempt."""
        return posixpath.join(self.attempt_dir, "npu_info_before.txt")

    def result(self, rank: int) -> str:
        """Return the path of the result of a function call on a rank."""
        return posixpath.join(self.root, contract.RESULTS_DIR, f"attempt-{self.attempt}-rank-{rank}")

    def error_file(self, rank: int) -> str:
        """The file in which torch records the exception of a rank."""
        return posixpath.join(self.attempt_dir, f"error-rank-{rank}.json")

    def log(self, rank: int, stream: str) -> str:
        """The raw output of a rank; stream is "out" or "err"."""
        return posixpath.join(self.attempt_dir, "logs", f"rank-{rank}.{stream}")


@dataclass(frozen=True)
class RunDir:
    """Name, read and write the files of a run on the launching machine. Only its owner may read them."""

    root: Path

    @property
    def run_id(self) -> str:
        return self.root.name

    record = InFolder("run.json")

    @property
    def record_copy(self) -> Path:
        """Return the second copy of the record: without a record no command reaches the run's ranks."""
        return self.record.with_suffix(".copy")

    plan = InFolder("plan.json")
    rank_table = InFolder("rank_table.json")
    hostfile = InFolder("hostfile")
    events = InFolder("events.jsonl")
    state = InFolder("state.json")
    cause = InFolder("cause.json")
    """Why the run failed. The folder of each attempt has such a file too."""

    def attempt_cause(self, attempt: int) -> Path:
        return self.root / "attempts" / str(attempt) / "cause.json"

    def attempt_state(self, attempt: int) -> Path:
        """How an attempt ended, with the exit status of every rank."""
        return self.root / "attempts" / str(attempt) / "state.json"

    def roll_call(self, attempt: int) -> Path:
        """Where each rank of an attempt that hung stood."""
        return self.root / "attempts" / str(attempt) / "roll_call.json"

    metrics = InFolder(contract.METRICS_FILE)
    log_steps = InFolder("steps.jsonl")
    """The steps of a program, as they were found in its output."""

    @property
    def progress(self) -> Path:
        """The file with the run's steps: the metrics that it wrote, else the steps found in its output."""
        with contextlib.suppress(OSError):
            if self.metrics.stat().st_size:
                return self.metrics
        return self.log_steps if self.log_steps.exists() else self.metrics

    checkpoints = InFolder(contract.CHECKPOINT_DIR)
    lock = InFolder("controller.lock")
    """The lock that the run's controller holds; it contains the identity of that process."""
    stop_asked = InFolder("stop.json")
    """A file that exists after a stop of the run was requested: no further attempt may start."""
    batch_file = InFolder("batch.sh")
    """What a batch system runs; only a run that was submitted to one has it."""

    def make(self) -> None:
        """Create the run's folder."""
        make_private_folder(self.root)

    clearer_lock = InFolder("clearer.lock")
    """The lock of the process that stops what is left on lost nodes after the end of the run."""

    def hold(self, patience: float = 1.0) -> contextlib.AbstractContextManager[bool]:
        """Become the run's controller; yield False if a living process is the controller already.

        Another process may hold the lock for a moment to examine the run: wait for it up to `patience` seconds.
        """
        return hold_lock(self.lock, patience, self.controller)

    def hold_clearer(self) -> contextlib.AbstractContextManager[bool]:
        """Become the process that stops what is left; yield False if there is one already."""
        return hold_lock(self.clearer_lock, 0.0, self.clearer)

    def controller(self) -> int | None:
        """Return the pid of the living process that the lock file names, without taking the lock."""
        return owner_of(self.lock, self._is_held_elsewhere)

    def clearer(self) -> int | None:
        """Return the pid of the living process that stops what is left on lost nodes."""
        return owner_of(self.clearer_lock)

    def _is_held_elsewhere(self) -> bool:
        """Return whether a process on another machine holds the lock, as the controller inside a batch job does."""
        if not self.batch_file.exists():
            return False
        try:
            with self.lock.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def is_watched(self) -> bool:
        """Return True if a living process is the run's controller."""
        return self.controller() is not None

    controller_log = InFolder("controller.log")

    def logs(self, attempt: int = 1) -> Path:
        return self.root / "attempts" / str(attempt) / "logs"

    def log(self, node: str, rank: int, stream: str, attempt: int = 1) -> Path:
        return self.logs(attempt) / node / f"rank-{rank}.{stream}"

    def write_json(self, path: Path, value: Any) -> None:
        """Replace a file of the run by `value` as JSON."""
        self.make()
        if path.parent != self.root:
            make_private_folder(path.parent)
        replace_file(path, _as_text(value, indent=2), 0o600)

    def read_json(self, path: Path) -> Any:
        """Return the value of a JSON file of the run; raise a UsageError if it cannot be read."""
        try:
            return parse(_limited(path))
        except (OSError, BadValue) as error:
            raise damaged(path, error) from None

    def write_record(self, record: RunRecord) -> None:
        for path in (self.record_copy, self.record):
            self.write_json(path, to_json(record))

    def read_record(self) -> RunRecord:
        """Return what `launch` recorded about the run; raise a UsageError if the record is damaged."""
        try:
            return from_json(self.read_json(self.record))
        except BadValue as error:
            raise damaged(self.record, error) from None

    def read_placement(self, clusters: dict[str, Cluster]) -> tuple[Placement, Cluster]:
        """Return where the run's folders are, and its cluster, one of `clusters` if it was read before."""
        try:
            return placement_of(self.read_json(self.record), clusters)
        except BadValue as error:
            raise damaged(self.record, error) from None

    def phase(self) -> Phase:
        """Return the last recorded phase: RUNNING before the first record, UNKNOWN if the file is damaged."""
        if not self.state.exists():
            return Phase.RUNNING
        try:
            value = parse(_limited(self.state))
            return Phase(value.get("phase", Phase.RUNNING)) if isinstance(value, dict) else Phase.UNKNOWN
        except (OSError, ValueError):
            return Phase.UNKNOWN

    def add_event(self, kind: str, **facts: Any) -> None:
        """Append one event to the run's history."""
        line = _as_text(Event(round(time.time(), 3), kind, facts).as_json())
        self.make()
        add_lines(self.events, line)

    def read_events(self) -> Events:
        """Return the run's history, oldest first, and how many damaged lines it has."""
        events = [read_event(_value_of(line)) for line in whole_lines(self.events)]
        whole = tuple(event for event in events if event is not None)
        return Events(whole, len(events) - len(whole))

    def event_lines(self) -> Iterator[Event]:
        """Yield the run's history, oldest first, without damaged lines."""
        yield from self.read_events().events

    def metric_lines(self, damaged: Counter[str] | None = None) -> Iterator[Metric]:
        """Yield the trainer's metrics as far as they were copied here, without damaged lines.

        `damaged` counts those by the file's name.
        """
        for line in whole_lines(self.progress):
            value = _value_of(line)
            if value is None and damaged is not None:
                damaged[self.progress.name] += 1
            if (metric := read_metric(value)) is not None:
                yield metric

    def written_metrics(self) -> dict[Path, int]:
        """Return by file how many bytes of metrics were copied to this machine."""
        return {path: path.stat().st_size for path in (self.metrics, self.log_steps) if path.exists()}

    def last_step(self) -> Metric | None:
        """Return the last step in the local copy of the metrics; usually only the end of the file is read."""
        try:
            with self.progress.open("rb") as file:
                start = max(0, os.fstat(file.fileno()).st_size - METRICS_TAIL)
                file.seek(start)
                lines = file.read(METRICS_TAIL).split(b"\n")
        except OSError:
            return None
        # The last piece has no line break, and the first one may be an incomplete line.
        for line in reversed(lines[1 if start else 0 : -1]):
            if (metric := _step_of(line)) is not None:
                return metric
        if not start:
            return None
        return next(filter(None, map(_step_of, reversed(list(whole_lines(self.progress))))), None)


def damaged(path: Path, why: object) -> UsageError:
    """Return the error for a file of a run that cannot be used."""
    reason = why.strerror if isinstance(why, OSError) else why
    remedy, copy = "the run's folder is damaged; see `clusterctl runs`", path.with_suffix(".copy")
    if copy.is_file():
        remedy = f"{copy} has the same content: `{shlex.join(['cp', str(copy), str(path)])}`"
    return UsageError(f"{path}: unreadable: {reason}", remedy)


def _limited(path: Path) -> bytes:
    """Return a file's content; raise BadValue if it is larger than any that clusterctl writes."""
    data = read_limited(str(path), LARGEST_JSON + 1)
    if len(data) > LARGEST_JSON:
        raise BadValue(f"larger than {LARGEST_JSON} bytes")
    return data


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that end with a line break.

    A line longer than LONGEST_LINE is yielded cut, so that it counts as damaged.
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        while line := file.readline(LONGEST_LINE):
            if line.endswith(b"\n"):
                yield line
            elif len(line) == LONGEST_LINE:
                while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                    continue
                yield line


def _as_text(value: Any, indent: int | None = None) -> bytes:
    """Return a value as JSON with a line break; half a character of UTF-16 becomes an escape."""
    return f"{json.dumps(value, indent=indent, ensure_ascii=False)}\n".encode("utf-8", "backslashreplace")


def _step_of(line: bytes) -> Metric | None:
    """Return a line of metrics if it is a step."""
    metric = read_metric(_value_of(line)) if b'"step"' in line else None
    return metric if metric is not None and metric.kind == "step" else None


def _value_of(line: bytes) -> object:
    """Return the value of a line of JSON, or None for any other text."""
    try:
        value: object = parse(line)
    except BadValue:
        return None
    return value


def all_runs(folder: Path) -> list[RunDir]:
    """Return the runs of a folder, newest first."""
    if not folder.is_dir():
        return []
    times: dict[RunDir, float] = {}
    for path in folder.iterdir():
        run = RunDir(path)
        # A folder without a record is no run; it may also vanish meanwhile.
        with contextlib.suppress(OSError):
            times[run] = run.record.stat().st_mtime
    return sorted(times, key=times.__getitem__, reverse=True)


def find_run(folder: Path, name: str) -> RunDir:
    """Return the run with an id, with the unique beginning of an id, at a path, or the newest run for `last`."""
    if not name:
        raise UsageError("the name of the run is empty", "name a run, or `last`")
    if "/" in name and (Path(name) / "run.json").is_file():
        return RunDir(Path(name).resolve())
    if "/" in name and not Path(name).exists():
        raise UsageError(f"{name}: no such file or folder", "name a run, or a folder that exists")
    runs = all_runs(folder)
    if name == "last" and runs:
        return runs[0]
    hits = [run for run in runs if run.run_id == name] or [run for run in runs if run.run_id.startswith(name)]
    if len(hits) == 1:
        return hits[0]
    if hits:
        raise UsageError(
            f"{name!r} begins {len(hits)} runs: {', '.join(run.run_id for run in hits[:5])}",
            "give more of the id",
        )
    if Path(name).is_dir():
        remedy = "name a run (`clusterctl runs` lists them), or the folder of a checkpoint"
        raise UsageError(f"{name}: a folder, but not of a run: it has no run.json", remedy)
    if not runs:
        raise UsageError(
            f"no runs in {folder}", "start one with `clusterctl launch JOB`, or `clusterctl demo`"
        )
    raise UsageError(
        f"no run {name!r} in {folder}",
        did_you_mean(name, [run.run_id for run in runs]) or "see `clusterctl runs`",
    )
