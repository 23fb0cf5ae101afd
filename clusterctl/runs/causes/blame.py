"""Find the rank that makes the others wait, from observations of all ranks; nothing here asks a node.

When one rank of a group stops, all of them stop, at the same step. The one to blame is the one that stands somewhere
else than the others, and not the one that was noticed first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from clusterctl.runs.causes.places import Frame, Place, path_of, place_of, short
from clusterctl.text import plural

# From this share of a core on, a rank computes.
BUSY = 0.5
STOPPED = "T"
# Waiting in the kernel, mostly for a disk or a device.
IN_KERNEL = "D"
# Groups of ranks that a sentence names.
SHOWN = 3


@dataclass(frozen=True)
class Observation:
    """What is known about one rank at the roll call of its run."""

    rank: int
    via: int = -1
    """The rank whose log has its output: that of its launcher, or its own."""
    worker: bool = False
    """It is one of a launcher's workers, and `rank` is its global rank."""
    node: str = ""
    device: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    """None if the rank has ended."""
    exit_code: int | None = None
    signal: int | None = None
    state: str = ""
    """The state of its process, a letter of proc(5)."""
    wchan: str = ""
    """The function of the kernel in which it waits; empty if that is not shown."""
    cpu: float = 0.0
    """How many cores it uses."""
    frames: tuple[Frame, ...] = ()
    """Its main thread, the innermost frame first."""
    unseen: str = ""
    """Why there are no frames."""
    step: int | None = None
    """The last step that its trainer finished."""
    own: float | None = None
    """Its own seconds for that step, without waiting for others."""
    age: float | None = None
    """Seconds since that step."""
    calls: Mapping[str, int] = field(default_factory=dict, hash=False)
    """By group, its ranks separated by commas: how many collectives it has begun since that step, or at all."""
    recent: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)
    """By group and number: its last collectives, with the sizes of their tensors."""
    ends: tuple[str, ...] = ()
    """Its ends of its TCP connections."""
    unheard: tuple[str, ...] = ()
    """The other ends of those over which nothing is acknowledged."""

    @property
    def place(self) -> Place | None:
        return place_of(self.frames)


@dataclass(frozen=True)
class Verdict:
    """The result of a roll call."""

    sentence: str
    """Where all ranks stand."""
    blamed: tuple[Observation, ...] = ()
    """The ranks that make the others wait; empty if none stands out."""
    unseen: tuple[str, ...] = ()
    """Why the stacks of some ranks are not known."""


def judge(observations: Iterable[Observation], seconds: float | None = None) -> Verdict:
    """Return the ranks to blame for a hang of `seconds`, and a sentence that shows why."""
    ranks = sorted(observations, key=lambda seen: seen.rank)
    unseen = tuple(dict.fromkeys(seen.unseen for seen in ranks if seen.pid is not None and seen.unseen))
    cut, facts = _cut_off(ranks), _links(ranks) + _calls(ranks)
    for rule in RULES:
        blamed = rule(ranks)
        # A dead link explains the wait: only ranks at its ends are to blame.
        if cut and rule not in SURE:
            blamed = [seen for seen in blamed if seen in cut]
        if blamed and len(blamed) < len(ranks):
            return Verdict(_sentence(ranks, blamed, seconds) + facts, tuple(blamed), unseen)
    if cut and len(cut) < len(ranks):
        return Verdict(_sentence(ranks, cut, seconds) + facts, tuple(cut), unseen)
    return Verdict(_nobody(ranks) + facts, (), unseen)


# -- rules, the surest first; each returns the ranks to blame, or none


def _ended(ranks: Sequence[Observation]) -> list[Observation]:
    """Return ranks that have ended while others wait for them; if none waits, those that are still there."""
    ended = [seen for seen in ranks if seen.pid is None]
    living = [seen for seen in ranks if seen.pid is not None]
    if ended and all(seen.place and not seen.place.waits for seen in living):
        # A place that is not known as one where ranks wait, but many stand there.
        return living if len(living) < len(ended) else ended
    return ended


def _stopped(ranks: Sequence[Observation]) -> list[Observation]:
    return [seen for seen in ranks if seen.state == STOPPED]


def _dead_links(ranks: Sequence[Observation]) -> list[tuple[int, int]]:
    """Return the pairs of ranks of which one gets no acknowledgements from the other."""
    owners: dict[str, list[Observation]] = {}
    for seen in ranks:
        for end in seen.ends:
            owners.setdefault(end, []).append(seen)
    pairs = set()
    for seen in ranks:
        for end in seen.unheard:
            # Nodes may have equal addresses of their own, such as 127.0.0.1.
            found = sorted(owners.get(end, ()), key=lambda owner: owner.node != seen.node)
            pairs |= {(min(seen.rank, owner.rank), max(seen.rank, owner.rank)) for owner in found[:1]}
    return sorted(pairs)


