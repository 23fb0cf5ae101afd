from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterctl.agent.processes import is_alive, marked
from clusterctl.errors import ClusterctlError, LinkLost
from clusterctl.inventory.cluster import Node
from clusterctl.transport.connection import Connection
from clusterctl.transport.link import RequestFailed
from clusterctl.transport.local import LocalTransport
from tests.support.nodes import connect, local_node, oldest_python, wait_for

SHOW = "import os,sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    connection = connect(tmp_path_factory.mktemp("shared"))
    yield connection
    connection.close()


def spec(attempt: int, *scripts: str, run_id: str = "r1", grace: float = 2.0) -> dict[str, object]:
    ranks = [
        {
            "rank": rank,
            "local_rank": rank,
            "argv": ["/bin/sh", "-c", script],
            "env": {"GREETING": "a b"},
            "cwd": "/",
        }
        for rank, script in enumerate(scripts)
    ]
    return {"run_id": run_id, "attempt": attempt, "node": "node1", "grace": grace, "ranks": ranks}


def unique(tmp_path: Path) -> str:
    """A run's id that no other test, and no other process on this machine, uses."""
    return f"{tmp_path.parent.name}-{tmp_path.name}"


def left_of(run_id: str) -> list[int]:
    return marked({"CLUSTERCTL_RUN_ID": run_id})


# ---- commands


def test_a_command_gives_its_output_and_exit_code_apart(shared: Connection) -> None:
    done = shared.run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.stdout, done.stderr, done.exit_code, done.signal) == (b"out\n", b"err\n", 3, None)


def test_a_signal_is_told_as_a_signal(shared: Connection) -> None:
    done = shared.run(["/bin/sh", "-c", "kill -SEGV $$"])
    assert (done.exit_code, done.signal, done.code) == (None, 11, 139)


def test_a_missing_program_ends_like_in_a_shell(shared: Connection) -> None:
    done = shared.run(["/no/such/program"])
    assert done.exit_code == 127 and b"/no/such/program" in done.stderr


HOSTILE = [
    "",
    " ",
    "$(touch /tmp/pwned)",
    "`id`",
    "a'b\"c",
    "-oProxyCommand=x",
    "new\nline",
    "\t",
    "😀",
    "*",
    "~",
    "\\",
    "; true",
    "x" * 100_000,
    "\udcff\udcfe",
]


def test_hostile_arguments_and_values_arrive_byte_identical(shared: Connection) -> None:
    done = shared.run([sys.executable, "-c", SHOW, *HOSTILE])
    assert done.stdout.split(b"\0") == [one.encode("utf-8", "surrogateescape") for one in HOSTILE]
    for value in HOSTILE:
        shown = shared.run(
            [sys.executable, "-c", "import os,sys; sys.stdout.buffer.write(os.environb[b'V'])"],
            env={"V": value},
        )
        assert shown.stdout == value.encode("utf-8", "surrogateescape")
    assert not Path("/tmp/pwned").exists()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",))), min_size=1, max_size=5
    )
)
def test_any_text_arrives_as_it_was_given(shared: Connection, words: list[str]) -> None:
    done = shared.run([sys.executable, "-I", "-S", "-X", "utf8", "-c", SHOW, *words])
    assert done.stdout == b"\0".join(word.encode() for word in words)


def test_standard_input_goes_in_and_comes_out_whole_while_both_are_larger_than_any_buffer(
    shared: Connection,
) -> None:
    data = os.urandom(8 << 20)
    assert shared.run(["cat"], stdin=data).stdout == data


def test_a_slow_reader_of_one_request_does_not_hold_up_another(shared: Connection) -> None:
    flood = shared.request("run", {"argv": ["yes"]})
    next(flood)
    began = time.monotonic()
    assert shared.run(["echo", "hi"]).stdout == b"hi\n"
    assert time.monotonic() - began < 5
    flood.close()


def test_a_time_out_ends_the_command_and_what_slipped_out_of_its_group(shared: Connection) -> None:
    began = time.monotonic()
    done = shared.run(
        ["/bin/sh", "-c", "setsid sleep 611 & sleep 611"], env={"CLUSTERCTL_TEST": "timeout"}, timeout=0.3
    )
    assert done.timed_out and done.code == 124 and time.monotonic() - began < 8
    assert marked({"CLUSTERCTL_TEST": "timeout"}) == []


def test_what_a_command_leaves_behind_on_purpose_does_not_hold_its_end_up(shared: Connection) -> None:
    began = time.monotonic()
    done = shared.run(["/bin/sh", "-c", "sleep 3 & echo started"])
    assert done.stdout == b"started\n" and time.monotonic() - began < 2.5


