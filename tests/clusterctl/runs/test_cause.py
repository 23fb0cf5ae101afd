"""Root causes in words, out of what nodes answered and logs that came home."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import LinkLost
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.runs.causes import cause as causes
from clusterctl.runs.causes.aftermath import exception_in, with_aftermath, with_clock, with_error_files
from clusterctl.runs.causes.cause import Cause, how_it_ended
from clusterctl.runs.query import combine, current_state, query_nodes
from clusterctl.runs.state import NodeAnswer, RankState, RunState, read_state, write_state
from clusterctl.runs.stop import stop_run
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport
from clusterctl.wire.typed_json import decode
from tests.clusterctl.runs.test_run import launched, program
from tests.support.records import outcome, rank_of, record_of
from tests.support.records import state_of as make_state
from tests.support.scripted import ScriptedTransport

RECORD = record_of({"a": [0, 1], "b": [2, 3]}, {"a": [4, 5], "b": [4, 5]})


def find_cause(
    run: RunDir,
    failure: RankState | None,
    ranks: Sequence[RankState],
    nodes: dict[str, str],
    orphaned: Sequence[str] = (),
) -> Cause:
    return causes.find_cause(run, make_state(nodes, ranks, failure, orphaned=tuple(orphaned)))


def answer(state: str, *ranks: dict[str, Any], failed: int | None = None) -> dict[str, Any]:
    first = next((one for one in ranks if one["rank"] == failed), None)
    return {"node": {"state": state, "first_failure": first}, "ranks": list(ranks)}


def ended(rank: int, when: float, code: int | None = None, signal: int | None = None) -> dict[str, Any]:
    return {"rank": rank, "state": "exited", "exit_code": code, "signal": signal, "ended": when}


def state_of(a: object, b: object) -> RunState:
    return combine(RECORD, [outcome("a", a), outcome("b", b)], None)


def test_the_earliest_failure_of_all_nodes_is_the_cause_and_a_stop_is_none() -> None:
    state = state_of(
        answer("stopped", ended(0, 9.0, signal=15), ended(1, 8.0, code=1)),
        answer("failed", ended(2, 5.0, code=7), ended(3, 6.0, signal=15), failed=2),
    )
    assert state.phase == "failed"
    assert state.failure is not None
    assert (state.failure.rank, state.failure.node, state.failure.device) == (2, "b", 4)


def test_a_rank_that_a_signal_stopped_is_the_cause_of_hangs_that_other_nodes_noticed_earlier() -> None:
    waits = {**ended(2, 5.0), "hang": 9.0, "step": 17}
    frozen = {**ended(0, 5.1), "hang": 9.1, "step": 18, "stopped": True}
    state = state_of(answer("failed", frozen, failed=0), answer("failed", waits, failed=2))
    assert state.failure is not None
    assert (state.failure.rank, state.failure.node, state.failure.stopped) == (0, "a", True)
    # A rank that failed before is a cause of its own.
    crashed = answer("failed", ended(3, 4.0, code=1), failed=3)
    earlier = state_of(answer("failed", frozen, failed=0), crashed).failure
    assert earlier is not None and earlier.rank == 3


def test_a_lost_node_is_the_cause_of_what_failed_elsewhere(tmp_path: Path) -> None:
    state = state_of(
        answer("failed", ended(0, 9.0, code=1), failed=0), LinkLost("b", "nothing was received for 10 s")
    )
    assert state.phase == "unknown"
    assert state.unreachable == {"b": "nothing was received for 10 s"}
    cause = find_cause(RunDir(tmp_path), state.failure, state.ranks, {"a": "failed", "b": "lost"})
    assert cause.title == "lost b: the node or its link is gone"


@pytest.mark.parametrize(
    ("states", "phase"),
    [
        (("finished", "finished"), "finished"),
        (("finished", "running"), "running"),
        (("failed", "stopped"), "failed"),
        (("failed", "lost"), "lost"),
        (("stopped", "finished"), "stopped"),
        (("finished", "unknown"), "unknown"),
    ],
)
def test_a_runs_phase_is_its_nodes_worst(states: tuple[str, str], phase: str) -> None:
    assert state_of(answer(states[0]), answer(states[1])).phase == phase


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ({"exit_code": 3}, "exited with code 3"),
        ({"signal": 9}, "killed (SIGKILL)"),
        ({"signal": 11}, "segmentation fault"),
        ({"signal": 3}, "ended by SIGQUIT"),
        ({"signal": 99}, "ended by signal 99"),
    ],
)
def test_an_exit_status_is_said_in_words(rank: dict[str, int], words: str) -> None:
    assert words in how_it_ended(rank_of({"rank": 0, **rank}))


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "install it"),
        ("torch.OutOfMemoryError: CUDA out of memory", "a smaller batch, or a model"),
        ("MemoryError", "less data in the node's memory, fewer processes that load data; `clusterctl"),
        ("OSError: [Errno 12] Cannot allocate memory", "less data in the node's memory"),
        ("OSError: [Errno 98] Address already in use", "master_port"),
        ("EI0014: Value x for ranktable variable", "ranktable check"),
        ("OSError: [Errno 28] No space left on device", "free some space"),
    ],
)
def test_what_the_rank_said_last_leads_to_a_remedy(tmp_path: Path, said: str, hint: str) -> None:
    run = RunDir(tmp_path)
    path = run.log("a", 1, "err")
    path.parent.mkdir(parents=True)
    path.write_text(f"noise\n{said}\n")
    cause = find_cause(run, at("a", 1, 0.0, code=1), [], {"a": "failed"})
    assert cause.tail[-1] == said
    assert hint in cause.hint and "micro_batch" not in cause.hint


@pytest.mark.parametrize("said", ["torch.OutOfMemoryError: CUDA out of memory", "MemoryError"])
def test_a_training_of_ours_without_memory_is_told_its_own_setting(tmp_path: Path, said: str) -> None:
    run = RunDir(tmp_path)
    record = record_of({"a": [0]}, {"a": [0]})
    run.write_record(replace(record, job=replace(record.job, train={"model": "gpt-tiny"})))
    path = run.log("a", 0, "err")
    path.parent.mkdir(parents=True)
    path.write_text(f"{said}\n")
    cause = find_cause(run, at("a", 0, 0.0, code=1), [], {"a": "failed"})
    assert "a smaller micro_batch" in cause.hint
    assert ("node's memory" in cause.hint) == (said == "MemoryError")


TRACEBACK = """step 12
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    loss / 0
ZeroDivisionError: division by zero
"""
LOST = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    dist.barrier()
RuntimeError: [../gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.0.0.2]:4242
"""


