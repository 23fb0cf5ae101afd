"""Where a run's files are, here and on its nodes; the one place that spells their names."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import posixpath
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from clusterctl import contract
from clusterctl.agent.processes import identity, is_alive
from clusterctl.errors import UsageError, did_you_mean
from clusterctl.files import replace_file


def make_runs(folder: Path) -> Path:
    """The folder of runs, there and to be written: before anything starts that could not be recorded."""
    why = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "not to be written by you"
    except OSError as problem:
        why = problem.strerror or str(problem)
    if why:
        raise UsageError(
            f"{folder}: no folder for runs: {why}",
            "$CLUSTERCTL_RUNS, or `runs` in clusterctl.yaml, names another",
        )
    return folder


def new_run_id(name: str) -> str:
    """`demo-1120-142501-3fa9`: readable, sorted by time within a name, unlike any other's."""
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


@dataclass(frozen=True)
class NodeFiles:
    """The same run's folder on a node; paths are the node's."""

    root: str
    attempt: int = 1

    @property
    def attempt_dir(self) -> str:
        return posixpath.join(self.root, "attempts", str(self.attempt))

    @property
    def train_config(self) -> str:
        return posixpath.join(self.root, contract.TRAIN_CONFIG_FILE)

    @property
    def rank_table(self) -> str:
        return posixpath.join(self.root, "rank_table.json")

    @property
    def hostfile(self) -> str:
        return posixpath.join(self.root, "hostfile")

    @property
    def metrics(self) -> str:
        return posixpath.join(self.root, contract.METRICS_FILE)

    @property
    def checkpoints(self) -> str:
        return posixpath.join(self.root, contract.CHECKPOINT_DIR)

    @property
    def plogs(self) -> str:
        """What CANN says of this attempt's processes, those that a wrapper script starts too."""
        return posixpath.join(self.attempt_dir, "plogs")

    @property
    def npu_info(self) -> str:
        """What npu-smi said when the attempt began."""
        return posixpath.join(self.attempt_dir, "npu_info_before.txt")

    def result(self, rank: int) -> str:
        """Return the path of what a rank's call of a function returned."""
        return posixpath.join(self.root, contract.RESULTS_DIR, f"attempt-{self.attempt}-rank-{rank}")

    def log(self, rank: int, stream: str) -> str:
        """A rank's raw bytes; stream is "out" or "err"."""
        return posixpath.join(self.attempt_dir, "logs", f"rank-{rank}.{stream}")


