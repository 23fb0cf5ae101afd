"""Write the hostfiles of DeepSpeed, OpenMPI and MPICH (one line for each node), and read them strictly.

DeepSpeed reads `w[0-3] slots=8` as one node of that name, accepts `slots=0` and ignores the rest of the line; a
name that begins with `-` becomes an option of ssh. Here all of these are faults, reported with their lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.errors import Collected, Fault, InputFaults, UsageError, did_you_mean
from clusterctl.inventory.addresses import address_fault, same_place
from clusterctl.inventory.cluster import Cluster

FORMATS = ("deepspeed", "openmpi", "mpich")
MAX_BYTES = 16 << 20
MAX_SLOTS = 4096
# Unknown words of a line that an error shows.
MOST_WORDS = 3

_HOST = re.compile(r"(?:([A-Za-z_][A-Za-z0-9._-]*)@)?([A-Za-z0-9][A-Za-z0-9._:%-]*)\Z")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*\Z")


@dataclass(frozen=True)
class Entry:
    """One line of a hostfile: a node and its number of ranks."""

    address: str
    slots: int | None
    """None if the file has no count."""
    user: str | None = None
    line: int = 0
    max_slots: int | None = None
    """OpenMPI: the limit for more ranks than slots."""
    devices: tuple[int, ...] | None = None
    """The devices of the slots; None means the first ones."""
    form: str = ""
    """The form of the line: slots (`a slots=8`), colon (`a:8`), lines (`a`, repeated), or empty for a bare name."""


def render(cluster: Cluster, format: str, slots: Mapping[str, int] | None = None) -> str:
    """Return the hostfile of a cluster; `slots` by node name, by default the number of its devices, at least one."""
    counts = [(slots or {}).get(node.name, len(node.devices) or 1) for node in cluster.nodes]
    entries = [Entry(node.address, count) for node, count in zip(cluster.nodes, counts, strict=True)]
    return render_entries([entry for entry in entries if entry.slots], format)


def render_entries(entries: Sequence[Entry], format: str) -> str:
    """Return the hostfile of these nodes; what the format cannot express is left out (see `convert`)."""
    if format not in FORMATS:
        near = did_you_mean(format, FORMATS)
        raise UsageError(f"unknown hostfile format {format!r}", near or f"use one of {', '.join(FORMATS)}")
    text = "".join(f"{_line(entry, format)}\n" for entry in entries)
    faults = [
        Fault(
            f"the hostfile:{number}",
            f"{format} can't hold the address {entry.address}",
            "give the node a name",
        )
        for number, entry in enumerate(entries, 1)
        if format == "mpich" and ":" in entry.address
    ]
    # `::1:8` would be an address.
    if faults:
        raise InputFaults(faults)
    parse(text, "the hostfile")
    return text


def _line(entry: Entry, format: str) -> str:
    if format == "mpich":
        user = f" user={entry.user}" if entry.user else ""
        return entry.address + (f":{entry.slots}" if entry.slots is not None else "") + user
    fields = [entry.address if format == "deepspeed" or not entry.user else f"{entry.user}@{entry.address}"]
    if entry.slots is not None:
        fields.append(f"slots={entry.slots}")
    if entry.max_slots is not None and format == "openmpi":
        fields.append(f"max_slots={entry.max_slots}")
    return " ".join(fields)


def deepspeed(cluster: Cluster, slots: Mapping[str, int] | None = None) -> str:
    """Return a DeepSpeed hostfile: `10.0.0.1 slots=8`, one line for each node."""
    return render(cluster, "deepspeed", slots)


def parse(text: str, source: str = "hostfile") -> list[Entry]:
    """Return the entries in the text of a hostfile; raise InputFaults with all of its faults."""
    entries, faults = inspect_text(text, source)
    if faults:
        raise InputFaults(faults)
    return entries


def inspect(path: Path) -> tuple[list[Entry], list[Fault]]:
    """Return the entries and the faults of a hostfile; raise UsageError if there is no such file."""
    text, faults = read_text(path)
    return inspect_text(text, str(path)) if not faults else ([], faults)


def read_text(path: Path) -> tuple[str, list[Fault]]:
    """Return the text of a file, or its faults; raise UsageError if there is no such file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MB", "is this the right file?")
        return path.read_bytes().decode("utf-8-sig"), []
    except UnicodeDecodeError as error:
        return "", [Fault(str(path), f"not UTF-8 text (byte {error.start})", "save the file as UTF-8")]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", "check the name and its permissions") from None


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines with their numbers, without comments and blank lines."""
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.removesuffix("\r").split("#", 1)[0].strip()
        if line:
            yield number, line


def inspect_text(text: str, source: str) -> tuple[list[Entry], list[Fault]]:
    """Return the entries and the faults in the text of a hostfile."""
    entries: list[Entry] = []
    nodes: list[Entry] = []
    faults: list[Fault] = []
    for number, line in lines(text):
        entry, errors = _entry(line, number)
        faults += [Fault(f"{source}:{number}", error.message, error.hint) for error in errors]
        nodes += [entry] if entry else []
        entries += [entry] if entry and not errors else []
    entries, nodes = _counted(entries), _counted(nodes)
    faults += twice(nodes, source)
    faults += _mixture(entries, source)
    if not entries and not faults:
        faults.append(Fault(source, "lists no nodes", "one line for each node, as in `10.0.0.1 slots=8`"))
    return entries, sorted(faults, key=lambda fault: _number(fault.where))


def _counted(entries: Sequence[Entry]) -> list[Entry]:
    """Return a bare name on several lines as one node with a slot for each line, as mpirun counts them."""
    found: list[Entry] = []
    index: dict[tuple[str, str | None], int] = {}
    for entry in entries:
        number = index.setdefault((same_place(entry.address), entry.user), len(found))
        if number == len(found) or entry.form or found[number].form not in ("", "lines"):
            found.append(entry)
        else:
            found[number] = replace(found[number], slots=(found[number].slots or 1) + 1, form="lines")
    if not any(entry.form == "lines" for entry in found):
        return found
    return [entry if entry.form else replace(entry, slots=1, form="lines") for entry in found]


def twice(entries: Iterable[Entry], source: str) -> Iterator[Fault]:
    """Yield a fault for every node that is repeated."""
    first: dict[str, int] = {}
    for entry in entries:
        place_of = same_place(entry.address)
        if place_of in first:
            also = f"on line {first[place_of]} too" if first[place_of] != entry.line else "listed twice here"
            problem = f"{entry.address} is {also}"
            yield Fault(f"{source}:{entry.line}", problem, "write one line for each node, with all its slots")
        first.setdefault(place_of, entry.line)


def _mixture(entries: Sequence[Entry], source: str) -> Iterator[Fault]:
    """Yield a fault for `a slots=8` next to `b:8`: no launcher reads both."""
    forms = [entry for entry in entries if entry.form in ("slots", "colon")]
    for entry in forms[1:]:
        if entry.form != forms[0].form:
            spellings = {"slots": "slots=", "colon": "MPICH's `name:slots`"}
            first = f"line {forms[0].line} has {spellings[forms[0].form]}"
            problem = f"{spellings[entry.form]}, and {first}: no launcher reads both"
            yield Fault(f"{source}:{entry.line}", problem, "write all lines in one form")
            return


def _number(where: str) -> int:
    number = where.rpartition(":")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def dialect(entries: Sequence[Entry]) -> str:
    """Return the dialect: deepspeed if its strict form fits, else openmpi or mpich; `names` for bare names."""
    if any(entry.form == "colon" for entry in entries):
        return "mpich"
    if any(entry.user or entry.max_slots or entry.form == "lines" for entry in entries):
        return "openmpi"
    plain = [entry.form == "slots" for entry in entries]
    return "deepspeed" if all(plain) else "openmpi" if any(plain) else "names"


def _entry(line: str, number: int) -> tuple[Entry | None, list[UsageError]]:
    """Return the node of a line, or None if its name is not valid, and all errors of the line."""
    name, *fields = line.split()
    errors, found, unexpected = Collected(), dict[str, int](), list[str]()
    # One colon only: an IPv6 address has more.
    mpich_form = re.fullmatch(r"([^:]+):([^:]*)", name)
    if mpich_form:
        name, found["slots"] = mpich_form[1], 1
        with errors:
            found["slots"] = _slots(mpich_form[2], "slots")
    host = _HOST.match(name)
    with errors:
        if not host:
            raise _no_host(name)
        if fault := address_fault(host[2]):
            raise UsageError(fault, "as in 10.0.0.1 or fd00::1, or a name")
    user: str | None = host[1] if host else None
    form = "colon" if mpich_form else ""
    for word in fields:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if key == "user" and user is None and (mpich_form or not found) and _USER.match(value):
            # This is MPICH's form, which may have no count.
            user, form = value, "colon"
        elif not equals or key not in ("slots", "max_slots") or (form and not mpich_form):
            unexpected.append(word)
        else:
            with errors:
                if key in found:
                    problem = f"{key.replace('_', ' ')} are repeated"
                    raise UsageError(problem, "`10.0.0.1 slots=8` or `10.0.0.1:8`")
                found[key] = 1
                found[key] = _slots(value, key)
    if unexpected:
        errors.errors.append(_unexpected(unexpected))
    most = found.get("max_slots")
    # Open MPI takes the limit for a missing number of slots.
    slots = found.get("slots", most)
    if most is not None and slots is not None and most < slots and not errors.errors:
        hint = f"max_slots={slots}, or leave it out"
        errors.errors.append(UsageError(f"max_slots={most} is less than slots={slots}", hint))
    form = form or ("slots" if found else "")
    return Entry(host[2], slots, user, number, most, form=form) if host else None, errors.errors


def _unexpected(words: Sequence[str]) -> UsageError:
    """Return one error for all unknown words of a line: `slots = 8` is one error, not three."""
    key, equals, _ = words[0].partition("=")
    more = f" and {len(words) - MOST_WORDS} more words" if len(words) > MOST_WORDS else ""
    shown = ", ".join(repr(word[:80]) for word in words[:MOST_WORDS])
    return UsageError(f"unexpected {shown}{more}", _word_hint(key.replace("-", "_"), equals))


def _no_host(name: str) -> UsageError:
    problem = "a name can't begin with '-'" if name[:1] == "-" else "not a valid node name"
    if name.startswith("[") and ":" in name:
        problem = "write an IPv6 address without brackets"
        return UsageError(f"{name[:80]!r}: {problem}", "as in `fd00::1 slots=8`")
    if "[" in name:
        problem = "a hostfile has no node sets; DeepSpeed reads one name"
        return UsageError(f"{name[:80]!r}: {problem}", "one line for each node")
    return UsageError(f"{name[:80]!r}: {problem}", "a name or an address, as in `10.0.0.1 slots=8`")


def _word_hint(key: str, equals: str) -> str:
    if key == "slots" and not equals:
        return "remove the blanks around '=', as in slots=8"
    return did_you_mean(key, ("slots",)) or "as in `10.0.0.1 slots=8`; a comment begins with '#'"


def _slots(text: str, key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise UsageError(f"{key}={text[:80]!r} is not a number", f"give a whole number, as in {key}=8")
    count = int(text)
    if not 0 < count <= MAX_SLOTS:
        problem = f"{key}={count} is not possible"
        raise UsageError(problem, f"use 1 to {MAX_SLOTS}; leave the line out for a node without ranks")
    return count