def wrote(run: RunDir, node: str, rank: int, text: str) -> None:
    path = run.log(node, rank, "err")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def at(
    node: str, rank: int, when: float, code: int | None = None, signal: int | None = None, **more: Any
) -> RankState:
    return rank_of({**ended(rank, 0.0, code, signal), "node": node, "device": rank, "at": when, **more})


def test_the_first_by_the_steady_clocks_counts_whatever_the_wall_clocks_say(tmp_path: Path) -> None:
    def node(offset: float, rank: int, when: float, wall: float) -> dict[str, Any]:
        failed = {**ended(rank, wall, code=1), "monotonic": when + offset}
        return {**answer("failed", failed, failed=rank), "clock": offset}

    outcomes = [
        outcome("a", node(5000.0, 0, 100.2, 10.0)),
        outcome("b", node(-70.0, 2, 100.0, 700.0)),
    ]
    late = combine(RECORD, outcomes, None)
    assert late.failure is not None
    assert (late.failure.node, late.failure.rank) == ("b", 2)
    assert late.failure.at == pytest.approx(100.0)


ERROR_FILE = {
    "message": {
        "message": "ValueError: boom",
        "extraInfo": {
            "py_callstack": "Traceback (most recent call last):\n  x\nValueError: boom\n",
            "timestamp": "1",
        },
    }
}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (json.dumps(ERROR_FILE).encode(), "Traceback (most recent call last):\n  x\nValueError: boom\n"),
        (b'{"message": {"message": "RuntimeError: x"}}', "RuntimeError: x"),
        (b'{"message": "SIGSEGV"}', "SIGSEGV"),
        (b'{"message": {"message": 5}}', ""),
        (b'{"mess', ""),
        (b"[" * 100_000, ""),
        (b"\xff\x00", ""),
        (b"[]", ""),
    ],
)
def test_an_error_file_is_read_and_a_damaged_one_is_empty(data: bytes, text: str) -> None:
    assert exception_in(data) == text