@dataclass(frozen=True)
class RunDir:
    """A run's folder on the launching machine."""

    root: Path

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def record(self) -> Path:
        return self.root / "run.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def rank_table(self) -> Path:
        return self.root / "rank_table.json"

    @property
    def hostfile(self) -> Path:
        return self.root / "hostfile"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def cause(self) -> Path:
        """Why the run failed, once it has; each attempt has one of its own too."""
        return self.root / "cause.json"

    def attempt_cause(self, attempt: int) -> Path:
        return self.root / "attempts" / str(attempt) / "cause.json"

    def attempt_state(self, attempt: int) -> Path:
        """How an attempt came out: every rank's exit status."""
        return self.root / "attempts" / str(attempt) / "state.json"

    @property
    def metrics(self) -> Path:
        return self.root / contract.METRICS_FILE

    @property
    def checkpoints(self) -> Path:
        return self.root / contract.CHECKPOINT_DIR

    @property
    def lock(self) -> Path:
        """Held by the run's controller, the one process that brings it home; tells who that is."""
        return self.root / "controller.lock"

    @property
    def stop_asked(self) -> Path:
        """There from the moment that somebody asked for the run's end: no attempt may follow."""
        return self.root / "stop.json"

    @contextlib.contextmanager
    def hold(self, patience: float = 1.0) -> Iterator[bool]:
        """Be the run's controller; False where a living process is it already.

        A lock without a living owner in it is somebody's look at it, and is waited for up to `patience` seconds.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with self.lock.open("a+") as lock:
            if not _locked(lock, time.monotonic() + patience, self.controller):
                yield False
                return
            lock.truncate(0)
            lock.write(json.dumps(identity(os.getpid())))
            lock.flush()
            try:
                yield True
            finally:
                lock.truncate(0)

    def controller(self) -> int | None:
        """The pid of the living process that this run's lock names; asked without touching the lock."""
        try:
            owner = json.loads(self.lock.read_text())
        except (OSError, ValueError):
            return None
        return int(owner["pid"]) if isinstance(owner, dict) and is_alive(owner) else None

    def is_watched(self) -> bool:
        """Whether a living process brings this run home."""
        return self.controller() is not None

    @property
    def controller_log(self) -> Path:
        return self.root / "controller.log"

    def logs(self, attempt: int = 1) -> Path:
        return self.root / "attempts" / str(attempt) / "logs"

    def log(self, node: str, rank: int, stream: str, attempt: int = 1) -> Path:
        return self.logs(attempt) / node / f"rank-{rank}.{stream}"

    def write_json(self, path: Path, value: Any, mode: int = 0o644) -> None:
        replace_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", mode)

    def read_record(self) -> dict[str, Any]:
        """What `launch` wrote of the run: enough to reach it again from any process."""
        return _read(self.record)

    def read_state(self) -> dict[str, Any]:
        """The last state that was seen; empty where none was yet."""
        return _read(self.state) if self.state.exists() else {}

    def add_event(self, kind: str, **facts: Any) -> None:
        """One line of the run's history."""
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **facts}, ensure_ascii=False)
        self.root.mkdir(parents=True, exist_ok=True)
        with self.events.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def event_lines(self) -> Iterator[dict[str, Any]]:
        """The run's history, oldest first; a line that is half written is left out."""
        if self.events.exists():
            for line in self.events.read_bytes().split(b"\n")[:-1]:
                yield json.loads(line)

    def metric_lines(self) -> Iterator[dict[str, Any]]:
        """The trainer's metrics as far as they have come home; a line that broke off with its node is left out."""
        if self.metrics.exists():
            for line in self.metrics.read_bytes().split(b"\n")[:-1]:
                with contextlib.suppress(ValueError):
                    if (metric := metric_of(json.loads(line))) is not None:
                        yield metric


def _locked(lock: IO[str], deadline: float, owner: Callable[[], int | None]) -> bool:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if owner() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: unreadable: {error}", "the run's folder is damaged; see `clusterctl runs`"
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a run's record", "see `clusterctl runs`")
    return value


def all_runs(folder: Path) -> list[RunDir]:
    """The runs kept in a folder, newest first."""
    if not folder.is_dir():
        return []
    found = [RunDir(path) for path in folder.iterdir() if (path / "run.json").is_file()]
    return sorted(found, key=lambda run: run.record.stat().st_mtime, reverse=True)


def find_run(folder: Path, name: str) -> RunDir:
    """A run by its id, a unique beginning of it, `last`, or the path of its folder."""
    if "/" in name and (Path(name) / "run.json").is_file():
        return RunDir(Path(name).resolve())
    runs = all_runs(folder)
    if not runs:
        raise UsageError(
            f"no runs in {folder}", "start one with `clusterctl launch JOB`, or `clusterctl demo`"
        )
    if name == "last":
        return runs[0]
    hits = [run for run in runs if run.run_id == name] or [run for run in runs if run.run_id.startswith(name)]
    if len(hits) == 1:
        return hits[0]
    if hits:
        raise UsageError(
            f"{name!r} begins {len(hits)} runs: {', '.join(run.run_id for run in hits[:5])}",
            "give more of the id",
        )
    raise UsageError(
        f"no run {name!r} in {folder}",
        did_you_mean(name, [run.run_id for run in runs]) or "see `clusterctl runs`",
    )


def metric_of(said: Any) -> dict[str, Any] | None:
    """A line of metrics as it can be counted on, whatever program wrote it: what should be a number and is none is
    left out; a loss that is not finite, which JSON has no number for, is `diverged`. None for a line that says
    nothing."""
    if not isinstance(said, dict):
        return None
    found = {key: value for key, value in said.items() if key not in NUMBERS or _is_number(value)}
    if "loss" in said and "loss" not in found:
        found["diverged"] = True
    kind = said.get("event")
    return (
        found
        if all(key in found for key in (NEEDED.get(kind, ()) if isinstance(kind, str) else ()))
        else None
    )


NUMBERS = ("step", "steps", "loss", "grad_norm", "tokens_per_second", "step_seconds", "parameters", "time")


NEEDED = {"step": ("step",), "eval": ("step", "loss"), "checkpoint": ("step",)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
