"""Every way that clusterctl says no, with its exit code and a remedy.

ClusterctlError                  1
|- Found                         1   a check, verify or diff found something
|- UsageError                    2   the command line or an input file is wrong; nothing was started
|  '- InputFaults                2   all the faults of one input at once
|- NodeError                     3   a node could not be used
|  |- Unreachable                3   address, port, time-out
|  |- LoginRefused               3   no key was accepted
|  |- HostKeyUnknown             3   never seen: not accepted without consent
|  |- HostKeyChanged             3   not the key that was recorded: refused before a byte of data
|  |- LinkLost                   3   the connection ended in the middle
|  '- NodesFailed                3   several nodes at once, each with its own reason
|- WorkFailed                    4   it ran everywhere it should and failed on some nodes
|  '- RequestFailed              4   a node understood what was asked and could not do it (link.py)
'- RunFailed                     5   a run started and failed; the message is the root cause
   '- FunctionFailed             5   calls of a launched function raised (library/results.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_BUG = 70


class ClusterctlError(Exception):
    """A failure in words: what happened and where, and `hint`, what the user can try next."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Found(ClusterctlError):
    """A check that ran well and found something."""

    exit_code = 1


class UsageError(ClusterctlError):
    """The command line or an input file is wrong; nothing was started or changed."""

    exit_code = 2


@dataclass(frozen=True)
class Fault:
    """One thing wrong in one input: `where` (file:line and key), what, and what to do about it."""

    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f" ({self.remedy})" if self.remedy else "")


class InputFaults(UsageError):
    """All the faults of one input, said at once."""

    def __init__(self, faults: Sequence[Fault], hint: str = "") -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults), hint)


class NodeError(ClusterctlError):
    """A node could not be used; `node` is its name."""

    exit_code = 3

    def __init__(self, node: str, message: str, hint: str = "") -> None:
        super().__init__(f"{node}: {message}", hint)
        self.node = node
        self.reason = message


class Unreachable(NodeError):
    """No connection: wrong address, closed port, or no answer in time."""


class LoginRefused(NodeError):
    """The node answered and accepted none of the keys offered."""


class HostKeyUnknown(NodeError):
    """The node's host key was never recorded."""


class HostKeyChanged(NodeError):
    """The node showed another host key than the one recorded."""


class LinkLost(NodeError):
    """The connection to a node, or the agent behind it, ended in the middle of the work."""


class NodesFailed(NodeError):
    """Several nodes could not be used, or could while others failed; each with its own reason."""

    def __init__(self, unreachable: Sequence[NodeError], failed: Sequence[ClusterctlError] = ()) -> None:
        self.errors = (*unreachable, *failed)
        names = ", ".join(error.node for error in unreachable)
        ClusterctlError.__init__(
            self,
            "\n".join(error.message for error in self.errors),
            "\n".join(dict.fromkeys(error.hint for error in self.errors if error.hint)),
        )
        self.node = names
        self.reason = self.message


class WorkFailed(ClusterctlError):
    """The work ran on every node that it should, and failed on some."""

    exit_code = 4


class RunFailed(ClusterctlError):
    """A run started and failed; the message is the root cause."""

    exit_code = 5


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`did you mean 'steps'?`, or nothing when no known word is near."""
    import difflib

    # Which take 20 ms.
    alike = [one for one in known if abs(len(one) - len(word)) <= 3][:2000]
    near = difflib.get_close_matches(word, alike, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""
