"""Which rank a roll call blames, and in which words: from observations alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from clusterctl.agent.ranks.frames import frames_in
from clusterctl.runs.causes.blame import Observation, judge
from clusterctl.runs.causes.places import Frame, Place, place_of, short

SITE = "/venv/lib/python3.11/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
LOGGER = f"{SITE}/torch/distributed/c10d_logger.py"
MAIN = Frame("<module>", "/home/u/code/train.py", 90)
STEP = Frame("step", "/home/u/code/train.py", 30)


def waits(call: str = "all_reduce", line: int = 30) -> tuple[Frame, ...]:
    """Return a stack in a collective that the user's code calls on a line."""
    inside = (Frame(call, C10D, 2500), Frame("wrapper", LOGGER, 80))
    return (*inside, Frame("step", "/home/u/code/train.py", line), MAIN)


def works(function: str = "load_batch", line: int = 12) -> tuple[Frame, ...]:
    return (Frame(function, "/home/u/code/data.py", line), STEP, MAIN)


def roll(*ranks: dict[str, Any]) -> list[Observation]:
    """Return observations of two ranks on each node."""
    return [
        Observation(rank, rank, node=f"node{rank // 2 + 1}", device=rank % 2, **{"pid": 100 + rank, **facts})
        for rank, facts in enumerate(ranks)
    ]


W = {"frames": waits()}
L = {"frames": works()}
UNSEEN = {"unseen": "py-spy is not installed there"}
SLEEPS = {**UNSEEN, "state": "S", "wchan": "futex_wait"}
ALL, LEFT, RIGHT = "0,1,2,3", "0,1", "2,3"


def counted(step: int, **calls: int) -> dict[str, Any]:
    names = {"all": ALL, "left": LEFT, "right": RIGHT}
    return {"step": step, "calls": {names[name]: count for name, count in calls.items()}, "frames": waits()}


def linked(end: str, *unheard: str, **facts: Any) -> dict[str, Any]:
    return {"frames": waits(), "ends": (end,), "unheard": unheard, **facts}


def flown(*calls: str, **facts: Any) -> dict[str, Any]:
    """Return what a flight recorder shows: the last collectives of all ranks, which all stand at one line."""
    group = f"{ALL}/0"
    recent = {str(number): call for number, call in enumerate(calls, 7)}
    return {"frames": waits(), "calls": {group: 6 + len(calls)}, "recent": {group: recent}, **facts}


