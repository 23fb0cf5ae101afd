"""Kills for want of memory, by the kernel's counter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.agent.ranks.kernel import (
    RECENT,
    Kills,
    counter_of,
    read,
)


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    path = tmp_path / "memory.events"
    path.write_text("low 0\nhigh 0\nmax 3\noom 0\noom_kill 2\n")
    return path


def test_a_kill_that_was_counted_with_a_ranks_end_is_its_own(counter: Path) -> None:
    kills = Kills(100.0, str(counter))
    assert kills.of(100.0) == {}, "two of before the attempt began are not"
    counter.write_text("max 9\noom 1\noom_kill 3\n")
    said = kills.of(101.0)
    assert said["oom"] is True
    assert said["kernel"] == [f"Memory cgroup out of memory: 1 killed because memory ran out, by {counter}"]
    assert kills.of(101.0 + RECENT + 0.1) == {}, "who is killed later was killed by somebody"


def test_a_kill_that_no_limit_of_the_group_led_to_is_the_nodes(counter: Path) -> None:
    kills = Kills(100.0, str(counter))
    counter.write_text("max 3\noom 0\noom_kill 3\n")
    assert kills.of(100.5)["kernel"] == [f"1 killed because memory ran out, by {counter}"]


def test_a_look_between_does_not_lose_it(counter: Path) -> None:
    kills = Kills(100.0, str(counter))
    counter.write_text("oom 1\noom_kill 4\n")
    kills.check(100.5)
    kills.check(101.5)
    assert "2 killed" in kills.of(101.9)["kernel"][0]


def test_where_nothing_counts_nothing_is_said(tmp_path: Path) -> None:
    for path in ("", str(tmp_path / "gone")):
        assert Kills(0.0, path).of(1.0) == {}
    assert read("") == {}


def test_the_counter_is_found_in_either_version_and_inside_a_container(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    for folder, name in (
        ("a/b", "memory.events"),
        ("memory/job", "memory.oom_control"),
        ("", "memory.events"),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name).write_text("oom_kill 0\n")
    assert counter_of("0::/a/b\n", str(root)) == str(root / "a/b/memory.events")
    assert counter_of("0::/not/mounted/here\n", str(root)) == str(root / "memory.events")
    two = "4:memory:/job\n1:cpu,cpuacct:/\n0::/\n"
    assert counter_of(two, str(root)) == str(root / "memory/job/memory.oom_control")
    assert counter_of("", str(root)) == counter_of("1:cpu:/\n", str(root)) == ""
    (root / "memory/job/memory.failcnt").write_text("17\n")
    assert read(str(root / "memory/job/memory.oom_control")) == {"oom_kill": 0, "oom": 17}


EATS = """
import sys
with open(sys.argv[1], "w") as file:
    file.write(str(__import__("os").getpid()))
eaten = [bytearray(b"x") * (1 << 20) for _ in range(400)]
"""


@pytest.fixture
def small_group() -> Path:
    """A control group of 64 MB; version 1 or 2, where this login may make one."""
    for root, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup") / root / f"clusterctl-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(64 << 20))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        return group
    pytest.skip("no control group can be made here")


def test_a_real_kill_is_told_from_a_mere_one(small_group: Path) -> None:
    name = "memory.oom_control" if (small_group / "memory.oom_control").exists() else "memory.events"
    try:
        kills = Kills(100.0, str(small_group / name))
        done = subprocess.run([sys.executable, "-c", EATS, str(small_group / "cgroup.procs")], check=False)
        assert done.returncode == -signal.SIGKILL
        said = kills.of(100.5)
        assert said["oom"] and said["kernel"][0].startswith("Memory cgroup out of memory: 1 killed")
    finally:
        small_group.rmdir()
