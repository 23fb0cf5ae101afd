"""Read the records of a task's data file; all faults are reported together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import DataError
from trainer.surrogates import half_in

MOST_FAULTS = 10


@dataclass(frozen=True)
class Record:
    """One JSON object of a file; `line` counts from 1."""

    line: int
    value: Mapping[str, object]


def read_records(
    path: Path,
    fields: Mapping[str, type | tuple[type, ...]],
    example: str,
    fault_of: Callable[[Record], str] = lambda record: "",
) -> list[Record]:
    """Return the records of a JSON-lines file; refuse records with a missing field, a wrong type or a wrong value.

    `fault_of` returns the fault in the values of a record whose types are right, or "".
    """
    records, faults = [], list[str]()
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            faults.append(f"{path}:{number}: not JSON: {error}")
            continue
        fault = _fault(value, fields) or fault_of(Record(number, value))
        if fault:
            faults.append(f"{path}:{number}: {fault}")
        else:
            records.append(Record(number, value))
    check_faults(faults, f"each line has the form {example}")
    if not records:
        raise DataError(f"{path}: contains no records", f"each line has the form {example}")
    return records


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


def _lines(path: Path) -> list[str]:
    return read_text(path).split("\n")


def _fault(value: object, fields: Mapping[str, type | tuple[type, ...]]) -> str:
    if not isinstance(value, dict):
        return "not a JSON object"
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
