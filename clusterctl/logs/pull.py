"""Collect the logs and system messages of a run, in one folder per node as `ascend-fd parse` reads it.

DST/attempt-1/node1/rank-0.txt                     what a rank wrote: stdout, then stderr
                    process_log/debug/plog/...     CANN's logs of this run's processes only
                    environment_check/npu_info_before.txt, npu_info_after.txt
                    dmesg, messages                if the login may read them; of the last attempt
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.agent.holes import read
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.record import RunRecord
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.logs.lines import dropped
from clusterctl.logs.store import RANK_LOG, LogKeeper, kept_files
from clusterctl.logs.times import index_of
from clusterctl.transport.answers import DirectoryEntry
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections
from clusterctl.wire import contract

# Bytes at the end of the system's log.
MOST_MESSAGES = 16_000_000
# Seconds for dmesg and npu-smi.
ASK_LIMIT = 20.0
SYSTEM_LOGS = ("messages", "syslog")
COMMANDS = ((("dmesg",), "dmesg"), (("npu-smi", "info"), "environment_check/npu_info_after.txt"))
PLOG = re.compile(r"(?:plog|device)-(\d+)_\d+[\w.-]*\.log[\w.-]*")


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, and when it began by the clock of its node."""

    pid: int | None = None
    started: float | None = None


@dataclass(frozen=True)
class Processes:
    """The part of a node's state that concerns its logs."""

    ranks: tuple[RankProcess, ...]


@dataclass
class Pulled:
    """The files that were collected, and notes about those that could not be."""

    target: Path
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def next_command(self) -> str:
        return f"ascend-fd parse -i {self.target}/attempt-N/NODE -o OUT"

    def as_json(self) -> dict[str, object]:
        return {"folder": str(self.target), "files": self.files, "notes": self.notes}


def claim(target: Path, replace: bool) -> None:
    """Prepare the folder to fill: it must be empty, or from an earlier pull with `replace`."""
    if replace:
        shutil.rmtree(target, ignore_errors=True)
    elif target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target}: exists already", "name a new folder")


def pull_run(run: RunDir, connections: Connections, target: Path, *, dry_run: bool = False) -> Pulled:
    """Copy the logs of all attempts from the nodes, and arrange them in folders.

    A node that does not answer becomes a note; logs that were copied from it earlier are included.
    """
    record, pulled = run.read_record(), Pulled(target)

    def ask(node: Node, link: Connection) -> list[str]:
        return _NodePull(run, record, node, link, target, dry_run).everything()

    for outcome in connections.on_each(record.cluster.nodes, ask):
        if outcome.error is not None:
            pulled.notes.append(str(outcome.error))
        pulled.files += outcome.value or []
    for attempt in range(1, record.attempt + 1):
        pulled.files += _lay_out(run, attempt, target, dry_run)
    pulled.files.sort()
    return pulled


def _lay_out(run: RunDir, attempt: int, target: Path, dry_run: bool) -> list[str]:
    """Write `rank-N.txt` for every rank whose logs are here; return the names."""
    by_rank: dict[tuple[str, int], list[Path]] = {}
    for file in kept_files(run, attempt):
        by_rank.setdefault((file.node, file.rank), []).append(file.path)
    names = []
    for (node, rank), paths in by_rank.items():
        names.append(f"attempt-{attempt}/{node}/rank-{rank}.txt")
        if not dry_run:
            _join(paths, target / names[-1])
    return names


