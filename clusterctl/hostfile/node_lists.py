"""Read and write Slurm's node lists, such as `node[01-16],big`, and task counts, such as `8(x4),4`.

A node list keeps its order, since the counts in SLURM_TASKS_PER_NODE follow it. A file contains one list per line,
or what `env | grep SLURM_` prints.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from clusterctl.errors import Fault, UsageError
from clusterctl.hostfile.formats import FORMATS, MAX_SLOTS, Entry, lines, twice
from clusterctl.inventory.addresses import address_fault

# The name of this form; what hosts can be written as; and what is read as an inventory.
NODE_LISTS = "slurm"
TARGETS = (*FORMATS, NODE_LISTS, "torchrun", "cluster")
NAMES = f"{', '.join(TARGETS[:-1])} or {TARGETS[-1]}"
FILES = "cluster.yaml, hostfile, Slurm node list or rank table"
# The second is the old name.
NODES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
TASKS = ("SLURM_TASKS_PER_NODE",)
# The number of components of an allocation such as `salloc -N1 : -N1`.
COMPONENTS = "SLURM_HET_SIZE"
VARIABLES = (*NODES, *TASKS)
MAX_BRACKETS = 8
# The largest Slurm clusters have about 10,000 nodes.
MAX_NODES = 100_000

_ASSIGNED = re.compile(r"(?:export\s+)?(SLURM_[A-Z0-9_]+)=(.*)\Z")
_PART = re.compile(r"([0-9]{1,5})(?:\(x([0-9]{1,6})\))?\Z")
# A Slurm list contains no colon and no @.
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def looks_like(text: str) -> bool:
    """Return whether a text has Slurm's variables, or only node lists with brackets or commas."""
    content = [line for _, line in lines(text)]
    if any(_ASSIGNED.match(line) for line in content):
        return True
    lists = [line for line in content if "[" in line or "," in line]
    return bool(lists) and not any(re.search(r"\s|=|:", re.sub(r"\[[^\]]*\]", "", line)) for line in content)


def inspect_text(text: str, source: str) -> tuple[list[Entry], list[Fault]]:
    """Return the nodes in a Slurm text, and all of its faults."""
    found: dict[str, tuple[int, str]] = {}
    lists: list[tuple[int, str]] = []
    faults: list[Fault] = []
    for number, line in lines(text):
        assigned = _ASSIGNED.match(line)
        if not assigned:
            lists.append((number, line))
        elif assigned[1] in VARIABLES:
            found[assigned[1]] = (number, _unquoted(assigned[2]))
    named = [found[name] for name in NODES if name in found][:1]
    if named and lists:
        problem = f"{lists[0][1][:80]!r} in addition to {NODES[0]}"
        faults.append(Fault(f"{source}:{lists[0][0]}", problem, "give variables or lists, not both"))
    entries = list(_named(named or lists, source, faults))
    faults += twice(entries, source)
    if not entries and not faults:
        faults.append(Fault(source, "names no nodes", f"{NODES[0]}=node[1-4]"))
    tasks = next((found[name] for name in TASKS if name in found), None)
    return (_counted(entries, tasks, source, faults) if tasks else entries), faults


def from_variables(variables: Mapping[str, str]) -> tuple[list[Entry], list[Fault]]:
    """Return the nodes of the Slurm allocation in these variables."""
    if fault := heterogeneous(variables):
        return [], [fault]
    names = [name for name in VARIABLES if variables.get(name)]
    entries, faults = inspect_text("".join(f"{name}={variables[name]}\n" for name in names), "")
    lines_of = {f":{number}": f"${name}" for number, name in enumerate(names, 1)}
    renamed = [replace(fault, where=lines_of.get(fault.where, "the Slurm allocation")) for fault in faults]
    return [replace(entry, line=0) for entry in entries], renamed


def heterogeneous(variables: Mapping[str, str]) -> Fault | None:
    """Return the fault of an allocation with several components, which Slurm describes by other variables."""
    count = variables.get(COMPONENTS, "")
    if count in ("", "0", "1"):
        return None
    problem = f"is {count}: a heterogeneous allocation, of which srun starts one component at a time"
    remedy = "allocate all nodes in one component: salloc -N2; or use one: srun --het-group=0"
    return Fault(f"${COMPONENTS}", problem, remedy)


def _named(lists: Iterable[tuple[int, str]], source: str, faults: list[Fault]) -> Iterator[Entry]:
    for number, line in lists:
        try:
            yield from [Entry(name, None, line=number) for name in expand(line)]
        except UsageError as error:
            faults.append(Fault(f"{source}:{number}", error.message, error.hint))


def _counted(entries: list[Entry], tasks: tuple[int, str], source: str, faults: list[Fault]) -> list[Entry]:
    """Return the same nodes with their numbers of ranks."""
    try:
        counts = read_tasks(tasks[1])
        if len(counts) != len(entries) and not faults:
            problem = f"{TASKS[0]} has counts for {len(counts)} nodes, but the list has {len(entries)}"
            raise UsageError(problem, f"as in 8(x{len(entries)})")
    except UsageError as error:
        faults.append(Fault(f"{source}:{tasks[0]}", error.message, error.hint))
    if faults:
        return entries
    return [replace(entry, slots=count) for entry, count in zip(entries, counts, strict=True)]