CASES = {
    "a tensor of another size, at the same line": (
        [
            flown("all_reduce 4"),
            flown("all_reduce 4"),
            flown("all_reduce 2", "all_reduce 4"),
            flown("all_reduce 4"),
        ],
        [2],
    ),
    "another collective, at the same line": (
        [flown("all_reduce 4", "barrier"), *[flown("all_reduce 4", "all_reduce 4")] * 3],
        [0],
    ),
    "fewer collectives of a flight recorder": (
        [flown("a", "b"), flown("a", "b"), flown("a"), flown("a", "b")],
        [2],
    ),
    "a rank that hears nobody": ([linked("a", "c"), linked("b", "c"), linked("c"), linked("d", "c")], [2]),
    "one dead link, and one of its ranks stands elsewhere": (
        [linked("a"), linked("b", "c"), linked("c", "b", frames=waits("recv", 50)), linked("d")],
        [2],
    ),
    "one dead link": ([linked("a"), linked("b", "c"), linked("c"), linked("d")], [1, 2]),
    "a rank that loads is not to blame for a dead link": (
        [linked("a", "c"), linked("b", "c"), linked("c"), linked("d", "c", frames=works())],
        [2],
    ),
    "every link between two nodes is dead": (
        [linked("a", "c"), linked("b", "d"), linked("c"), linked("d")],
        [],
    ),
    "equal ends on two nodes": (
        [linked("a", "x"), linked("x"), linked("x"), linked("d")],
        [0, 1],
    ),
    "an end that is no rank's": ([linked("a", "y"), W, W, W], []),
    "a loader": ([W, W, W, L], [3]),
    "the first rank, not the last": ([L, W, W, W], [0]),
    "two ranks, and one waits": ([W, L], [1]),
    "two ranks, and the first does not wait": ([L, W], [0]),
    "two ranks of four load": ([W, L, W, L], [1, 3]),
    "most ranks load, and one waits for them": (
        [W, L, {"frames": works("other", 5)}, {"frames": works("third", 7)}],
        [1, 2, 3],
    ),
    "another collective at another line": ([W, W, {"frames": waits("broadcast", 41)}, W], [2]),
    "the same collective at another line": ([W, {"frames": waits(line=55)}, W, W], [1]),
    "a lock": ([W, W, W, {"frames": works("wait_for_lock", 8)}], [3]),
    "a call that is not known as one that waits": ([L, L, L, W], [3]),
    "nobody stands out": ([W, W, W, W], []),
    "two and two in collectives": (
        [W, W, {"frames": waits("broadcast", 41)}, {"frames": waits("broadcast", 41)}],
        [],
    ),
    "a rank that ended": ([W, {"pid": None, "exit_code": 0}, W, W], [1]),
    "all but one ended": ([{"pid": None, "exit_code": 0}] * 3 + [W], [0, 1, 2]),
    "all but one ended, and that one does not wait": ([{"pid": None, "exit_code": 0}] * 3 + [L], [3]),
    "one ended, and the others stand in a call that is not known": (
        [{"pid": None, "exit_code": 0}] + [L] * 3,
        [0],
    ),
    "a stopped process, wherever it stands": ([W, W, {**W, "state": "T"}, W], [2]),
    "a stopped process before one that loads": ([L, W, {**W, "state": "T"}, W], [2]),
    "another way to the same place": (
        [W, W, W, {"frames": (*waits()[:3], Frame("evaluate", "/home/u/code/train.py", 70), MAIN)}],
        [3],
    ),
    "fewer collectives": ([counted(5, all=7), counted(5, all=7), counted(5, all=6), counted(5, all=7)], [2]),
    "an earlier step": ([counted(5, all=1), counted(4, all=9), counted(5, all=1), counted(5, all=1)], [1]),
    "equal numbers, other places": (
        [counted(5, all=7)] * 3 + [{**counted(5, all=7), "frames": waits("broadcast", 41)}],
        [3],
    ),
    "one waits in its small group, all others for it": (
        [
            counted(5, left=3, all=2),
            counted(5, left=3, all=2),
            counted(5, right=3, all=1),
            counted(5, right=2, all=1),
        ],
        [3],
    ),
    "behind, because it waits for a message of one that is behind too": (
        [
            counted(5, left=1, all=0),
            {**counted(5, left=0, all=0), "frames": waits("recv", 50)},
            counted(5, right=1, all=0),
            {**counted(5, right=0, all=0), "frames": works()},
        ],
        [3],
    ),
    "alone in a collective of all, while its pair waits for it": (
        [
            {"step": 5, "calls": {ALL: 0, "0,2": 1, LEFT: 3}, "frames": waits(line=60)},
            {"step": 5, "calls": {ALL: 0, "1,3": 1, LEFT: 3}, "frames": waits(line=60)},
            {"step": 5, "calls": {ALL: 1, "0,2": 0, RIGHT: 0}, "frames": waits("broadcast", 41)},
            {"step": 5, "calls": {ALL: 0, "1,3": 0, RIGHT: 1}, "frames": waits()},
        ],
        [2],
    ),
    "alone in a collective of all, while its partner waits for its message": (
        [
            {"step": 5, "calls": {ALL: 0, "0,1": 2}, "frames": waits("wait", 60)},
            {"step": 5, "calls": {ALL: 1, "0,1": 1}, "frames": waits("all_reduce", 41)},
            {"step": 5, "calls": {ALL: 0, "2,3": 2}, "frames": waits("wait", 60)},
            {"step": 5, "calls": {ALL: 0, "2,3": 1}, "frames": waits("recv", 50)},
        ],
        [1],
    ),
    "all wait, each elsewhere: the one at the first line of the function that all are in": (
        [
            {"frames": (*waits()[:2], Frame("main", "/home/u/code/train.py", line), MAIN)}
            for line in (46, 41, 38, 41)
        ],
        [2],
    ),
    "a group with a member that did not answer": (
        [counted(5, all=7), counted(5, all=7), counted(5, all=6), {**SLEEPS}],
        [3],
    ),
    "without stacks: one computes": ([SLEEPS, SLEEPS, {**SLEEPS, "cpu": 0.97}, SLEEPS], [2]),
    "without stacks: one sleeps": ([{**SLEEPS, "cpu": 1.0}] * 3 + [SLEEPS], [3]),
    "without stacks: one waits for a disk": (
        [SLEEPS, {**SLEEPS, "state": "D", "wchan": "io_schedule"}, SLEEPS, SLEEPS],
        [1],
    ),
    "without stacks: another wait": ([SLEEPS, {**SLEEPS, "wchan": "pipe_write"}, SLEEPS, SLEEPS], [1]),
    "without stacks: all alike": ([SLEEPS] * 4, []),
    "without stacks, and what the kernel waits in is hidden": ([{**SLEEPS, "wchan": ""}] * 4, []),
    "one on a node with py-spy cannot be seen": ([W, W, W, SLEEPS], [3]),
    "a node without py-spy is not to blame for that": ([W, W, SLEEPS, SLEEPS], []),
    "one rank": ([L], []),
    "no rank": ([], []),
}