def _cut_off(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the ranks with the most dead links."""
    times = Counter(rank for pair in _dead_links(ranks) for rank in pair)
    most = max(times.values(), default=0)
    return [seen for seen in ranks if most and times[seen.rank] == most]


def members_of(group: str) -> list[int]:
    """Return the ranks of a group; a name may follow them after a slash."""
    return [int(rank) for rank in group.partition("/")[0].split(",")]


def _unequal(ranks: Sequence[Observation]) -> tuple[str, str, list[Observation]] | None:
    """Return the first collective that is not the same on all ranks of its group: group, number, and those ranks."""
    for group in sorted({name for seen in ranks for name in seen.recent}):
        members = [seen for seen in ranks if group in seen.recent]
        common = set.intersection(*(set(seen.recent[group]) for seen in members))
        for number in sorted(common, key=int):
            if len({seen.recent[group][number] for seen in members}) > 1:
                return group, number, members
    return None


def _other_call(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the ranks that call another collective than the others, or with a tensor of another size."""
    if (found := _unequal(ranks)) is None:
        return []
    group, number, members = found
    return _minority(members, lambda seen: seen.recent[group][number])


def _behind(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the ranks of `_awaited` that do not wait themselves, as for a message of one rank: none counts those."""
    return [seen for seen in _awaited(ranks) if not _waits(seen.place)]


def _awaited(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the ranks that others wait for and that wait for none, by their numbers of steps and collectives."""
    awaited: set[int] = set()
    waiting: set[int] = set()
    known = {seen.rank: seen for seen in ranks}
    groups = {name for seen in ranks for name in seen.calls}
    for name in groups:
        members = [known[number] for number in members_of(name) if number in known]
        if any(name not in seen.calls for seen in members):
            continue
        done = {seen.rank: (seen.step or 0, seen.calls[name]) for seen in members}
        first, last = min(done.values()), max(done.values())
        awaited |= {rank for rank, count in done.items() if count < last}
        waiting |= {rank for rank, count in done.items() if count > first}
    return [known[rank] for rank in sorted(awaited - waiting)]


def _out_of_order(ranks: Sequence[Observation]) -> list[Observation]:
    """Return a rank that alone has begun a collective of several others, while one of them waits for it elsewhere."""
    if any(not seen.calls for seen in ranks):
        return []
    alone = set()
    for name in {name for seen in ranks for name in seen.calls}:
        done = [((seen.step or 0, seen.calls[name]), seen.rank) for seen in ranks if name in seen.calls]
        most = max(done)[0]
        first = [rank for count, rank in done if count == most]
        if len(done) > 2 and len(first) == 1:
            alone.add(first[0])
    return [seen for seen in ranks if seen.rank in alone]


def _not_waiting(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the ranks that do something else while others wait for them."""
    places = {seen.rank: seen.place for seen in ranks}
    seen_on = {seen.node for seen in ranks if places[seen.rank]}
    if any(seen.node not in seen_on for seen in ranks):
        return []
    others = [seen for seen in ranks if not _waits(places[seen.rank])]
    # A call that is not known as one that waits: most ranks stand in it.
    common = _most_common([places[seen.rank] for seen in others])
    if common and common[0] is not None and common[1] * 2 > len(ranks):
        return [seen for seen in ranks if places[seen.rank] != common[0]]
    return others


def _waits(place: Place | None) -> bool:
    return place is not None and place.waits


def _elsewhere(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the ranks that do not stand where more than half of all stand."""
    return _minority(ranks, lambda seen: seen.place)


def _other_way(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the ranks that came to the common place through another function."""
    return _minority(ranks, lambda seen: path_of(seen.frames))


def _in_kernel(ranks: Sequence[Observation]) -> list[Observation]:
    return _minority(ranks, lambda seen: seen.state == IN_KERNEL)


def _other_use(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the few ranks that compute while the others sleep, or the other way round."""
    return _minority(ranks, lambda seen: seen.cpu >= BUSY)


def _other_wait(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the few ranks that wait in another function of the kernel."""
    return _minority(ranks, lambda seen: seen.wchan)


def _least_far(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the rank at the first line of the innermost function that all ranks are in: the others are past it."""
    stacks = [[frame for frame in reversed(seen.frames) if not frame.is_library] for seen in ranks]
    for level in zip(*stacks, strict=False):
        if len({(short(frame.file), frame.function) for frame in level}) > 1:
            break
        lines = [frame.line for frame in level]
        if len(set(lines)) > 1:
            first = [seen for seen, line in zip(ranks, lines, strict=True) if line == min(lines)]
            return first if len(first) == 1 else []
    return []


RULES = (
    _ended,
    _stopped,
    _other_call,
    _behind,
    _out_of_order,
    _awaited,
    _not_waiting,
    _elsewhere,
    _other_way,
    _in_kernel,
    _other_use,
    _other_wait,
    _least_far,
)

# Rules about what no dead link explains.
SURE = (_ended, _stopped)


def _minority(ranks: Sequence[Observation], feature: Callable[[Observation], object]) -> list[Observation]:
    """Return the ranks whose feature is not that of more than half of all; none if the half does not know it."""
    common = _most_common([feature(seen) for seen in ranks])
    if common is None or common[0] in (None, "", ()) or common[1] * 2 <= len(ranks):
        return []
    return [seen for seen in ranks if feature(seen) != common[0]]


def _most_common(values: Sequence[object]) -> tuple[object, int] | None:
    return next(iter(Counter(values).most_common(1)), None)


# -- words


def _sentence(ranks: Sequence[Observation], blamed: Sequence[Observation], seconds: float | None) -> str:
    others = [seen for seen in ranks if seen not in blamed]
    return f"{_groups(others, len(ranks))}, {_few(blamed, seconds)}{_way(blamed[0], others)}"


def _way(blamed: Observation, others: Sequence[Observation]) -> str:
    """Return by which function a rank came to the place where the others stand too; empty if it stands elsewhere."""
    common = next((seen for seen in others if seen.place == blamed.place), None)
    if common is None or blamed.place is None:
        return ""
    usual = path_of(common.frames)
    return next((f", from {own.describe()}" for own in path_of(blamed.frames) if own not in usual), "")


def _groups(ranks: Sequence[Observation], total: int) -> str:
    """Return where ranks stand, the largest group first."""
    found: Counter[str] = Counter(_standing(seen) for seen in ranks)
    parts = [
        f"{count} of {total} ranks {text if count == 1 else _plural(text)}"
        for text, count in found.most_common(SHOWN)
    ]
    more = len(ranks) - sum(count for _, count in found.most_common(SHOWN))
    return ", ".join([*parts, *([f"{plural(more, 'rank')} elsewhere"] if more else [])])


def _plural(text: str) -> str:
    """Return a predicate of one rank as that of several."""
    words = {"waits": "wait", "is": "are", "has": "have", "computes": "compute", "sleeps": "sleep"}
    first, space, rest = text.partition(" ")
    return f"{words.get(first, first)}{space}{rest}"


def _few(blamed: Sequence[Observation], seconds: float | None) -> str:
    first = blamed[0]
    device = "" if first.device is None else f", device {first.device}"
    again = f" for {seconds:.0f} s" if seconds and first.pid is not None else ""
    text = f"rank {first.rank} ({first.node}{device}) {_standing(first)}{again}"
    like = [str(seen.rank) for seen in blamed[1:]]
    if not like:
        return text
    more = f" and {len(like) - SHOWN} more" if len(like) > SHOWN else ""
    return f"{text}; to blame like it: rank {', '.join(like[:SHOWN])}{more}"


def _standing(seen: Observation) -> str:
    """Return in words where a rank stands."""
    if seen.pid is None:
        how = f"by signal {seen.signal}" if seen.signal else f"with code {seen.exit_code}"
        return f"has ended {how}"
    place = seen.place
    at = f" in {place.describe()}" if place else ""
    if seen.state == STOPPED:
        return f"is stopped by a signal (SIGSTOP){at}"
    if place:
        return f"{'waits' if place.waits else 'is'}{at}"
    where = f" ({seen.wchan})" if seen.wchan else ""
    if seen.state == IN_KERNEL:
        return f"waits in the kernel for a disk or a device{where}"
    return "computes" if seen.cpu >= BUSY else f"sleeps{where}"


def _links(ranks: Sequence[Observation]) -> str:
    """Return in words which ranks do not hear each other; empty if all links work."""
    pairs = [f"{first} and {second}" for first, second in _dead_links(ranks)]
    more = f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    return (
        f"; ranks that do not acknowledge each other's packets: {', '.join(pairs[:SHOWN])}{more}"
        if pairs
        else ""
    )


def _calls(ranks: Sequence[Observation]) -> str:
    """Return in words which collective is not the same on all ranks; empty if none is known."""
    if (found := _unequal(ranks)) is None:
        return ""
    group, number, members = found
    calls = Counter(seen.recent[group][number] for seen in members).most_common(SHOWN)
    parts = [f"{call} on {count} of {len(members)} ranks" for call, count in calls]
    return f"; collective {number} of a group is {', '.join(parts)}"


def _nobody(ranks: Sequence[Observation]) -> str:
    text = _groups(ranks, len(ranks))
    return f"{text}: none stands out"