def test_the_exception_in_an_error_file_is_the_cause_where_the_log_has_none(tmp_path: Path) -> None:
    failed = answer("failed", ended(0, 9.0, code=1), failed=0)
    files = NodeFiles("/w/runs/r/a", 2)
    asked = []

    class Link:
        def get(self, path: str, limit: int) -> bytes:
            asked.append(path)
            return json.dumps(ERROR_FILE).encode()

    found = with_error_files(Link(), decode(NodeAnswer, failed), files)  # type: ignore[arg-type]
    assert asked == ["/w/runs/r/a/attempts/2/error-rank-0.json"]
    run = RunDir(tmp_path)
    rank = replace(found.ranks[0], node="a")
    for log in ("", "loading data\n"):
        wrote(run, "a", 0, log)
        cause = find_cause(run, rank, [rank], {"a": "failed"})
        assert "ValueError: boom" in cause.title and cause.tail[-1] == "ValueError: boom"


def test_a_rank_that_lost_another_is_not_the_cause_though_it_was_seen_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    wrote(run, "a", 0, LOST)
    wrote(run, "b", 1, TRACEBACK)
    ranks = [
        at("a", 0, 10.0, code=1),
        at("b", 1, 10.1, code=1),
        at("b", 2, 11.0, signal=15),
        at("b", 3, 12.0, signal=9),
    ]
    cause = find_cause(run, ranks[0], ranks, {"a": "failed", "b": "failed"})
    assert cause.title == "rank 1 on b (device 1) exited with code 1: ZeroDivisionError: division by zero"
    assert cause.tail[-1] == "ZeroDivisionError: division by zero"
    assert cause.others == "3 other ranks ended as a consequence: 2 stopped, 1 connection lost"
    assert cause.folder == str(tmp_path)


def test_a_worker_that_raised_is_the_cause_though_its_launcher_was_stopped_before_it_said_so(
    tmp_path: Path,
) -> None:
    """Of two launchers, the one whose workers only lost their peer ended first."""
    run = RunDir(tmp_path)
    nodes = tuple(Node(name, name, name, devices=(4, 5)) for name in "ab")
    run.write_record(replace(RECORD, cluster=Cluster("c", nodes)))
    raised = "".join(f"[rank3]: {line}\n" for line in TRACEBACK.splitlines())
    wrote(run, "a", 0, LOST)
    wrote(run, "b", 1, raised + lost_in(9, "barrier").replace("[rank1]", "[rank2]"))
    launchers = [at("a", 0, 10.0, code=1), at("b", 1, 11.0, signal=15)]
    cause = find_cause(run, launchers[0], launchers, {"a": "failed", "b": "stopped"})
    assert cause.title == "rank 3 on b (device 5) exited with code 1: ZeroDivisionError: division by zero"
    assert cause.tail[-1] == "ZeroDivisionError: division by zero"
    assert cause.others == "1 other rank ended as a consequence: connection lost"
    wrote(run, "b", 1, lost_in(9, "barrier"))
    cause = find_cause(run, launchers[0], launchers, {"a": "failed", "b": "stopped"})
    assert cause.title.startswith("rank 0 on a (device 0) exited with code 1: connection lost")


FILLED = """step 8/40 | loss 4.0
error: rank 2 on b: /data/step-00000008: cannot be saved: No space left on device
  try: the disk has no room for more files (inodes): remove some, or choose another folder
"""


C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
RECEIVED = f"""terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 32768 vs 4. Received data
Fatal Python error: Aborted

Thread 0x0000000000000001 (most recent call first):
  File "{C10D}", line 9 in all_reduce
  File "/n/code/train.py", line 30 in step
  File "/n/code/train.py", line 50 in <module>
"""


def lost_in(line: int, call: str) -> str:
    return f"""[rank1]: Traceback (most recent call last):
[rank1]:   File "/n/code/train.py", line 50, in <module>
[rank1]:     step()
[rank1]:   File "/n/code/train.py", line {line}, in step
[rank1]:     dist.{call}(x)
[rank1]:     ^^^^^^^^
[rank1]:   File "{C10D}", line 9, in {call}
[rank1]:     work.wait()
[rank1]: RuntimeError: [../gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer
"""