@pytest.mark.parametrize("case", CASES)
def test_the_odd_one_out_is_to_blame(case: str) -> None:
    ranks, blamed = CASES[case]
    assert [seen.rank for seen in judge(roll(*ranks)).blamed] == blamed


@pytest.mark.parametrize("world", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("guilty", [0, 1, -1])
def test_any_rank_of_any_number_is_found(world: int, guilty: int) -> None:
    ranks: list[dict[str, Any]] = [W] * world
    ranks[guilty] = L
    assert [seen.rank for seen in judge(roll(*ranks)).blamed] == [guilty % world]


WORDS = {
    "a loader": (
        [W, W, W, L],
        "3 of 4 ranks wait in all_reduce at code/train.py:30, rank 3 (node2, device 1) is in `load_batch` at"
        " code/data.py:12 for 25 s",
    ),
    "one of two": (
        [W, L],
        "1 of 2 ranks waits in all_reduce at code/train.py:30, rank 1 (node1, device 1) is in `load_batch` at"
        " code/data.py:12 for 25 s",
    ),
    "another way": (
        [W, W, W, {"frames": (*waits()[:3], Frame("evaluate", "/home/u/code/train.py", 70), MAIN)}],
        "3 of 4 ranks wait in all_reduce at code/train.py:30, rank 3 (node2, device 1) waits in all_reduce at"
        " code/train.py:30 for 25 s, from `evaluate` at code/train.py:70",
    ),
    "ended": (
        [W, W, W, {"pid": None, "exit_code": 0}],
        "3 of 4 ranks wait in all_reduce at code/train.py:30, rank 3 (node2, device 1) has ended with code 0",
    ),
    "ended by a signal": (
        [W, {"pid": None, "signal": 9}],
        "1 of 2 ranks waits in all_reduce at code/train.py:30, rank 1 (node1, device 1) has ended by signal 9",
    ),
    "computes": (
        [SLEEPS, SLEEPS, {**SLEEPS, "cpu": 0.97}, SLEEPS],
        "3 of 4 ranks sleep (futex_wait), rank 2 (node2, device 0) computes for 25 s",
    ),
    "several to blame": (
        [W, L, W, L, W, W],
        "4 of 6 ranks wait in all_reduce at code/train.py:30, rank 1 (node1, device 1) is in `load_batch` at"
        " code/data.py:12 for 25 s; to blame like it: rank 3",
    ),
    "dead links": (
        [linked("a", "c"), linked("b", "c"), linked("c"), linked("d", "c")],
        "3 of 4 ranks wait in all_reduce at code/train.py:30, rank 2 (node2, device 0) waits in all_reduce at"
        " code/train.py:30 for 25 s; ranks that do not acknowledge each other's packets: 0 and 2, 1 and 2, 2 and 3",
    ),
    "another size": (
        [flown("all_reduce 4")] * 3 + [flown("all_reduce 2")],
        "3 of 4 ranks wait in all_reduce at code/train.py:30, rank 3 (node2, device 1) waits in all_reduce at"
        " code/train.py:30 for 25 s; collective 7 of a group is all_reduce 4 on 3 of 4 ranks, all_reduce 2 on 1 of 4"
        " ranks",
    ),
    "nobody": ([W, W, W, W], "4 of 4 ranks wait in all_reduce at code/train.py:30: none stands out"),
    "groups": (
        [W, W, {"frames": waits("broadcast", 41)}, {"frames": waits("broadcast", 41)}],
        "2 of 4 ranks wait in all_reduce at code/train.py:30, 2 of 4 ranks wait in broadcast at code/train.py:41:"
        " none stands out",
    ),
}


@pytest.mark.parametrize("case", WORDS)
def test_the_sentence_says_where_all_ranks_stand(case: str) -> None:
    ranks, words = WORDS[case]
    assert judge(roll(*ranks), 25.0).sentence == words


def test_why_a_stack_is_not_known_is_told_once() -> None:
    assert judge(roll(SLEEPS, SLEEPS, W, W)).unseen == ("py-spy is not installed there",)
    assert judge(roll(W, W)).unseen == ()


USER = "/home/u/clusterctl/trees/0123456789abcdef0123/train.py"
PLACES: dict[str, tuple[Sequence[Frame], Place | None]] = {
    "none": ((), None),
    "a line of the user's": (works(), Place("`load_batch`", "code/data.py:12", False)),
    "a generator within a function": (
        (Frame("<genexpr>", USER, 8), Frame("evaluate", USER, 8), Frame("<module>", USER, 20)),
        Place("`evaluate`", "train.py:8", False),
    ),
    "a collective": (waits(), Place("all_reduce", "code/train.py:30", True)),
    "work.wait() is compiled": (
        (Frame("finish", USER, 7, "work.wait()"),),
        Place("wait", "train.py:7", True),
    ),
    "loss.backward() of DDP": (
        (
            Frame("_engine_run_backward", f"{SITE}/torch/autograd/graph.py", 9),
            Frame("backward", f"{SITE}/torch/_tensor.py", 5),
            Frame("f", USER, 3),
        ),
        Place("backward", "train.py:3", True),
    ),
    "an MPI call": (
        (Frame("f", USER, 3, "total = comm.Allreduce(a, b)"),),
        Place("Allreduce", "train.py:3", True),
    ),
    "a socket's recv": ((Frame("f", USER, 3, "data = sock.recv(10)"),), Place("`f`", "train.py:3", False)),
    "a peer's recv": (
        (Frame("f", USER, 3, "data = comm.recv(source=1)"),),
        Place("recv", "train.py:3", True),
    ),
    "an event of a thread": (
        (
            Frame("wait", "/usr/lib/python3.11/threading.py", 327),
            Frame("wait", "/usr/lib/python3.11/threading.py", 629),
            Frame("f", USER, 3),
        ),
        Place("`wait`, called by `f`", "train.py:3", False),
    ),
    "a loader's queue": (
        (
            Frame("poll", "/usr/lib/python3.11/multiprocessing/connection.py", 2),
            Frame("_try_get_data", f"{SITE}/torch/utils/data/dataloader.py", 8),
            Frame("__next__", f"{SITE}/torch/utils/data/dataloader.py", 4),
            Frame("f", USER, 3),
        ),
        Place("`__next__`, called by `f`", "train.py:3", False),
    ),
    "only packages": (
        (Frame("spin", f"{SITE}/a/b.py", 1), Frame("<module>", f"{SITE}/a/c.py", 2)),
        Place("`spin`, called by `<module>`", "a/c.py:2", False),
    ),
    "our trainer in a venv": (
        (Frame("all_reduce", C10D, 1), Frame("total", f"{SITE}/trainer/parallel/group.py", 80)),
        Place("all_reduce", "trainer/parallel/group.py:80", True),
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_place_is_the_users_line_and_the_call_in_it(case: str) -> None:
    frames, place = PLACES[case]
    assert place_of(frames) == place


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/home/u/code/train.py", "code/train.py"),
        ("/home/u/clusterctl/trees/0123456789abcdef/train.py", "train.py"),
        ("/n1/trees/0123456789abcdef/pkg/train.py", "pkg/train.py"),
        ("/n1/runs/drill-1128-141152-044a/train.py", "train.py"),
        (f"{SITE}/torch/nn/modules/module.py", "torch/nn/modules/module.py"),
        ("train.py", "train.py"),
        ("<string>", "<string>"),
    ],
)
def test_a_path_is_shown_without_what_differs_between_nodes(file: str, shown: str) -> None:
    assert short(file) == shown


SPIED = """Process 12: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 12 (idle): "MainThread"
    load_batch (/home/u/code/data.py:12)
    <module> (/home/u/code/train.py:90)
Thread 0x7F33 (active+gil): "Thread-1 (watch)"
    watch (/home/u/code/train.py:5)
"""
WRITTEN = """some output
Thread 0x00007f33 (most recent call first):
  File "/home/u/code/train.py", line 5 in watch

Current thread 0x00007f44 (most recent call first):
  File "/home/u/code/data.py", line 12 in load_batch
  File "/home/u/code/train.py", line 90 in <module>

Extension modules: numpy (total: 1)
"""
NATIVE = """Thread 12 (active): "MainThread"
    epoll_wait (libc.so.6)
    load_batch (data.py:12)
"""


@pytest.mark.parametrize(
    "text",
    [
        SPIED,
        WRITTEN,
        WRITTEN + "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n",
        "Current thread 0x1 (most recent call first):\n" + WRITTEN,
        NATIVE + SPIED,
    ],
)
def test_the_main_threads_frames_are_read_from_either_tool(text: str) -> None:
    assert [tuple(frame) for frame in frames_in(text)] == [
        ("load_batch", "/home/u/code/data.py", 12),
        ("<module>", "/home/u/code/train.py", 90),
    ]


def test_native_frames_are_read_and_other_texts_have_none() -> None:
    assert [tuple(frame) for frame in frames_in(NATIVE)] == [
        ("epoll_wait", "libc.so.6", 0),
        ("load_batch", "data.py", 12),
    ]
    assert frames_in("Error: Permission Denied: Try running again with elevated permissions") == []
    assert frames_in("") == []
