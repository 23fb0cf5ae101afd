"""Run the tasks of a fabfile on nodes, over connections whose host keys clusterctl has checked."""

from __future__ import annotations

import importlib.util
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError, UsageError, did_you_mean
from clusterctl.ssh.fabric import Logins, NodeStream, OnOutput, fabric_connection, refuse_unknown_keys
from clusterctl.ssh.load_paramiko import load_paramiko
from clusterctl.transport.completed import Completed

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node


@dataclass(frozen=True)
class Fabfile:
    """A fabfile that was loaded."""

    path: Path
    collection: Any

    @property
    def tasks(self) -> dict[str, str]:
        """Return the name of each task, and the first line of its description."""
        names = self.collection.task_names
        return {
            name: (self.collection[name].__doc__ or "").strip().partition("\n")[0] for name in sorted(names)
        }

    def calls(self, words: Sequence[str]) -> list[Any]:
        """Return the calls that a command line names: `TASK [--option VALUE]...`, as fabric's own program reads it."""
        from invoke.exceptions import ParseError
        from invoke.executor import Executor
        from invoke.parser import Parser

        if words[0] not in self.collection.task_names and words[0] not in _aliases(self.collection):
            names = list(self.tasks)
            hint = did_you_mean(words[0], names) or f"its tasks: {', '.join(names) or 'none'}"
            raise UsageError(f"{self.path}: no task is called {words[0]!r}", hint)
        try:
            parsed = Parser(contexts=self.collection.to_contexts()).parse_argv(list(words))
        except ParseError as problem:
            raise UsageError(f"{self.path}: {problem}", f"clusterctl fab {self.path} --list") from None
        missing = [str(argument.name) for context in parsed for argument in context.missing_positional_args]
        if missing:
            raise UsageError(
                f"{self.path}: {words[0]} needs {', '.join(missing)}", "add its value after the task"
            )
        executor = Executor(self.collection)
        named = [(str(context.name), context.as_kwargs) for context in parsed]
        calls: list[Any] = executor.dedupe(executor.expand_calls(executor.normalize(tuple(named))))
        if any(getattr(call.task, "hosts", None) for call in calls):
            raise UsageError(
                f"{self.path}: {words[0]} names hosts of its own",
                "remove `hosts` from the task: -n chooses the nodes",
            )
        return calls


def _aliases(collection: Any) -> set[str]:
    return {alias for aliases in collection.task_names.values() for alias in aliases}


def load_fabfile(path: Path) -> Fabfile:
    """Import a fabfile and return its tasks; raise UsageError if it cannot be imported."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "name a Python file with fabric tasks")
    if not path.is_file():
        raise UsageError(f"{path}: no such file", "name a Python file with fabric tasks")
    load_paramiko()
    refuse_unknown_keys()
    spec = importlib.util.spec_from_file_location("fabfile", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file", "its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    # A fabfile may import files that lie next to it.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    # A fabfile that ends the program while it is imported has no tasks.
    except (Exception, SystemExit) as problem:
        line = _line_in(path, problem)
        text = f"{path}{line}: {type(problem).__name__}: {problem}"
        raise UsageError(text, "correct the file; nothing was started") from None
    found = of_module(module, path)
    if not found.tasks:
        raise UsageError(f"{path}: contains no tasks", "put fabric's @task before a function")
    return found


def of_module(module: ModuleType, path: Path) -> Fabfile:
    """Return the tasks of an imported module."""
    from invoke.collection import Collection

    return Fabfile(path, Collection.from_module(module))


def _line_in(path: Path, problem: BaseException) -> str:
    if isinstance(problem, SyntaxError):
        return f":{problem.lineno}"
    # An imported file has its whole path in the traceback.
    own = (str(path), str(path.absolute()))
    here = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename in own]
    return f":{here[-1]}" if here else ""


class ThreadOutput(NodeStream):
    """Replaces `sys.stdout`: what a task prints becomes output of the node of its thread."""

    def __init__(self, name: str, otherwise: Any) -> None:
        super().__init__(name, self._pass_on)
        self._here = threading.local()
        self._otherwise = otherwise

    def set(self, on_output: OnOutput) -> None:
        """Pass what the calling thread prints to `on_output` from now on."""
        self._here.on_output = on_output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._otherwise, name)

    def _pass_on(self, name: str, data: bytes) -> None:
        on_output: OnOutput | None = getattr(self._here, "on_output", None)
        if on_output is not None:
            on_output(name, data)
        else:
            self._otherwise.write(data.decode("utf-8", "surrogateescape"))


class TaskRunner:
    """Runs the calls of a fabfile on any node, each node in a thread of its own."""

    def __init__(self, logins: Logins, calls: Sequence[Any]) -> None:
        self._logins, self._calls = logins, calls
        self._prints = ThreadOutput("stdout", sys.stdout)

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Replace `sys.stdout`, so that what tasks print becomes output of their nodes."""
        before, sys.stdout = sys.stdout, self._prints
        try:
            yield
        finally:
            sys.stdout = before

    def run(self, node: Node, on_output: OnOutput) -> Completed:
        """Run the calls on one node; return the exit code of the command that failed, 1 for another error, or 0."""
        from invoke.exceptions import Exit, UnexpectedExit

        out, err = NodeStream("stdout", on_output), NodeStream("stderr", on_output)
        self._prints.set(on_output)
        with fabric_connection(self._logins, node, out, err) as connection:
            try:
                for call in self._calls:
                    call.task(connection, *call.args, **call.kwargs)
            except UnexpectedExit as problem:
                err.write(f"this command failed: {problem.result.command}\n")
                return _completed(problem.result.exited)
            except Exit as problem:
                if problem.message:
                    err.write(f"{problem.message}\n")
                return _completed(problem.code)
            except ClusterctlError:
                raise
            except Exception as problem:
                err.write(_own_part(problem))
                return Completed(1)
        return Completed(0)


def _own_part(problem: Exception) -> str:
    """Return the traceback without the frames before the task, which are not the user's code."""
    frames = traceback.extract_tb(problem.__traceback__)
    first = next((place for place, frame in enumerate(frames) if "/invoke/tasks.py" in frame.filename), -2)
    return "".join((*traceback.format_list(frames[first + 2 :]), *traceback.format_exception_only(problem)))


def _completed(code: int) -> Completed:
    # Fabric reports a command that a signal ended as -1.
    return Completed(code if 0 <= code < 256 else 255)
