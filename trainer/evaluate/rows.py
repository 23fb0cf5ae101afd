"""Read the records of a task's data file; all faults are reported together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer.errors import DataError, InputError
from trainer.surrogates import half_in

T = TypeVar("T")
MOST_FAULTS = 10


class RowFault(InputError):
    """A fault in a row; the reader adds the file and the line."""


@dataclass(frozen=True)
class Record:
    """One JSON object of a file; `line` counts from 1."""

    line: int
    value: Mapping[str, object]


def read_rows(
    path: Path,
    make: Callable[[int, Mapping[str, object]], Sequence[T]],
    remedy: str,
    noun: str = "records",
    access: str = "name a local file with --data",
) -> list[T]:
    """Return what `make` makes of each object of a JSON-lines file; raise one error with the faults of all lines.

    `access`: the remedy for a file that cannot be read.
    """
    made, faults = list[T](), list[str]()
    for number, line in enumerate(read_text(path, access).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise RowFault("not a JSON object")
            made += make(number, row)
        except InputError as error:
            faults.append(f"{path}:{number}: {error}")
        except (ValueError, RecursionError) as error:
            faults.append(f"{path}:{number}: not JSON: {error}")
    check_faults(faults, remedy)
    if not made:
        raise DataError(f"{path}: contains no {noun}", remedy)
    return made


def read_records(
    path: Path,
    fields: Mapping[str, type | tuple[type, ...]],
    example: str,
    fault_of: Callable[[Record], str] = lambda record: "",
) -> list[Record]:
    """Return the records of a JSON-lines file; refuse records with a missing field, a wrong type or a wrong value.

    `fault_of` returns the fault in the values of a record whose types are right, or "".
    """

    def make(line: int, value: Mapping[str, object]) -> list[Record]:
        record = Record(line, value)
        if fault := _fault(value, fields) or fault_of(record):
            raise RowFault(fault)
        return [record]

    return read_rows(path, make, f"each line has the form {example}")


def check_faults(faults: list[str], remedy: str) -> None:
    """Raise an error with the first faults and the number of further faults."""
    if not faults:
        return
    more = [f"... and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
    raise DataError("\n".join([*faults[:MOST_FAULTS], *more]), remedy)


def read_text(path: Path, remedy: str = "name a local file with --data") -> str:
    """Return the text of a file; raise a DataError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", remedy) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}", remedy) from None


def _fault(value: Mapping[str, object], fields: Mapping[str, type | tuple[type, ...]]) -> str:
    if half := half_in(value):
        return half
    own = ", ".join(sorted(map(str, value))) or "none"
    faults = []
    for name, kinds in fields.items():
        if name not in value:
            faults.append(f"has no field {name!r} (it has: {own})")
        elif not isinstance(value[name], kinds) or isinstance(value[name], bool):
            faults.append(f"field {name!r} has the wrong type: {type(value[name]).__name__}")
    return "; ".join(faults)