def expand(text: str) -> list[str]:
    """Return the names in a Slurm node list in their order, with repetitions: `n[3,1-2]` is n3 n1 n2."""
    names: list[str] = []
    for part in _top_parts(text):
        if not part.count("[") == part.count("]") <= MAX_BRACKETS or re.search(r"[!&^@*?/\s]", part):
            raise UsageError(f"{part[:80]!r} is not a Slurm node list", "as in node[01-16,20],big")
        names += _product(part)
        if len(names) > MAX_NODES:
            raise UsageError(f"{text[:80]!r}: more than {MAX_NODES:,} nodes", "use a shorter range")
    for name in names:
        if not _HOST.match(name):
            problem = "a name can't begin with '-'" if name[:1] == "-" else "not a valid node name"
            raise UsageError(f"{name[:80]!r}: {problem}", "as in node[01-16,20],big")
        if fault := address_fault(name):
            raise UsageError(fault, "as in 10.0.0.[1-4]")
    return names


def _product(part: str) -> list[str]:
    """Return the names in one part, in Slurm's order.

    The number in the last bracket changes fastest; of the brackets before it, the first one changes fastest.
    """
    texts, lists = [], []
    head, bracket, rest = part.partition("[")
    while bracket:
        inside, _, rest = rest.partition("]")
        texts.append(head)
        lists.append([number for piece in inside.split(",") for number in _numbers(piece)])
        head, bracket, rest = rest.partition("[")
    if not lists:
        return [part]
    if head:
        raise UsageError(
            f"{part[:80]!r}: Slurm takes no text after the last bracket", "as in rack[1-2]node[1-4]"
        )
    if math.prod(map(len, lists)) > MAX_NODES:
        raise UsageError(f"{part[:80]!r}: more than {MAX_NODES:,} nodes", "use a shorter range")
    *others, last = lists
    names = []
    for numbers in itertools.product(*reversed(others)):
        prefix = "".join(text + number for text, number in zip(texts, reversed(numbers), strict=False))
        names += [prefix + texts[-1] + number for number in last]
    return names


def _numbers(piece: str) -> Sequence[str]:
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", piece)
    if not match or (match[2] and int(match[2]) < int(match[1])):
        raise UsageError(f"{piece[:80]!r} is not a range of node numbers", "as in node[01-16,20]")
    first, last = int(match[1]), int(match[2] or match[1])
    if last - first >= MAX_NODES:
        raise UsageError(f"[{piece}]: more than {MAX_NODES:,} nodes", "use a shorter range")
    # Slurm pads to the width of the first number in the range.
    width = len(match[1])
    return [str(number).zfill(width) for number in range(first, last + 1)]


def _top_parts(text: str) -> Iterator[str]:
    """Yield the parts between commas that are outside of brackets."""
    start, inside = 0, False
    for index, char in enumerate(text + ","):
        inside = char == "[" or (inside and char != "]" and index < len(text))
        if char == "," and not inside:
            if not text[start:index].strip():
                raise UsageError(
                    f"{text[:80]!r}: a comma without a name on both sides", "as in node[1-4],big"
                )
            yield text[start:index].strip()
            start = index + 1


def read_tasks(text: str) -> list[int]:
    """Return `8(x4),4` as [8, 8, 8, 8, 4]."""
    counts: list[int] = []
    for part in text.split(","):
        match = _PART.match(part.strip())
        if not match or not 0 < int(match[1]) <= MAX_SLOTS or (match[2] is not None and int(match[2]) == 0):
            raise UsageError(f"{part[:80]!r} is not a number of tasks", f"1 to {MAX_SLOTS}, as in 8(x4),4")
        times = int(match[2] or 1)
        if len(counts) + times > MAX_NODES:
            raise UsageError(f"{text[:80]!r}: more than {MAX_NODES:,} nodes", "8(x4) is four nodes of 8")
        counts += [int(match[1])] * times
    return counts


def render_tasks(counts: Sequence[int]) -> str:
    """Return [8, 8, 8, 8, 4] as `8(x4),4`."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)


def fold(names: Sequence[str]) -> str:
    """Return names as a Slurm list in their order; consecutive names are joined if their numbers rise by one."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _next(runs[-1][-1]) == name:
            runs[-1].append(name)
        else:
            runs.append([name])
    # A prefix and the ranges in its brackets.
    parts: list[tuple[str, list[str]]] = []
    for run in runs:
        head, digits = _split(run[0])
        text = digits if len(run) == 1 else f"{digits}-{_split(run[-1])[1]}"
        if parts and digits and parts[-1][0] == head and parts[-1][1] != [""]:
            parts[-1][1].append(text)
        else:
            parts.append((head, [text]))
    return ",".join(_part(head, texts) for head, texts in parts)


def _part(head: str, texts: Sequence[str]) -> str:
    return head + texts[0] if len(texts) == 1 and "-" not in texts[0] else f"{head}[{','.join(texts)}]"


def _split(name: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.*?)([0-9]{1,18})", name)
    return (match[1], match[2]) if match else (name, "")


def _next(name: str) -> str:
    """Return the name that follows (node09 -> node10), or "" if the name has no number."""
    head, digits = _split(name)
    return head + str(int(digits) + 1).zfill(len(digits)) if digits else ""


def render(entries: Sequence[Entry]) -> str:
    """Return the two variables as shell assignments; without counts only the first."""
    names = [entry.address for entry in entries]
    text = f"SLURM_JOB_NODELIST='{fold(names)}'\n"
    counts = [entry.slots for entry in entries if entry.slots is not None]
    if len(counts) == len(entries):
        text += f"SLURM_TASKS_PER_NODE='{render_tasks(counts)}'\n"
    return text


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
