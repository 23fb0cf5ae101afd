"""Apply DeepSpeed's `--include` and `--exclude`, with the results that its documentation describes.

`NODE[:SLOT[,SLOT...]][@NODE...]`: a node without slots stands for all its slots. Releases of DeepSpeed have dropped
whole nodes from an include, accepted `-i w0:5` for a node of four slots, and kept a node that `-e w1@w1:0` excludes
completely. Here the filters follow the documentation, and all faults are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from clusterctl.errors import Fault, InputFaults, UsageError, did_you_mean

_GRAMMAR = "NODE[:SLOT[,SLOT...]][@NODE...], as in w0@w1:0,2"
_SLOT = re.compile(r"[0-9]{1,4}\Z")

Slots = dict[str, tuple[int, ...]]


def chosen(slots_of: Mapping[str, Sequence[int]], include: str | None, exclude: str | None) -> Slots:
    """Return the slots of each node that a filter selects, in the order of the hostfile."""
    # An empty value, such as an unset shell variable, must not select all slots.
    if empty := [name for name, text in (("--include", include), ("--exclude", exclude)) if text == ""]:
        raise InputFaults([Fault(name, "is empty", _GRAMMAR) for name in empty])
    if include and exclude:
        raise UsageError(
            "--include and --exclude can't be given together",
            "use --include alone; it already excludes the rest",
        )
    option = "--include" if include else "--exclude"
    named = _read(include or exclude or "", option, slots_of)
    if include:
        selected = {node: named.get(node, set()) for node in slots_of}
    else:
        selected = {node: set(slots) - named.get(node, set()) for node, slots in slots_of.items()}
    left = {
        node: tuple(slot for slot in slots_of[node] if slot in selected[node])
        for node in slots_of
        if selected[node]
    }
    if not left:
        raise UsageError(f"{option}: the filter leaves no slot", f"the nodes are {_shown(slots_of)}")
    return left


def _read(text: str, option: str, slots_of: Mapping[str, Sequence[int]]) -> dict[str, set[int]]:
    """Return the slots of each node that a filter lists; a node without slots means all of them."""
    named: dict[str, set[int]] = {}
    faults: list[Fault] = []
    for part in text.split("@") if text else ():
        node, colon, listed = part.partition(":")
        if node not in slots_of:
            near = did_you_mean(node, list(slots_of)) or f"the nodes are {_shown(slots_of)}"
            faults.append(Fault(option, f"no node {node[:80]!r}" if node else "an empty node", near))
            continue
        here = named.setdefault(node, set())
        if not colon:
            here.update(slots_of[node])
        for slot in listed.split(",") if colon else ():
            faults += _slot_faults(slot, node, option, slots_of[node])
            here.update({int(slot)} if _SLOT.match(slot) else ())
    if faults:
        raise InputFaults(faults)
    return named


def _slot_faults(slot: str, node: str, option: str, slots: Sequence[int]) -> Iterator[Fault]:
    if not _SLOT.match(slot):
        yield Fault(option, f"{node}:{slot[:80]} is not a slot", _GRAMMAR)
    elif int(slot) not in slots:
        yield Fault(option, f"{node} has no slot {slot}", f"it has {','.join(map(str, slots[:64]))}")


def _shown(slots_of: Mapping[str, Sequence[int]]) -> str:
    names = list(slots_of)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