def test_a_rank_whose_collective_did_not_match_is_the_cause_and_not_the_one_that_received_it(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path)
    for node, rank, text in (
        ("a", 0, RECEIVED),
        ("a", 1, lost_in(30, "all_reduce")),
        ("b", 2, lost_in(41, "all_gather")),
        ("b", 3, "step 7\n"),
    ):
        wrote(run, node, rank, text)
    received = at("a", 0, 1.0, signal=6)
    others = [at("a", 1, 1.1, code=1), at("b", 2, 1.1, code=1), at("b", 3, 1.2, signal=15)]
    cause = find_cause(run, received, [received, *others], {"a": "failed", "b": "stopped"})
    assert (cause.rank, cause.node) == (2, "b")
    assert cause.title == (
        "rank 2 on b (device 2) called a collective that does not match: 2 of 3 ranks wait in all_reduce at"
        " code/train.py:30, rank 2 (b, device 2) waits in all_gather at code/train.py:41"
    )
    assert "with tensors of one size" in cause.hint
    # At one line of all, the stacks do not show which it was.
    wrote(run, "b", 2, lost_in(30, "all_reduce"))
    cause = find_cause(run, received, [received, *others], {"a": "failed", "b": "stopped"})
    assert cause.rank == 0
    assert "its collective does not match those of other ranks" in cause.title
    assert cause.hint.endswith(
        "; 32768 bytes came, and its own tensor takes 4: one of the two ranks is wrong"
    )


def test_a_rank_that_hangs_on_its_way_out_tells_what_it_raised(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    wrote(run, "a", 1, TRACEBACK)
    facts = {"hang": 9.0, "odd": True}
    exits = at(
        "a", 1, 1.0, stands="rank 1 (a) is in `_del`, called by `_exitfunc` at x.py:1 for 9 s", **facts
    )
    assert find_cause(run, exits, [exits], {"a": "failed"}).title.endswith(
        "for 9 s; it was exiting after ZeroDivisionError: division by zero"
    )
    loads = at("a", 1, 1.0, stands="rank 1 (a) is in `load` at x.py:1 for 9 s", **facts)
    assert "ZeroDivisionError" not in find_cause(run, loads, [loads], {"a": "failed"}).title


def test_the_rank_that_could_not_save_is_the_cause_though_all_ranks_report_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for node, rank in (("a", 0), ("a", 1), ("b", 2), ("b", 3)):
        wrote(run, node, rank, FILLED)
    # The writer was ended by its supervisor before it could exit.
    ranks = [at("a", 0, 10.0, code=1), at("a", 1, 10.0, code=1), at("b", 2, 10.1, signal=15)]
    cause = find_cause(run, ranks[0], ranks, {"a": "failed", "b": "stopped"})
    assert cause.title == (
        "rank 2 on b (device 2) failed: /data/step-00000008: cannot be saved: No space left on device"
    )
    assert cause.hint.endswith("(inodes): remove some, or choose another folder")
    assert cause.log == str(run.log("b", 2, "err"))


def test_a_node_that_was_restarted_is_the_cause(tmp_path: Path) -> None:
    supervisor = {"pid": 7, "boot_id": "x", "alive": False, "rebooted": True}
    state = state_of({"supervisor": supervisor, "node": {"state": "lost"}, "ranks": []}, answer("stopped"))
    assert (state.rebooted, state.orphaned) == (("a",), ("a",))
    run = RunDir(tmp_path)
    assert causes.find_cause(run, state).title == "a was restarted (another boot id)"
    # The state is written and read in between.
    write_state(run, state)
    assert getattr(read_state(run), "rebooted", ()) == ("a",)


def error(last: str) -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    step()\n{last}\n'


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("EI0006: Getting socket times out\n" + error("RuntimeError: HCCL function error: 4"), "link"),
        ("[ERROR] EI0019 port is bound\n", "port"),
        (error("RuntimeError: The server socket has failed to listen: code: -98, name: EADDRINUSE"), "port"),
        (error("torch.distributed.DistNetworkError: The client socket has timed out after 60000ms"), "ranks"),
        (error("torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients."), "ranks"),
        (error("RuntimeError: Gloo connectFullMesh failed with timed out connecting"), "ranks"),
        (error("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"), "ranks"),
        (error("torch.distributed.DistBackendError: ncclSystemError: System call failed"), "NCCL"),
        (error("OSError: [Errno 5] Input/output error: '/data/x.bin'"), "disk"),
        (error("OSError: [Errno 116] Stale file handle"), "disk"),
        (FILLED, "disk"),
        (LOST, "link"),
        (TRACEBACK, ""),
        ("OSError: [Errno 5] Input/output error\n" + TRACEBACK, ""),
        (error("torch.OutOfMemoryError: CUDA out of memory"), ""),
        ("EI0014: Value x for ranktable variable\n", ""),
        ("error: train.model.vocab: smaller than the tokenizer's\n", ""),
    ],
)
def test_a_failure_that_may_pass_is_known_by_its_code_or_text(tmp_path: Path, text: str, passes: str) -> None:
    run, rank = RunDir(tmp_path), at("a", 0, 5.0, code=1)
    wrote(run, "a", 0, text)
    found = find_cause(run, rank, [rank], {"a": "failed"}).passes
    assert (passes in found) if passes else not found


