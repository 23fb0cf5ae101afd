"""Read what calls on nodes returned or raised, without running code that a node sent."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clusterctl.errors import RunFailed, WorkFailed

# Bytes of one rank's result.
LIMIT = 1 << 30
# Bytes of one rank's exception with its traceback.
FAILURE_LIMIT = 1 << 24
# The forms that on_node.plain gives to types that JSON does not have.
FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
}
# Exceptions that reading damaged data can raise.
DAMAGE = (
    *(ArithmeticError, AttributeError, EOFError, ImportError, LookupError, MemoryError, RecursionError),
    *(TypeError, ValueError, pickle.UnpicklingError),
)


@dataclass(frozen=True)
class Failure:
    """An exception that a call raised on a node."""

    rank: int
    node: str
    type: str
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}: {self.type}: {self.message}"


class FunctionFailed(RunFailed):
    """Calls of a launched function raised; `failures` holds one entry per rank that raised, in rank order."""

    def __init__(self, message: str, failures: Sequence[Failure], hint: str = "") -> None:
        super().__init__(message, hint)
        self.failures = tuple(failures)


def read_value(node: str, rank: int, data: bytes, trusted: bool) -> Any:
    """Return what a call returned. A pickle is loaded only for a caller who trusts the nodes."""
    try:
        return pickle.loads(data) if trusted else _from_plain(json.loads(data))
    except DAMAGE as error:
        raise WorkFailed(f"{node}: the result of rank {rank} cannot be read: {error}") from None


def read_failure(node: str, rank: int, data: bytes) -> Failure:
    """Return the exception that a call raised."""
    try:
        answer = json.loads(data)
        return Failure(rank, node, *(str(answer[key]) for key in ("type", "message", "traceback")))
    except DAMAGE as error:
        raise WorkFailed(f"{node}: the failure of rank {rank} cannot be read: {error}") from None


def _from_plain(value: Any) -> Any:
    """Return the value that on_node.plain wrote."""
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((form, content),) = value.items()
    if form == "bytes":
        return base64.b64decode(content, validate=True)
    return FORMS[form](_from_plain(content))
