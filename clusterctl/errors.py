"""All errors of clusterctl, with their exit codes.

ClusterctlError                  1
|- FindingsError               1   a check, verify or diff found something
|- UsageError                    2   the command line or an input file is wrong; nothing was started
|  '- InputFaults                2   all errors of one input together
|- NodeError                     3   a node cannot be used
|  |- Unreachable                3   port, time-out
|  |  '- NoAddress               3   no address for its name
|  |- LoginRefused               3   no key was accepted
|  |- HostKeyUnknown             3   the host key is not recorded
|  |- HostKeyChanged             3   the host key differs from the recorded one
|  |- LinkLost                   3   the connection was lost
|  '- NodesFailed                3   several nodes, each with its reason
|- StopIncomplete              3   a stop did not reach every node: ranks may still run
|- WorkFailed                    4   the work ran on every node and failed on some
|  '- RequestFailed              4   a node could not carry out a request (transport/link.py)
'- RunFailed                     5   a run started and failed; the message is the root cause
   '- FunctionFailed             5   calls of a launched function raised (library/results.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EXIT_BUG = 70


class ClusterctlError(Exception):
    """An error with a message (what happened and where) and a hint (what to try next)."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            # Tracebacks of Python 3.11 and of notebooks end with these lines.
            self.__notes__ = [f"try: {line}" for line in hint.splitlines()]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs: an error may be raised in another process than it was made in."""
        return _rebuilt, (type(self), self.args, vars(self))


def _rebuilt(
    kind: type[ClusterctlError], args: tuple[Any, ...], values: dict[str, object]
) -> ClusterctlError:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(values)
    return error


class FindingsError(ClusterctlError):
    """A check found something."""

    exit_code = 1


class UsageError(ClusterctlError):
    """The command line or an input file is wrong; nothing was started or changed."""

    exit_code = 2


@dataclass(frozen=True)
class Fault:
    """One error in an input: where (file:line and key), what is wrong, and the remedy."""

    where: str
    what: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """Return the location and what is wrong there."""
        return f"{self.where}: {self.what}" if self.where else self.what

    def __str__(self) -> str:
        return self.line + (f" ({self.remedy})" if self.remedy else "")


class InputFaults(UsageError):
    """All errors of one input, reported together."""

    def __init__(self, faults: Sequence[Fault], hint: str = "") -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults), hint)


class Collected:
    """Collects the usage errors of several blocks of code, so that a user sees them together:

    errors = Collected()
    with errors:
        first = read_first()
    with errors:
        second = read_second()
    errors.raise_all()
    """

    def __init__(self) -> None:
        self.errors: list[UsageError] = []

    def __enter__(self) -> Collected:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, UsageError):
            self.errors.append(error)
            return True
        return False

    def raise_all(self) -> None:
        """Raise the only error, or one error with the faults of all blocks; return if there is none."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            several = [error for error in self.errors if isinstance(error, InputFaults)]
            hints = "\n".join(dict.fromkeys(error.hint for error in several if error.hint))
            # Two blocks may read the same wrong file.
            faults = dict.fromkeys(fault for error in self.errors for fault in faults_of(error))
            raise InputFaults(list(faults), hints)


def faults_of(error: UsageError, where: str = "") -> list[Fault]:
    """Return the faults of an error; a plain message becomes one fault at `where`."""
    return list(error.faults) if isinstance(error, InputFaults) else [Fault(where, error.message, error.hint)]


class NodeError(ClusterctlError):
    """A node cannot be used; `node` is its name."""

    exit_code = 3

    def __init__(self, node: str, message: str, hint: str = "") -> None:
        super().__init__(f"{node}: {message}", hint)
        self.node = node
        self.reason = message


class Unreachable(NodeError):
    """The node cannot be reached: wrong address, closed port, or no answer in time."""


class NoAddress(Unreachable):
    """This machine cannot look up the node's address: that says nothing about the node."""


class LoginRefused(NodeError):
    """The node accepted none of the offered keys."""


class HostKeyUnknown(NodeError):
    """The host key of the node is not recorded."""


class HostKeyChanged(NodeError):
    """The host key of the node differs from the recorded one."""


# The hint of a LinkLost during a command.
NODE_ENDS_COMMAND = "the node itself ends the processes of this command"


class LinkLost(NodeError):
    """The connection to a node, or its agent, ended during the work."""


class NodesFailed(NodeError):
    """Several nodes cannot be used, or some cannot and others failed; each with its reason."""

    def __init__(
        self,
        unreachable: Sequence[NodeError],
        failed: Sequence[ClusterctlError] = (),
        shown: Sequence[ClusterctlError] = (),
    ) -> None:
        """`shown` replaces the errors in the message: nodes with the same reason share one."""
        self.errors = (*unreachable, *failed)
        names = ", ".join(error.node for error in unreachable)
        ClusterctlError.__init__(
            self,
            "\n".join(error.message for error in shown or self.errors),
            "\n".join(dict.fromkeys(error.hint for error in shown or self.errors if error.hint)),
        )
        self.node = names
        self.reason = self.message


class StopIncomplete(ClusterctlError):
    """A stop of a run did not reach every node, or could not be recorded: ranks may still run, or start again."""

    exit_code = 3

    def __init__(self, message: str, hint: str, nodes: Sequence[str] = ()) -> None:
        """`nodes` are the names of those that did not answer."""
        super().__init__(message, hint)
        self.nodes = tuple(nodes)


class WorkFailed(ClusterctlError):
    """The work ran on every node and failed on some."""

    exit_code = 4


class RequestFailed(WorkFailed):
    """Raised if a node understood a request and could not fulfil it. `kind` is the reason, for programs."""

    def __init__(self, node: str, kind: str, message: str, hint: str = "") -> None:
        super().__init__(f"{node}: {message}", hint)
        self.node = node
        self.kind = kind
        self.reason = message


class RunFailed(ClusterctlError):
    """A run started and failed; the message is the root cause."""

    exit_code = 5


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return a question such as `did you mean 'steps'?`, or "" if no known word is similar."""
    import difflib

    # 2,000 comparisons take 20 ms.
    candidates = [name for name in known if abs(len(name) - len(word)) <= 3][:2000]
    closest = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f"did you mean {closest[0]!r}?" if closest else ""