def test_a_dead_supervisor_is_told_from_a_dead_node(tmp_path: Path) -> None:
    nodes = {"a": "stopped", "b": "lost"}
    cause = find_cause(RunDir(tmp_path), None, [], nodes, orphaned=["b"])
    assert cause.title.startswith("the supervisor on b was killed")
    assert find_cause(RunDir(tmp_path), None, [], nodes).title.startswith("lost b: the node or its link")
    gone = find_cause(RunDir(tmp_path), None, [], {"a": "lost", "b": "lost"}, orphaned=["b"])
    assert gone.title.startswith("lost a, b")


def test_what_a_stopped_rank_said_when_it_was_ended_is_no_cause(tmp_path: Path) -> None:
    log = RunDir(tmp_path).log("a", 1, "err")
    log.parent.mkdir(parents=True)
    log.write_text(
        "Traceback (most recent call last):\n  x\nConnectionResetError: Connection closed by peer\n"
    )
    rank = rank_of({"node": "a", "rank": 1, "device": 0, "hang": 10.0, "stopped": True})
    cause = find_cause(RunDir(tmp_path), rank, [rank], {"a": "failed"})
    assert cause.title == "rank 1 on a (device 0) was stopped by a signal (SIGSTOP) for 10 s"


def test_a_rank_whose_disk_was_full_is_said_to_have_had_no_room_though_its_own_words_are_lost(
    tmp_path: Path,
) -> None:
    rank = rank_of({"node": "a", "rank": 1, "device": 0, "exit_code": 1, "full": "/home/me/runs"})
    cause = find_cause(RunDir(tmp_path), rank, [rank], {"a": "failed"})
    assert cause.title.endswith("exited with code 1: No space left on device, for /home/me/runs")
    assert "free some space" in cause.hint


def test_many_consequences_are_one_line(tmp_path: Path) -> None:
    run, ranks = (
        RunDir(tmp_path),
        [at("a", 0, 5.0, signal=9, oom=True, kernel=["Out of memory: Killed process 7"])],
    )
    for rank in range(1, 32):
        wrote(run, "a", rank, "ConnectionResetError: [Errno 104] Connection reset by peer\n")
        ranks.append(at("a", rank, 5.5, code=1))
    cause = find_cause(run, ranks[0], ranks, {"a": "failed"})
    assert cause.title == "rank 0 on a (device 0) was killed by the kernel: the node was out of memory"
    assert cause.kernel == ("Out of memory: Killed process 7",)
    assert cause.others == "31 other ranks ended as a consequence: connection lost"


def test_a_lost_connection_while_another_error_is_handled_does_not_hide_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    wrote(
        run,
        "a",
        0,
        TRACEBACK + "\nDuring handling of the above exception, another exception occurred:\n\n" + LOST,
    )
    rank = at("a", 0, 5.0, code=1)
    assert "ZeroDivisionError" in find_cause(run, rank, [rank], {"a": "failed"}).title
    wrote(run, "a", 0, TRACEBACK + "caught, going on\n" + LOST)
    assert find_cause(run, rank, [rank], {"a": "failed"}).title.endswith(
        "exited with code 1: connection lost"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[rank3]: Traceback (most recent call last):\n[rank3]:   File x\n[rank3]: ValueError: bad",
            "ValueError: bad",
        ),
        (
            "[E123] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
            "NCCL waited for another rank",
        ),
        (
            "RuntimeError: [x/gloo/unbound_buffer.cc:81] Timed out waiting 9000ms for recv operation",
            "gloo waited",
        ),
        ("[ERROR] EI0006: Getting socket times out. Reason: x", "EI0006, waited for another rank's socket"),
        (
            "EI0014: Value 1 for ranktable variable x is invalid",
            "EI0014, the rank table names what is not so",
        ),
        (
            LOST.replace("[../gloo/transport/tcp/pair.cc:525] ", "EI0011: "),
            "EI0011, out of memory on the device",
        ),
        ("EI0006: retried, fine\n" + TRACEBACK, "ZeroDivisionError"),
        (
            '  File "train.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax',
            "SyntaxError: invalid",
        ),
    ],
)
def test_what_a_rank_said_is_put_in_words(tmp_path: Path, text: str, words: str) -> None:
    run, rank = RunDir(tmp_path), at("a", 0, 5.0, code=1)
    wrote(run, "a", 0, text)
    assert words in find_cause(run, rank, [rank], {"a": "failed"}).title


