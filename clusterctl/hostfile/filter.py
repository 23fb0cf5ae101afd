"""DeepSpeed's `--include` and `--exclude`, with the results that its documentation promises.

`NODE[:SLOT[,SLOT...]][@NODE...]`: a node alone is the whole of it. Releases of DeepSpeed have dropped whole
nodes from an include, let `-i w0:5` pass on a node of four slots, and kept a node that `-e w1@w1:0` excludes
whole; here the words mean what they say, and every fault is told at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from clusterctl.errors import Fault, InputFaults, UsageError, did_you_mean

_GRAMMAR = "NODE[:SLOT[,SLOT...]][@NODE...], as in w0@w1:0,2"
_SLOT = re.compile(r"[0-9]{1,4}\Z")

Slots = dict[str, tuple[int, ...]]


def chosen(there: Mapping[str, Sequence[int]], include: str | None, exclude: str | None) -> Slots:
    """The slots of each node that a filter leaves, nodes in the hostfile's order, slots in their own."""
    if include and exclude:
        raise UsageError("--include and --exclude can't be given together", "one of them says the same")
    named = _read(include or exclude or "", "--include" if include else "--exclude", there)
    if include:
        kept = {node: named.get(node, set()) for node in there}
    else:
        kept = {node: set(slots) - named.get(node, set()) for node, slots in there.items()}
    left = {node: tuple(slot for slot in there[node] if slot in kept[node]) for node in there if kept[node]}
    if not left:
        raise UsageError("the filter leaves no slot", f"there are: {_shown(there)}")
    return left


def _read(text: str, option: str, there: Mapping[str, Sequence[int]]) -> dict[str, set[int]]:
    """What a filter names: a node's slots, all of them where it stands alone once."""
    named: dict[str, set[int]] = {}
    faults: list[Fault] = []
    for part in text.split("@") if text else ():
        node, colon, listed = part.partition(":")
        if node not in there:
            near = did_you_mean(node, list(there)) or f"there are: {_shown(there)}"
            faults.append(Fault(option, f"no node {node[:80]!r}" if node else "an empty node", near))
            continue
        here = named.setdefault(node, set())
        if not colon:
            here.update(there[node])
        for slot in listed.split(",") if colon else ():
            faults += _slot_faults(slot, node, option, there[node])
            here.update({int(slot)} if _SLOT.match(slot) else ())
    if faults:
        raise InputFaults(faults)
    return named


def _slot_faults(slot: str, node: str, option: str, there: Sequence[int]) -> Iterator[Fault]:
    if not _SLOT.match(slot):
        yield Fault(option, f"{node}:{slot[:80]} names no slot", _GRAMMAR)
    elif int(slot) not in there:
        yield Fault(option, f"{node} has no slot {slot}", f"it has {','.join(map(str, there[:64]))}")


def _shown(there: Mapping[str, Sequence[int]]) -> str:
    names = list(there)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
