"""Run a Python function on nodes: one call per device; the results are returned in the order of the ranks."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar

from clusterctl.client.results import (
    FAILURE_LIMIT,
    LIMIT,
    Failure,
    FunctionFailed,
    read_failure,
    read_value,
)
from clusterctl.client.run import Run
from clusterctl.errors import ClusterctlError, RunFailed, UsageError, WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.jobs import job as jobs
from clusterctl.jobs.job import Job
from clusterctl.jobs.run_folder import NodeFiles
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections, on_all
from clusterctl.wire import contract

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """The settings of a run of a function."""

    devices: Sequence[int] | None
    code: str | Path | None
    env: Mapping[str, str]
    trusted: bool
    """Whether results may be any pickle."""

    def as_job(self, function: Callable[..., object], call: Path) -> Job:
        name = getattr(function, "__name__", "function").strip("<>_") or "function"
        code = Path(self.code).resolve() if self.code is not None else None
        job = jobs.from_command(["python3", "{data}/on_node.py"], code, env=self.env)
        devices = None if self.devices is None else tuple(self.devices)
        return replace(job, name=name[:30], data=call, devices=devices, source=f"function {name}")

    @contextlib.contextmanager
    def files_of(self, function: Callable[..., object], args: Sequence[object]) -> Iterator[Path]:
        """Yield a folder with the program that nodes run, the pickled call, and cloudpickle if loading it needs it."""
        by_value = _module_to_send(function, Path(self.code).resolve() if self.code is not None else None)
        pickled, needs_cloudpickle = _pickled(function, args, by_value)
        version = list(sys.version_info[:2]) if needs_cloudpickle else None
        call = {"results": contract.RESULTS_DIR, "python": version, "trusted": self.trusted}
        with tempfile.TemporaryDirectory(prefix="clusterctl-call-") as path:
            folder = Path(path)
            (folder / "call.pkl").write_bytes(pickled)
            (folder / "call.json").write_text(json.dumps(call))
            shutil.copy(Path(__file__).with_name("on_node.py"), folder / "on_node.py")
            if needs_cloudpickle:
                import cloudpickle

                source = Path(cloudpickle.__file__).parent
                shutil.copytree(source, folder / "cloudpickle", ignore=shutil.ignore_patterns("__pycache__"))
            yield folder


class FunctionRun(Run, Generic[T]):
    """A run that calls a function once per device."""

    def __init__(self, run: Run, trust_results: bool = False) -> None:
        """Take the run of a function, from `Cluster.start_function` or `find_run`."""
        super().__init__(run._folder, run.reach)
        self._trusted = trust_results
        self._results: list[T] | None = None

    def results(self, timeout: float | None = None) -> list[T]:
        """Wait for the end; return what each rank's call returned, in the order of the ranks.

        Raises FunctionFailed if calls raised, RunFailed if ranks ended in another way (a signal, a lost node), and
        TimeoutError after `timeout` seconds. The files of the call are removed from the nodes afterwards.
        """
        if self._results is None:
            try:
                self.wait(timeout)
            except RunFailed as failed:
                self._raise_failures(failed)
            with self.connected() as connections:
                self._results = self._values(connections)
                self._remove_call(connections)
        return self._results

    def _values(self, connections: Connections) -> list[T]:
        values = on_all(connections, self._folder.read_record().cluster.nodes, self._values_of)
        by_rank = {rank: value for of_node in values.values() for rank, value in of_node.items()}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def _raise_failures(self, failed: RunFailed) -> None:
        """Raise FunctionFailed with the exceptions that calls stored on nodes, or the run's error if there are none."""
        with self.connected() as connections:
            outcomes = connections.on_each(self._folder.read_record().cluster.nodes, self._failures_of)
            self._remove_call(connections)
        failures = [failure for outcome in outcomes for failure in outcome.value or ()]
        if not failures:
            raise failed
        failures.sort(key=lambda failure: failure.rank)
        lines = "\n".join(str(failure) for failure in failures)
        raise FunctionFailed(f"{self.id}: {lines}", failures, failed.hint) from None

    def _values_of(self, node: Node, link: Connection) -> dict[int, T]:
        """Return the value of every rank of one node."""
        return {
            rank: read_value(node.name, rank, self._read(link, node, rank, "", LIMIT), self._trusted)
            for rank in self._ranks(node)
        }

    def _failures_of(self, node: Node, link: Connection) -> list[Failure]:
        """Return the exceptions of one node's ranks; a rank that was killed stored none."""
        found = []
        for rank in self._ranks(node):
            with contextlib.suppress(ClusterctlError):
                data = self._read(link, node, rank, ".failure", FAILURE_LIMIT)
                found.append(read_failure(node.name, rank, data))
        return found

    def _ranks(self, node: Node) -> list[int]:
        return list(self._folder.read_record().ranks[node.name])

    def _read(self, link: Connection, node: Node, rank: int, suffix: str, limit: int) -> bytes:
        record = self._folder.read_record()
        path = NodeFiles(record.run_dirs[node.name], record.attempt).result(rank) + suffix
        data = link.get(path, limit=limit + 1)
        if len(data) > limit:
            raise WorkFailed(f"{node.name}: the result of rank {rank} is larger than {limit} bytes")
        return data

    def _remove_call(self, connections: Connections) -> None:
        """Remove the pickled call from the nodes; a node that does not answer keeps it."""
        paths = self._folder.read_record().data_paths
        connections.on_each(
            self._folder.read_record().cluster.nodes,
            lambda node, link: link.call("remove", {"path": paths[node.name]}),
        )


def _pickled(
    function: Callable[..., object], args: Sequence[object], by_value: ModuleType | None
) -> tuple[bytes, bool]:
    """Return the pickled call, and whether loading it needs cloudpickle."""
    import cloudpickle

    try:
        if by_value is not None and by_value.__name__ != "__main__":
            cloudpickle.register_pickle_by_value(by_value)
            try:
                data = cloudpickle.dumps((function, tuple(args)), protocol=4)
            finally:
                cloudpickle.unregister_pickle_by_value(by_value)
        else:
            data = cloudpickle.dumps((function, tuple(args)), protocol=4)
    except (TypeError, AttributeError, ValueError, RecursionError, pickle.PicklingError) as error:
        raise UsageError(
            f"the function or its arguments cannot be sent to the nodes: {error}",
            "locks, sockets and connections cannot be pickled; create them inside the function",
        ) from None
    return data, b"cloudpickle" in data


def _module_to_send(function: Callable[..., object], code: Path | None) -> ModuleType | None:
    """Return the module to pickle by value; None if the nodes can import it by its name.

    Nodes can import installed modules, and those below `code`, which is pushed.
    """
    inner: Any = function
    # functools.partial.
    while hasattr(inner, "func"):
        inner = inner.func
    module = sys.modules.get(getattr(inner, "__module__", "") or "")
    source = getattr(module, "__file__", None)
    if not isinstance(inner, (FunctionType, type)) or module is None or source is None:
        return None
    path = Path(source).resolve()
    if code is not None:
        expected = code.joinpath(*module.__name__.split("."))
        if path in (expected.with_suffix(".py"), expected / "__init__.py"):
            return None
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    return None if any(path.is_relative_to(folder) for folder in installed) else module