@pytest.mark.parametrize(
    ("why", "hint"),
    [("[Errno 2] No such file or directory: b'x'", "path"), ("[Errno 13] Permission denied", "chmod")],
)
def test_a_program_that_no_node_could_start_is_told_as_such(tmp_path: Path, why: str, hint: str) -> None:
    run, rank = RunDir(tmp_path), at("a", 0, 5.0, code=127)
    wrote(run, "a", 0, f"clusterctl: cannot start 'x' in /some/where: {why}\n")
    cause = find_cause(run, rank, [rank], {"a": "failed"})
    words = why.partition("] ")[2].partition(":")[0]
    assert cause.title == f"rank 0 on a (device 0) could not start 'x': {words}" and hint in cause.hint


def test_a_rank_that_left_while_the_others_counted_on_it_is_the_cause(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for rank in (0, 3):
        wrote(run, "a" if rank == 0 else "b", rank, LOST)
    ranks = [at("a", 0, 10.1, code=1), at("b", 2, 10.0, code=0), at("b", 3, 10.3, code=1)]
    cause = find_cause(run, ranks[0], ranks, {"a": "failed", "b": "failed"})
    assert cause.title == "rank 2 on b (device 2) exited with code 0 while other ranks still needed it"
    assert cause.others == "2 other ranks ended as a consequence: connection lost"
    # It was stopped, saved a last checkpoint, and left.
    ranks[1] = at("b", 2, 11.0, code=0)
    assert "rank 0 on a" in find_cause(run, ranks[0], ranks, {"a": "failed", "b": "failed"}).title
    # Nothing failed on that node, so its clock was not read.
    ranks = [ranks[0], replace(ranks[1], at=None)]
    assert "rank 2 on b" in find_cause(run, ranks[0], ranks, {"a": "failed", "b": "finished"}).title
    assert "rank 0 on a" in find_cause(run, ranks[0], ranks, {"a": "failed", "b": "stopped"}).title


def test_who_did_not_wait_where_all_others_waited_in_vain_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for rank in (0, 1, 3):
        wrote(
            run,
            "a",
            rank,
            LOST.replace("Connection closed by peer", "Timed out waiting 9000ms for recv operation"),
        )
    ranks = [at("a", rank, 10.0, code=1) for rank in (0, 1, 3)] + [at("a", 2, 12.0, signal=15)]
    cause = find_cause(run, ranks[0], ranks, {"a": "failed"})
    assert "gloo waited" in cause.title and cause.hint.startswith("look at rank 2 on a: ")
    several = [*ranks[:1], *(at("a", rank, 12.0, signal=15) for rank in (4, 5, 6))]
    assert "look at" not in find_cause(run, several[0], several, {"a": "failed"}).hint


def test_a_program_that_raised_and_was_aborted_on_its_way_out_tells_what_it_raised(tmp_path: Path) -> None:
    run, ranks = (
        RunDir(tmp_path),
        [at("a", 0, 5.0, signal=6), at("a", 1, 5.1, signal=15), at("a", 2, 7.0, signal=15)],
    )
    wrote(run, "a", 0, TRACEBACK + "terminate called without an active exception\n")
    wrote(run, "a", 1, LOST)
    cause = find_cause(run, ranks[0], ranks, {"a": "failed"})
    assert (
        cause.title == "rank 0 on a (device 0) aborted itself (SIGABRT): ZeroDivisionError: division by zero"
    )
    assert cause.others == "2 other ranks ended as a consequence: 1 connection lost, 1 stopped"


class SkewedClock(ScriptedTransport):
    """A node whose steady clock began at another time than ours."""

    def __init__(self, ahead: float, more: dict[tuple[str, str], Any]) -> None:
        super().__init__(more)
        self.ahead = ahead

    def answer(self, node: str, what: str, op: str) -> Any:
        return {"monotonic": time.time() + self.ahead} if what == "hello" else super().answer(node, what, op)


def test_a_nodes_clock_is_measured_where_something_failed_and_a_silent_kernel_is_no_fault() -> None:
    failed = answer("failed", {**ended(0, 9.0, code=1), "pid": 7, "monotonic": 12345.0}, failed=0)
    link = SkewedClock(1000.0, {}).connect(Node("a", "a", "a"))
    found = with_aftermath(link, decode(NodeAnswer, failed))
    assert found.clock == pytest.approx(1000.0, abs=1.0)
    assert with_clock(found.ranks[0], found).at == pytest.approx(11345.0, abs=1.0)
    fine = decode(NodeAnswer, answer("running", {"rank": 0, "state": "running"}))
    assert with_aftermath(link, fine) is fine
    left = answer("stopped", {**ended(0, 9.0, code=0), "pid": 7, "monotonic": 12345.0})
    assert with_aftermath(link, decode(NodeAnswer, left)).clock == pytest.approx(1000.0, abs=1.0)
    reports = SkewedClock(0.0, {("a", "evidence"): {"7": {"oom": True, "kernel": ["Killed process 7"]}}})
    whole = with_aftermath(reports.connect(Node("a", "a", "a")), decode(NodeAnswer, failed))
    assert with_clock(whole.ranks[0], whole).oom is True


def test_a_cause_that_explains_itself_stands_before_a_node_that_is_lost_later(tmp_path: Path) -> None:
    run, rank = RunDir(tmp_path), at("a", 0, 5.0, code=1)
    wrote(run, "a", 0, TRACEBACK)
    cause = find_cause(run, rank, [rank], {"a": "failed", "b": "lost"})
    assert "ZeroDivisionError" in cause.title
    assert cause.others == "lost b"
    wrote(run, "a", 0, LOST)
    assert find_cause(run, rank, [rank], {"a": "failed", "b": "lost"}).title.startswith("lost b")


KERNEL = [
    (90.0, "python[41]: segfault at 0 ip 00 sp 00 error 4 in libc.so"),
    (93.0, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
    (99.7, "python invoked oom-killer: gfp_mask=0xcc0"),
    (99.8, "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=python,pid=42,uid=0"),
    (99.9, "Out of memory: Killed process 42 (python) total-vm:9000kB"),
    (100.0, "eth0: link up"),
    (150.0, "Out of memory: Killed process 43 (python)"),
]


def test_the_kernels_words_are_found_by_pid_and_time() -> None:
    from clusterctl.agent.ranks.kernel import about

    xid, oom = KERNEL[1][1], [text for _, text in KERNEL[2:5]]
    assert about(42, 100.0, 9, KERNEL) == {"oom": True, "kernel": [xid, *oom]}
    assert about(42, 100.0, 11, KERNEL) == {"oom": False, "kernel": [xid]}
    # In a container, where the kernel's pids are others.
    assert about(7, 100.0, 9, KERNEL)["oom"] is True
    assert about(7, 104.0, 9, KERNEL) == {"oom": False, "kernel": []}
    assert about(41, 90.5, 11, KERNEL)["kernel"] == [KERNEL[0][1]]
    assert about(8, 50.0, 9, KERNEL) == {"oom": False, "kernel": []}


def test_a_lost_node_that_answers_again_after_the_end_is_seen_to_have_been_restarted(tmp_path: Path) -> None:
    job = program("import time; time.sleep(600)", grace=0.5)
    with Connections(LocalTransport()) as connections:
        run = launched(tmp_path, connections, job)
        assert stop_run(run, connections) == {"node1": 0, "node2": 0}
        lost = replace(query_nodes(run, connections), phase=Phase.LOST)
        lost = replace(lost, nodes={**lost.nodes, "node2": Phase.LOST})
        cause = causes.record_end(run, lost)
        write_state(run, lost)
        assert cause is not None and cause.title == "lost node2: the node or its link is gone"
        # Another boot id: the node of this test is this machine.
        folder = NodeFiles(run.read_record().run_dirs["node2"]).attempt_dir
        supervisor = Path(folder, "supervisor.json")
        supervisor.write_text(
            json.dumps({**json.loads(supervisor.read_text()), "boot_id": "of an earlier boot"})
        )
        current_state(run, connections)
        again = causes.read_cause(run)
    assert again is not None and again.title == "node2 was restarted (another boot id)"
    assert run.phase() is Phase.LOST
