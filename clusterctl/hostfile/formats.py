"""Hostfiles of a line a node: a Cluster as DeepSpeed, OpenMPI and MPICH want it, and their texts read strictly.

DeepSpeed takes `w[0-3] slots=8` for one node of that name, passes `slots=0` and ignores what follows; a
name that begins with `-` becomes an option of ssh. All of these are faults here, each with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import Fault, InputFaults, UsageError, did_you_mean
from clusterctl.inventory.addresses import address_fault, same_place

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster

FORMATS = ("deepspeed", "openmpi", "mpich")
MAX_BYTES = 16 << 20
MAX_SLOTS = 4096

_HOST = re.compile(r"(?:([A-Za-z_][A-Za-z0-9._-]*)@)?([A-Za-z0-9][A-Za-z0-9._:%-]*)\Z")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*\Z")


@dataclass(frozen=True)
class Entry:
    """One node: where it is, and how many ranks it takes."""

    address: str
    slots: int | None
    """None where the file does not say."""
    user: str | None = None
    line: int = 0
    max_slots: int | None = None
    """OpenMPI's limit for more ranks than slots."""
    devices: tuple[int, ...] | None = None
    """Which devices the slots are; None means the first ones."""
    form: str = ""
    """How the line was written: slots (`a slots=8`), colon (`a:8`), or nothing for a bare name."""


def render(cluster: Cluster, format: str, slots: Mapping[str, int] | None = None) -> str:
    """A cluster's hostfile; `slots` by node name, a node's devices (at least one) where nothing is said."""
    counts = [(slots or {}).get(node.name, len(node.devices) or 1) for node in cluster.nodes]
    entries = [Entry(node.address, count) for node, count in zip(cluster.nodes, counts, strict=True)]
    return render_entries([entry for entry in entries if entry.slots], format)


def render_entries(entries: Sequence[Entry], format: str) -> str:
    """The hostfile of a few nodes; what the format has no word for is left out (see hostfile_convert)."""
    if format not in FORMATS:
        near = did_you_mean(format, FORMATS)
        raise UsageError(f"unknown hostfile format {format!r}", near or f"one of {', '.join(FORMATS)}")
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
    # `::1:8` would be read as an address.
    if faults:
        raise InputFaults(faults)
    parse(text, "the hostfile")
    return text


def _line(entry: Entry, format: str) -> str:
    if format == "mpich":
        user = f" user={entry.user}" if entry.user else ""
        return entry.address + (f":{entry.slots}" if entry.slots is not None else "") + user
    words = [entry.address if format == "deepspeed" or not entry.user else f"{entry.user}@{entry.address}"]
    if entry.slots is not None:
        words.append(f"slots={entry.slots}")
    if entry.max_slots is not None and format == "openmpi":
        words.append(f"max_slots={entry.max_slots}")
    return " ".join(words)


def deepspeed(cluster: Cluster, slots: Mapping[str, int] | None = None) -> str:
    """`10.0.0.1 slots=8`, a line a node."""
    return render(cluster, "deepspeed", slots)


def openmpi(cluster: Cluster, slots: Mapping[str, int] | None = None) -> str:
    """`10.0.0.1 slots=8`, a line a node."""
    return render(cluster, "openmpi", slots)


def mpich(cluster: Cluster, slots: Mapping[str, int] | None = None) -> str:
    """`10.0.0.1:8`, a line a node."""
    return render(cluster, "mpich", slots)


def load(path: Path) -> list[Entry]:
    """Read a hostfile of any of the formats; all its faults at once."""
    entries, faults = inspect(path)
    if faults:
        raise InputFaults(faults)
    return entries


def parse(text: str, source: str = "hostfile") -> list[Entry]:
    """The entries of a hostfile's text; all its faults at once."""
    entries, faults = inspect_text(text, source)
    if faults:
        raise InputFaults(faults)
    return entries


def inspect(path: Path) -> tuple[list[Entry], list[Fault]]:
    """What a hostfile names and what is wrong with it; no such file is the command line's fault."""
    text, faults = read_text(path)
    return inspect_text(text, str(path)) if not faults else ([], faults)


def read_text(path: Path) -> tuple[str, list[Fault]]:
    """A file's text, or why it has none; a file that is not there is the command line's fault."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MB", "is this the right file?")
        return path.read_bytes().decode("utf-8-sig"), []
    except UnicodeDecodeError as error:
        return "", [Fault(str(path), f"not UTF-8 text (byte {error.start})", "save the file as UTF-8")]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", "check the name and its permissions") from None


def lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that say something, with their numbers: no comments, no blank ones."""
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.removesuffix("\r").split("#", 1)[0].strip()
        if line:
            yield number, line