def _join(paths: Iterable[Path], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as joined:
        for path in paths:
            if joined.tell() and not _ends_whole(target, joined.tell()):
                joined.write(b"\n")
            with path.open("rb") as part:
                at, size = 0, path.stat().st_size
                while at < size:
                    start, data = read(part.fileno(), at, 1 << 20)
                    joined.write(dropped(start - at) if start > at else b"")
                    joined.write(data)
                    at = start + len(data)
            joined.flush()


def _ends_whole(path: Path, size: int) -> bool:
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"


class _NodePull:
    """The part of one node."""

    def __init__(
        self,
        run: RunDir,
        record: RunRecord,
        node: Node,
        link: Connection,
        target: Path,
        dry_run: bool,
    ) -> None:
        self.run, self.record, self.node, self.link = run, record, node, link
        self.target, self.dry_run = target, dry_run
        self.run_dir = record.run_dirs[node.name]
        self.files: list[str] = []

    def everything(self) -> list[str]:
        last = self.record.attempt
        for attempt in range(1, last + 1):
            if not self.dry_run and not (attempt == last and self.run.is_watched()):
                self._bring_home(attempt)
            self._plogs(attempt)
            self._before(attempt)
        self._save_system_state(last)
        self._system_log(last)
        return self.files

    def _bring_home(self, attempt: int) -> None:
        """Copy the remaining output of ranks, from the byte where the local copy ends."""
        remote = NodeFiles(self.run_dir, attempt)
        for entry in self._list(f"{remote.attempt_dir}/logs"):
            match = RANK_LOG.fullmatch(entry.name)
            if not match:
                continue
            home = self.run.log(self.node.name, int(match[1]), match[2], attempt)
            offset = LogKeeper.cursor(home)
            if entry.size > offset:
                for data in self._get(remote.log(int(match[1]), match[2]), offset):
                    LogKeeper.keep(home, offset, data)
                    offset += len(data)
                # The time when these were written is not known.
                index_of(home).unlink(missing_ok=True)

    def _before(self, attempt: int) -> None:
        """Save the output of npu-smi from the start of the attempt, for devices that failed since."""
        remote = NodeFiles(self.run_dir, attempt)
        folder, _, name = remote.npu_info.rpartition("/")
        if any(entry.name == name and entry.size for entry in self._list(folder)):
            self._save(attempt, f"environment_check/{name}", self._get(remote.npu_info))

    def _plogs(self, attempt: int) -> None:
        started, root = self._pids(attempt), self._plog_root(attempt)
        # Only this run writes there, including the children of wrapper scripts.
        ours = root.startswith(f"{self.run_dir}/")
        for kind in ("debug", "run", "security"):
            for folder in self._list(f"{root}/{kind}"):
                if folder.kind != "d" or not re.fullmatch(r"plog|device-[\w-]+", folder.name):
                    continue
                path = f"{root}/{kind}/{folder.name}"
                for entry in self._list(path):
                    match = PLOG.fullmatch(entry.name)
                    # Pids are used again: a file that was last written before the process began is another one's.
                    since = started.get(int(match[1]), float("inf")) if match and not ours else 0.0
                    if match and entry.mtime >= since - 1.0:
                        name = f"process_log/{kind}/{folder.name}/{entry.name}"
                        self._save(attempt, name, self._get(f"{path}/{entry.name}"))

    def _pids(self, attempt: int) -> dict[int, float]:
        """Return the attempt's processes on this node, with the time each began."""
        answer = self.link.ask(Processes, "state", {"run_dir": self.run_dir, "attempt": attempt})
        return {rank.pid: rank.started or 0.0 for rank in answer.ranks if rank.pid}

    def _plog_root(self, attempt: int) -> str:
        """Return the folder of CANN's logs, from the environment of the last attempt's ranks."""
        env = self._environment()
        if env.get(contract.PLOG_PATH) == NodeFiles(self.run_dir, self.record.attempt).plogs:
            # Each attempt has its own folder.
            return NodeFiles(self.run_dir, attempt).plogs
        if env.get(contract.PLOG_PATH):
            return env[contract.PLOG_PATH]
        return f"{env['ASCEND_WORK_PATH']}/log" if env.get("ASCEND_WORK_PATH") else "~/ascend/log"

    def _environment(self) -> dict[str, str]:
        try:
            plan = self.run.read_json(self.run.plan)
            part = next(part for part in plan["nodes"] if part["node"] == self.node.name)
            return dict(part["processes"][0]["env"]) if part["processes"] else {}
        except (UsageError, ValueError, KeyError, IndexError, StopIteration, TypeError):
            # The plan is damaged, or an older version wrote it.
            return {}

    def _save_system_state(self, attempt: int) -> None:
        """Save the reports of the kernel and the driver, if the node has the programs and the login may run them."""
        for argv, name in COMMANDS:
            done = self.link.run(list(argv), timeout=ASK_LIMIT)
            if done.ok and done.stdout:
                self._save(attempt, name, iter([done.stdout]))

    def _system_log(self, attempt: int) -> None:
        """Save the end of the system's log."""
        sizes = {entry.name: entry.size for entry in self._list("/var/log") if entry.kind == "f"}
        for name in SYSTEM_LOGS:
            if name in sizes:
                start = max(0, sizes[name] - MOST_MESSAGES)
                try:
                    self._save(attempt, "messages", self._get(f"/var/log/{name}", start))
                except ClusterctlError:
                    # This login may not read it.
                    continue
                return

    def _list(self, path: str) -> tuple[DirectoryEntry, ...]:
        try:
            return self.link.directory(path).entries
        except ClusterctlError:
            # This login may not read it.
            return ()

    def _get(self, path: str, offset: int = 0) -> Iterator[bytes]:
        for frame in self.link.request("get", {"path": path, "offset": offset}):
            yield frame.payload

    def _save(self, attempt: int, name: str, data: Iterable[bytes]) -> None:
        relative = f"attempt-{attempt}/{self.node.name}/{name}"
        if not self.dry_run:
            path = self.target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("wb") as file:
                    for part in data:
                        file.write(part)
            except ClusterctlError:
                path.unlink(missing_ok=True)
                raise
        self.files.append(relative)
