"""Compare thousands of node sets with ClusterShell: a set that both accept gives the same names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.errors import UsageError
from clusterctl.inventory.nodeset import expand, fold

PEER = Path(__file__).parents[2] / "support" / "nodeset_peer.py"
PROGRAM = shutil.which("nodeset")
# Two ranges of 20,000 that met in one name took the peer a minute.
LONGEST = 200
# Sets in one process of the peer, which starts in 0.1 s.
PER_SEED = 1000

GROUPS = {
    "old": "node[1-4]",
    "new": "node[3-7],n1",
    "both": "@old,@new",
    "rack1": "r1n[1-9]",
    "rack2": "r2n[1-9]",
}
KNOWN = [*(f"node{one}" for one in range(1, 12)), "n1", *(f"r{r}n{n}" for r in (1, 2) for n in range(1, 10))]
MATCHING = ("*", "node*", "node?", "n*1", "r?n[1-3]", "@*", "r[1-2]n?", "*[1-2]")

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="ClusterShell's nodeset is not installed (.ci/packages)"
)


@cache
def peer_python() -> str:
    """A Python that has ClusterShell: this one or that of `nodeset`; where `nodeset` is, there is one."""
    first = Path(str(PROGRAM)).read_bytes().split(b"\n")[0].decode("ascii", "replace")
    for python in (sys.executable, *first.removeprefix("#!").split()[-1:], "/usr/bin/python3"):
        found = shutil.which(python)
        if found and not subprocess.run([found, "-c", "import ClusterShell"], capture_output=True).returncode:
            return found
    raise AssertionError(f"{PROGRAM} is there and no Python that has ClusterShell")


def theirs(expressions: list[str]) -> list[dict[str, Any]]:
    lines = [{"groups": GROUPS, "known": KNOWN}, *({"set": one} for one in expressions)]
    sent = "".join(json.dumps(line) + "\n" for line in lines)
    ran = subprocess.run(
        [peer_python(), str(PEER)], input=sent, capture_output=True, text=True, timeout=60, check=True
    )
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(answers) == len(expressions)
    return answers


def ours(expression: str) -> list[str] | None:
    try:
        return expand(expression, GROUPS, KNOWN)
    except UsageError:
        return None


# -- sets drawn from one seed, which is twenty times as fast as drawing each part


def a_range(random: Random) -> str:
    items = []
    for _ in range(random.randint(1, 3)):
        first = random.randint(0, random.choice([12, 120]))
        last = first + random.randint(0, 8)
        width = random.choice([0, 0, 0, 2, 3])
        low, high = str(first).zfill(width), str(last).zfill(width)
        step = random.choice(["", "", "", "/2", "/3"])
        items.append(low if width and len(low) != len(high) else f"{low}-{high}{step}")
    return "[" + ",".join(items) + "]"


def a_pattern(random: Random, dimensions: int) -> str:
    text = random.choice(["n", "m", "rack-", "a.b", "node"])
    for place in range(random.randint(1, dimensions)):
        joint = random.choice(["x", "-ib", "-n"]) if place else ""
        text += joint + (a_range(random) if random.random() < 0.7 else str(random.randint(0, 30)))
    return text + random.choice(["", "", "x", "-ib"])


def a_set(random: Random, dimensions: int, groups: bool = False) -> str:
    def operand() -> str:
        if groups and random.random() < 0.6:
            named = [*(f"@{name}" for name in GROUPS), "@rack[1-2]", *MATCHING]
            return random.choice(named)
        return a_pattern(random, dimensions)

    return operand() + "".join(random.choice(",,!&^") + operand() for _ in range(random.randint(0, 3)))


def spoilt(random: Random) -> str:
    """A set with a few characters put in, taken out or written over; none that the peer would count for minutes."""
    while True:
        text = a_set(random, 2, groups=True)
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(text) + 1)
            put = random.choice(["", *"[],-/!&^@*?019a "])
            text = text[:at] + put + text[at + random.choice([0, 0, 1, 3]) :]
        ranges = re.findall(r"([0-9]+)\s*-\s*([0-9]+)", text)
        if all(int(last) - int(first) <= LONGEST for first, last in ranges):
            return text


seeds = st.integers(0, 2**32)


@given(seeds)
@settings(max_examples=5, deadline=None)
def test_sets_of_one_dimension_have_nodesets_order_and_folding(seed: int) -> None:
    random = Random(seed)
    sets = [a_set(random, 1) for _ in range(PER_SEED)]
    for expression, answer in zip(sets, theirs(sets), strict=True):
        assert expand(expression) == answer["names"], expression
        assert fold(answer["names"]) == answer["folded"], expression


@given(seeds)
@settings(max_examples=2, deadline=None)
def test_sets_of_several_dimensions_have_nodesets_names_and_it_reads_our_folding(seed: int) -> None:
    random = Random(seed)
    sets = [a_set(random, random.choice([2, 2, 3])) for _ in range(PER_SEED)]
    folded = [fold(expand(expression)) for expression in sets]
    answers, again = theirs(sets), theirs(folded)
    for expression, answer, back in zip(sets, answers, again, strict=True):
        assert set(expand(expression)) == set(answer["names"]) == set(back["names"]), expression
        assert expand(answer["folded"]) == expand(expression), expression


@given(seeds)
@settings(max_examples=2, deadline=None)
def test_groups_and_wildcards_have_nodesets_names(seed: int) -> None:
    random = Random(seed)
    sets = [a_set(random, 2, groups=True) for _ in range(PER_SEED)]
    for expression, answer in zip(sets, theirs(sets), strict=True):
        assert set(expand(expression, GROUPS, KNOWN)) == set(answer["names"]), expression


# Digits that touch a bracket belong to the number there, and not here.
MERGED = re.compile(r"[0-9]\[|\][0-9]")
REFUSED_HERE = (
    # An empty set there, as the next.
    "no group",
    "matches no node",
    # An option, a path, a blank or other shell text as a name.
    "a name can't",
    "is not a range",  # [-2] is a negative number there
    # Brackets that do not pair are letters of a name there, in some places.
    "an empty range",
    "a bracket inside a bracket",
    "two brackets without text between them",
    # A limit of ours, as the next.
    "wildcards against",
    "more than 1,000,000 names",
)


@given(seeds)
@settings(max_examples=2, deadline=None)
def test_spoilt_sets_differ_from_nodeset_only_where_it_is_meant(seed: int) -> None:
    random = Random(seed)
    sets = [spoilt(random) for _ in range(PER_SEED)]
    for expression, answer in zip(sets, theirs(sets), strict=True):
        try:
            names = set(expand(expression, GROUPS, KNOWN))
        except UsageError as error:
            assert "error" in answer or any(reason in error.message for reason in REFUSED_HERE), expression
            continue
        if not MERGED.search(expression):
            assert names == set(answer.get("names", ["refused"])), expression


def test_the_program_itself_gives_the_same_lines() -> None:
    for expression in ("node[1-4,7]!node2", "r[1-2]n[01-03]", "b,a,c1,a2,a10,a9", "n[0-9/3]^n[3-4]"):
        said = [
            subprocess.run([str(PROGRAM), option, expression], capture_output=True, text=True, check=True)
            for option in ("-e", "-f")
        ]
        assert said[0].stdout.split() == expand(expression)
        assert said[1].stdout.strip() == fold(expand(expression))