def inspect_text(text: str, source: str) -> tuple[list[Entry], list[Fault]]:
    """What a hostfile's text names, and everything that is wrong with it."""
    entries: list[Entry] = []
    faults: list[Fault] = []
    for number, line in lines(text):
        try:
            entries.append(_entry(line, number))
        except UsageError as error:
            faults.append(Fault(f"{source}:{number}", error.message, error.hint))
    faults += twice(entries, source)
    faults += _mixture(entries, source)
    if not entries and not faults:
        faults.append(Fault(source, "names no nodes", "a line a node, as in `10.0.0.1 slots=8`"))
    return entries, sorted(faults, key=lambda fault: _number(fault.where))


def twice(entries: Iterable[Entry], source: str) -> Iterator[Fault]:
    """A fault for every node that stands in a file again."""
    first: dict[str, int] = {}
    for entry in entries:
        place_of = same_place(entry.address)
        if place_of in first:
            place = f"on line {first[place_of]} too" if first[place_of] != entry.line else "here twice"
            what = f"{entry.address} stands {place}"
            yield Fault(f"{source}:{entry.line}", what, "one line a node, with all its slots")
        first.setdefault(place_of, entry.line)


def _mixture(entries: Sequence[Entry], source: str) -> Iterator[Fault]:
    """`a slots=8` beside `b:8`: no launcher takes both."""
    forms = [entry for entry in entries if entry.form]
    for entry in forms[1:]:
        if entry.form != forms[0].form:
            words = {"slots": "slots=", "colon": "MPICH's `name:slots`"}
            what = f"{words[entry.form]}, and line {forms[0].line} has {words[forms[0].form]}: no launcher takes both"
            yield Fault(f"{source}:{entry.line}", what, "write all lines in one way")
            return


def _number(where: str) -> int:
    number = where.rpartition(":")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def dialect(entries: Sequence[Entry]) -> str:
    """Whose file it is: DeepSpeed's where its strict form holds, else OpenMPI's or MPICH's; `names` for bare names."""
    if any(entry.form == "colon" for entry in entries):
        return "mpich"
    if any(entry.user or entry.max_slots for entry in entries):
        return "openmpi"
    plain = [entry.form == "slots" for entry in entries]
    return "deepspeed" if all(plain) else "openmpi" if any(plain) else "names"


def _entry(line: str, number: int) -> Entry:
    name, *words = line.split()
    found: dict[str, int] = {}
    # One colon only: more of them are an IPv6 address.
    mpich_form = re.fullmatch(r"([^:]+):([^:]*)", name)
    if mpich_form:
        name, found["slots"] = mpich_form[1], _slots(mpich_form[2], "slots")
    host = _HOST.match(name)
    if not host:
        raise _no_host(name)
    if fault := address_fault(host[2]):
        raise UsageError(fault, "as in 10.0.0.1 or fd00::1, or a name")
    user: str | None = host[1]
    form = "colon" if mpich_form else ""
    for word in words:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if key == "user" and user is None and (mpich_form or not found) and _USER.match(value):
            # MPICH's, which may stand without a count.
            user, form = value, "colon"
        elif not equals or key not in ("slots", "max_slots") or (form and not mpich_form):
            raise UsageError(f"unexpected {word[:80]!r}", _word_hint(key, equals))
        elif key in found:
            raise UsageError(f"{key.replace('_', ' ')} are given twice", "`10.0.0.1 slots=8` or `10.0.0.1:8`")
        else:
            found[key] = _slots(value, key)
    slots, most = found.get("slots"), found.get("max_slots")
    if most is not None and slots is not None and most < slots:
        raise UsageError(
            f"max_slots={most} is less than slots={slots}", f"max_slots={slots}, or leave it out"
        )
    form = form or ("slots" if found else "")
    return Entry(host[2], slots, user, number, most, form=form)


def _no_host(name: str) -> UsageError:
    what = "a name can't begin with '-'" if name[:1] == "-" else "no name of a node"
    if name.startswith("[") and ":" in name:
        what = "an IPv6 address stands without brackets"
        return UsageError(f"{name[:80]!r}: {what}", "as in `fd00::1 slots=8`")
    if "[" in name:
        what = "a hostfile has no node sets; it is one name to DeepSpeed"
        return UsageError(f"{name[:80]!r}: {what}", "a line a node")
    return UsageError(f"{name[:80]!r}: {what}", "a name or an address, as in `10.0.0.1 slots=8`")


def _word_hint(key: str, equals: str) -> str:
    if key == "slots" and not equals:
        return "no blanks around '=', as in slots=8"
    return did_you_mean(key, ("slots",)) or "`10.0.0.1 slots=8`, comments after '#'"


def _slots(text: str, key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise UsageError(f"{key}={text[:80]!r} is no number", f"a whole number, as in {key}=8")
    count = int(text)
    if not 0 < count <= MAX_SLOTS:
        raise UsageError(f"{key}={count}", f"1 to {MAX_SLOTS}; leave the line out for a node without ranks")
    return count