def test_the_end_of_the_link_ends_commands_and_their_detached_children(
    link: Connection, tmp_path: Path
) -> None:
    script = "setsid sh -c 'trap : TERM; sleep 612; sleep 612' & trap : TERM; echo up; sleep 612; sleep 612"
    started = link.request(
        "run", {"argv": ["/bin/sh", "-c", script], "env": {"CLUSTERCTL_TEST": str(tmp_path)}}
    )
    next(started)
    wait_for(lambda: len(marked({"CLUSTERCTL_TEST": str(tmp_path)})) >= 3)
    link.close()
    wait_for(lambda: not marked({"CLUSTERCTL_TEST": str(tmp_path)}))
    with pytest.raises(LinkLost, match="the link was closed"):
        next(started)


def test_a_killed_agent_is_a_lost_link_and_no_hang(link: Connection) -> None:
    pid = link.hello().pid
    threading.Timer(0.2, os.kill, (pid, 9)).start()
    with pytest.raises(LinkLost, match="the connection ended"):
        link.run(["sleep", "5"])
    with pytest.raises(LinkLost, match="the connection ended"):
        link.call("hello")


# ---- files


def test_a_file_is_put_whole_with_its_mode_and_read_from_an_offset(
    shared: Connection, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "file"
    shared.put(str(path), b"0123456789", mode=0o640)
    assert path.read_bytes() == b"0123456789" and path.stat().st_mode & 0o777 == 0o640
    assert shared.get(str(path), offset=7) == b"789" and shared.get(str(path), offset=2, limit=3) == b"234"


def test_a_damaged_file_changes_nothing(shared: Connection, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RequestFailed, match="damaged"):
        shared.call("put", {"path": str(path), "sha256": "0" * 64}, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_fingerprint_tells_what_stands_at_a_path_itself(shared: Connection, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    told = shared.call("fingerprint", {"path": str(path)})
    digest = hashlib.sha256(b"0123456789").hexdigest()
    assert told == {"path": str(path), "kind": "f", "mode": 0o640, "size": 10, "sha256": digest}
    kinds = [
        shared.call("fingerprint", {"path": str(tmp_path / name)})["kind"] for name in ("link", "", "none")
    ]
    assert kinds == ["l", "d", ""]


def test_remove_touches_nothing_outside_the_work_folder(link: Connection, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.mkdir()
    (tmp_path / "work" / "runs").mkdir(parents=True)
    (tmp_path / "work" / "runs" / "trick").symlink_to(tmp_path)
    for path in (
        outside,
        tmp_path / "work/runs/../../precious",
        tmp_path / "work/runs/trick/precious",
        tmp_path / "work/runs",
    ):
        with pytest.raises(RequestFailed) as caught:
            link.call("remove", {"path": str(path)})
        assert caught.value.kind == "outside"
    assert link.call("remove", {"path": str(tmp_path / "work/runs/trick")}) == {"removed": True}
    assert outside.is_dir()


def test_a_request_that_makes_no_sense_is_refused_in_words_and_the_link_goes_on(shared: Connection) -> None:
    for op, params, complaint in (
        ("nonsense", {}, "does not know 'nonsense'"),
        ("run", {}, "'argv' must be list"),
        ("run", {"argv": ["a\0b"]}, "without null bytes"),
        ("get", {"path": 7}, "'path' must be str, not 7"),
        ("start", {"run_dir": "/x"}, "'spec' must be dict"),
    ):
        with pytest.raises(RequestFailed, match=complaint):
            shared.call(op, params)
    assert shared.run(["true"]).ok


# ---- runs


def test_a_run_finishes_with_its_logs_and_exit_codes(link: Connection, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    link.call(
        "start",
        {"run_dir": run_dir, "spec": spec(1, "echo $GREETING", "echo bad >&2", run_id=unique(tmp_path))},
    )
    logs = f"{run_dir}/attempts/1/logs"
    files = [{"path": f"{logs}/rank-{rank}.{stream}"} for rank in (0, 1) for stream in ("out", "err")]
    followed = link.request("follow", {"files": files, "until": {"run_dir": run_dir, "attempt": 1}})
    data = {(Path(frame.fields["path"]).name, frame.fields["offset"]): frame.payload for frame in followed}
    assert data == {("rank-0.out", 0): b"a b\n", ("rank-1.err", 0): b"bad\n"}
    state = link.call("state", {"run_dir": run_dir, "attempt": 1})
    assert state["node"]["state"] == "finished" and not state["supervisor"]["alive"]
    assert [rank["exit_code"] for rank in state["ranks"]] == [0, 0]


def test_programs_beside_the_nodes_python_are_found_unless_the_job_sets_a_path(
    link: Connection, tmp_path: Path
) -> None:
    run_dir, tools = str(tmp_path / "run"), tmp_path / "venv/bin"
    tools.mkdir(parents=True)
    (tools / "ninja").write_text("#!/bin/sh\necho the ninja of the venv\n")
    (tools / "ninja").chmod(0o755)
    asked = spec(1, "ninja", "ninja || echo none", run_id=unique(tmp_path))
    ranks: Any = asked["ranks"]
    for rank in ranks:
        rank["programs"] = str(tools)
    ranks[1]["env"] = {"PATH": "/usr/bin:/bin"}
    link.call("start", {"run_dir": run_dir, "spec": asked})
    until = {"run_dir": run_dir, "attempt": 1}
    list(link.request("follow", {"files": [], "until": until}))
    logs = Path(run_dir, "attempts/1/logs")
    assert (logs / "rank-0.out").read_text() == "the ninja of the venv\n"
    assert (logs / "rank-1.out").read_text() == "none\n"


def test_a_rank_that_dies_takes_the_others_along_and_is_the_first_failure(
    link: Connection, tmp_path: Path
) -> None:
    run_dir, run_id = str(tmp_path / "run"), unique(tmp_path)
    detached = "setsid sh -c 'setsid sleep 613 & trap : TERM; sleep 613; sleep 613' & "
    scripts = (
        detached + "sleep 0.3; kill -SEGV $$",
        "trap '' TERM; sleep 613; sleep 613",
        "kill -STOP $$; sleep 613",
    )
    link.call("start", {"run_dir": run_dir, "spec": spec(1, *scripts, run_id=run_id, grace=0.5)})
    asked = link.open("follow", {"files": [], "until": {"run_dir": run_dir, "attempt": 1}})
    assert asked.end()["state"] == "failed"
    state = link.call("state", {"run_dir": run_dir, "attempt": 1})
    assert (state["node"]["first_failure"]["rank"], state["node"]["first_failure"]["signal"]) == (0, 11)
    assert [rank["state"] for rank in state["ranks"]] == ["exited"] * 3
    assert left_of(run_id) == []


def test_a_program_that_can_not_start_is_a_failed_rank_with_its_reason_in_the_log(
    link: Connection, tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "run")
    broken = spec(1, "sleep 614", run_id=unique(tmp_path))
    broken["ranks"].append({"rank": 1, "local_rank": 1, "argv": ["/no/such"], "env": {}, "cwd": "/"})  # type: ignore[attr-defined]
    link.call("start", {"run_dir": run_dir, "spec": broken})
    link.open("follow", {"files": [], "until": {"run_dir": run_dir, "attempt": 1}}).end()
    state = link.call("state", {"run_dir": run_dir, "attempt": 1})
    assert state["node"]["first_failure"]["rank"] == 1 and state["node"]["first_failure"]["exit_code"] == 127
    assert "/no/such" in (tmp_path / "run/attempts/1/logs/rank-1.err").read_text()
    assert left_of(unique(tmp_path)) == []


@pytest.mark.parametrize("python", [sys.executable, oldest_python()])
def test_a_run_outlives_the_link_and_is_stopped_over_a_new_one(tmp_path: Path, python: str | None) -> None:
    if python is None:
        pytest.skip("no Python 3.8 here")
    run_dir, run_id = str(tmp_path / "run"), unique(tmp_path)
    first = connect(tmp_path, python)
    first.call(
        "start",
        {"run_dir": run_dir, "spec": spec(1, "sleep 615", "setsid sleep 615 & kill -STOP $$", run_id=run_id)},
    )
    os.kill(first.hello().pid, 9)
    first.close()
    second = connect(tmp_path, python)
    state = second.call("state", {"run_dir": run_dir, "attempt": 1})
    assert state["supervisor"]["alive"] and state["node"]["state"] == "running" and left_of(run_id)
    with pytest.raises(RequestFailed, match="already started"):
        second.call("start", {"run_dir": run_dir, "spec": spec(1, "true", run_id=run_id)})
    assert second.call("stop", {"run_dir": run_dir, "attempt": 1, "grace": 1}) == {
        "left": 0,
        "state": "stopped",
    }
    assert left_of(run_id) == []
    second.close()


def test_a_run_whose_supervisor_was_killed_is_lost_and_still_stopped_whole(
    link: Connection, tmp_path: Path
) -> None:
    run_dir, run_id = str(tmp_path / "run"), unique(tmp_path)
    supervisor = link.call(
        "start", {"run_dir": run_dir, "spec": spec(1, "sleep 616", "sleep 616", run_id=run_id)}
    )
    os.kill(supervisor["pid"], 9)
    wait_for(lambda: not is_alive(supervisor))
    assert link.call("state", {"run_dir": run_dir, "attempt": 1})["node"]["state"] == "lost"
    assert link.call("stop", {"run_dir": run_dir, "attempt": 1, "grace": 1}) == {
        "left": 0,
        "state": "stopped",
    }
    assert left_of(run_id) == []


def test_an_attempt_of_an_earlier_boot_is_lost_by_a_restart_of_the_node(
    link: Connection, tmp_path: Path
) -> None:
    run_dir, run_id = str(tmp_path / "run"), unique(tmp_path)
    link.call("start", {"run_dir": run_dir, "spec": spec(1, "sleep 618", run_id=run_id)})
    where = {"run_dir": run_dir, "attempt": 1}
    assert link.call("state", where)["supervisor"]["rebooted"] is False
    path = tmp_path / "run/attempts/1/supervisor.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "boot_id": "0123-of-an-earlier-boot"}))
    state = link.call("state", where)
    assert state["node"]["state"] == "lost" and state["supervisor"]["rebooted"] is True
    path.write_text(json.dumps(record))
    assert link.call("stop", {**where, "grace": 1})["left"] == 0


def test_stopping_one_run_leaves_another_and_a_stranger_with_a_reused_pid_alone(
    link: Connection, tmp_path: Path
) -> None:
    one, two = unique(tmp_path) + "-1", unique(tmp_path) + "-2"
    for run_id in (one, two):
        link.call("start", {"run_dir": str(tmp_path / run_id), "spec": spec(1, "sleep 617", run_id=run_id)})
    record = link.call("state", {"run_dir": str(tmp_path / two), "attempt": 1})["ranks"][0]
    assert is_alive(record) and not is_alive({**record, "start_time": record["start_time"] - 1})
    link.call("stop", {"run_dir": str(tmp_path / one), "attempt": 1, "grace": 1})
    assert left_of(one) == [] and is_alive(record)
    link.call("stop", {"run_dir": str(tmp_path / two), "attempt": 1, "grace": 1})
    assert left_of(two) == []


def test_following_goes_on_from_a_cursor_without_losing_or_doubling_a_byte(
    link: Connection, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    first = list(link.request("follow", {"files": [{"path": str(path), "offset": 0}], "until": "now"}))
    with path.open("ab") as file:
        file.write(b"abc")
    second = list(link.request("follow", {"files": [{"path": str(path), "offset": 10}], "until": "now"}))
    assert [(one.fields["offset"], one.payload) for one in first + second] == [
        (0, b"0123456789"),
        (10, b"abc"),
    ]


# ---- starting


def test_the_agent_is_sent_once_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    connect(tmp_path).close()
    (installed,) = (tmp_path / "work" / "agent").iterdir()
    assert installed.stat().st_mode & 0o077 == 0
    stamp = installed.stat().st_ino
    connect(tmp_path).close()
    assert installed.stat().st_ino == stamp
    (installed / "clusterctl" / "agent" / "server.py").write_text("import os; os.system('touch /tmp/pwned')")
    again = connect(tmp_path)
    assert again.run(["echo", "whole"]).stdout == b"whole\n" and not Path("/tmp/pwned").exists()
    again.close()


@pytest.mark.parametrize("python", [sys.executable, oldest_python()])
def test_an_agent_finds_itself_compiled(tmp_path: Path, python: str | None) -> None:
    if python is None:
        pytest.skip("no Python 3.8 here")
    connect(tmp_path, python).close()
    (installed,) = (tmp_path / "work" / "agent").iterdir()
    assert list((installed / "clusterctl" / "agent" / "__pycache__").glob("server.*.pyc"))


def test_a_work_folder_may_have_any_name(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    workdir = f"{tmp_path}/a b:1 ä\n\udcff"
    node = Node(name="node1", host="local", address="127.0.0.1", python=sys.executable, workdir=workdir)
    link = LocalTransport(home=home).connect(node)
    assert link.run(["echo", "there"]).stdout == b"there\n" and os.path.isdir(f"{workdir}/agent")
    link.close()


def test_a_work_folder_that_can_not_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("a file in the way")
    with pytest.raises(ClusterctlError, match="can't be installed"):
        connect(tmp_path)


@pytest.mark.root
def test_no_agent_starts_out_of_a_folder_that_others_could_put_a_program_into(tmp_path: Path) -> None:
    # It makes the folder itself, and finds it again.
    connect(tmp_path).close()
    connect(tmp_path).close()
    work = tmp_path / "work"
    for folder in (work, work / "agent"):
        folder.chmod(0o777)
        with pytest.raises(ClusterctlError, match=r"everybody may write into it \(mode 0777\)") as caught:
            connect(tmp_path)
        assert "login's alone" in caught.value.hint
        folder.chmod(0o770)
        if os.geteuid() == 0:
            os.chown(folder, 12345, -1)
            with pytest.raises(ClusterctlError, match="it belongs to user 12345, and this login is user 0"):
                connect(tmp_path)
            os.chown(folder, 0, -1)
    connect(tmp_path).close()


@pytest.mark.root
def test_no_agent_starts_below_a_folder_in_which_others_could_replace_its_own(tmp_path: Path) -> None:
    above = tmp_path / "shared"
    above.mkdir()
    (above / "mine").mkdir(mode=0o700)

    def start() -> None:
        connect_below = local_node(above / "mine")
        LocalTransport(home=tmp_path).connect(connect_below).close()

    above.chmod(0o777)
    with pytest.raises(ClusterctlError, match=r"everybody may write into .*/shared above it \(mode 0777\)"):
        start()
    # As in /tmp: nobody may rename what belongs to others.
    above.chmod(0o1777)
    start()
    above.chmod(0o775)
    start()
    if os.geteuid() == 0:
        os.chown(above, 12345, -1)
        with pytest.raises(ClusterctlError, match=r"/shared above it belongs to user 12345"):
            start()


def test_a_python_that_is_no_python_is_said_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(ClusterctlError, match="no agent could be started"):
        connect(tmp_path, "/bin/false")
    with pytest.raises(ClusterctlError, match="no/python"):
        connect(tmp_path, "/no/python")


@pytest.mark.parametrize("python", [sys.executable, oldest_python()])
def test_an_end_is_told_by_the_kernel_or_a_thread_whatever_holds_the_output(
    tmp_path: Path, python: str | None
) -> None:
    if python is None:
        pytest.skip("no Python 3.8 here")
    link = connect(tmp_path, python)
    pid = link.hello().pid
    before = len(os.listdir(f"/proc/{pid}/fd"))
    done = link.run(["/bin/sh", "-c", "sleep 616 & echo $!; kill -SEGV $$"])
    os.kill(int(done.stdout), 9)
    assert (done.exit_code, done.signal) == (None, 11)
    closed = link.run(["/bin/sh", "-c", "exec >&- 2>&-; sleep 0.2; exit 9"])
    assert (closed.exit_code, closed.code) == (9, 9)
    # The pipe to the watcher stays.
    wait_for(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before + 1)
    link.close()


def test_a_killed_agent_leaves_no_commands_but_what_outlived_its_command_stays(
    link: Connection, tmp_path: Path
) -> None:
    pid_file = tmp_path / "left"
    link.run(["/bin/sh", "-c", f"setsid sleep 614 > /dev/null 2>&1 & echo $! > {pid_file}"])
    left = int(pid_file.read_text())
    pid = int(link.hello().pid)
    script = "trap '' TERM; setsid sleep 615 & echo up; while :; do sleep 1; done"
    said = threading.Event()

    def run() -> None:
        with pytest.raises(LinkLost, match="the connection ended"):
            link.run(
                ["/bin/sh", "-c", script],
                env={"WHOSE": unique(tmp_path)},
                on_output=lambda *_: said.set(),
            )

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert said.wait(60)
    os.kill(pid, 9)
    thread.join(60)
    wait_for(lambda: not marked({"WHOSE": unique(tmp_path)}), 60)
    assert Path(f"/proc/{left}").exists()
    os.kill(left, 9)


def test_an_idle_agent_is_small(tmp_path: Path) -> None:
    first = connect(tmp_path)
    first.close()
    link = connect(tmp_path)
    rollup = Path(f"/proc/{link.hello().pid}/smaps_rollup").read_text()
    link.close()
    own = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))
    # kB; what it shares with other Pythons comes on top of it.
    assert 1000 < own < 12_000, rollup
