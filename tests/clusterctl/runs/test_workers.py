"""The worker that failed below a launcher, from the end of the launcher's output."""

from __future__ import annotations

import signal

import pytest

from clusterctl.agent.ranks.frames import frames_in
from clusterctl.runs.causes.patterns import raised_in
from clusterctl.runs.causes.workers import failed_worker, own_lines

REPORT = """E1128 13:26:38.394000 20631 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
  File "run.py", line 1, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Failures:
[1]:
  rank      : 2 (local_rank: 0)
  exitcode  : -15 (pid: 20730)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_13:26:38
  host      : localhost
  rank      : 3 (local_rank: 1)
  exitcode  : {code} (pid: 20733)
  error_file: {file}
  traceback : {traceback}
============================================================
"""
WORKERS = {
    "torch's own prefix": ("[rank3]: {line}", "[rank2]: {line}"),
    "the prefix of --tee": ("[default1]:{line}", "[default0]:{line}"),
    "both": ("[default1]:[rank3]: {line}", "[default0]:[rank2]: {line}"),
    "our prefix of --tee": ("[rank3]:{line}", "[rank2]:{line}"),
    "none": ("{line}", ""),
}
OWN = [
    "Traceback (most recent call last):",
    '  File "train.py", line 8, in <module>',
    "ValueError: bad worker",
]
OTHER = [
    "Traceback (most recent call last):",
    '  File "train.py", line 9, in <module>',
    "RuntimeError: Connection closed by peer",
]
HOW = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def first() -> int:
    """Return the rank of the first worker of the second node."""
    return 2


def report(code: int = 1, file: str = "<N/A>", traceback: str = HOW) -> list[str]:
    return REPORT.format(code=code, file=file, traceback=traceback).splitlines()


@pytest.mark.parametrize("way", WORKERS)
def test_torchruns_root_cause_names_the_worker_and_its_own_lines_the_exception(way: str) -> None:
    own, other = WORKERS[way]
    lines = [own.format(line=line) for line in OWN]
    lines += [other.format(line=line) for line in OTHER if other]
    worker = failed_worker([*lines, *report()], first)
    assert worker is not None
    assert (worker.rank, worker.local_rank, worker.exit_code, worker.signal) == (3, 1, 1, None)
    assert raised_in(worker.lines) == "ValueError: bad worker"


def test_a_worker_that_a_signal_ended() -> None:
    worker = failed_worker(report(code=-11, traceback="Signal 11 (SIGSEGV) received by PID 20733"), first)
    assert worker is not None and (worker.exit_code, worker.signal) == (None, signal.SIGSEGV)
    assert worker.lines == ()


def test_a_recorded_exception_counts_before_the_lines() -> None:
    recorded = (
        "Traceback (most recent call last):\n    File \"train.py\", line 4, in main\n  KeyError: 'recorded'"
    )
    worker = failed_worker([*OWN, *report(file="/tmp/x/error.json", traceback=recorded)], first)
    assert worker is not None and raised_in(worker.lines) == "KeyError: 'recorded'"


@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_deepspeeds_last_line_names_the_worker(prefix: str) -> None:
    lines = [prefix + line for line in OWN]
    lines += [f"[rank2]: {line}" for line in OTHER if prefix]
    lines += [
        "[2026-11-28 13:00:00,123] [INFO] [launch.py:335:sigkill_handler] Killing subprocess 17",
        "[2026-11-28 13:00:00,124] [ERROR] [launch.py:341:sigkill_handler] ['/usr/bin/python', '-u', 'train.py',"
        " '--local_rank=1', '--lr', '1'] exits with return code = 1",
    ]
    worker = failed_worker(lines, first)
    assert worker is not None
    assert (worker.rank, worker.local_rank, worker.exit_code) == (3, 1, 1)
    assert raised_in(worker.lines) == "ValueError: bad worker"


@pytest.mark.parametrize(
    "lines",
    [[], OWN, ["Root Cause (first observed failure):"], ["Root Cause (first observed failure):", "x"]],
)
def test_other_programs_have_no_workers(lines: list[str]) -> None:
    assert failed_worker(lines, first) is None


def test_a_workers_lines_are_those_with_its_global_or_its_local_number() -> None:
    lines = ["[rank3]:a", "[default1]:b", "[rank1]:c", "[default1]:[rank3]: d", "[rank33]:e", "f"]
    assert own_lines(3, 1, lines) == ["a", "b", "d"]


def test_the_stack_of_an_aborted_worker_is_read_through_its_prefix() -> None:
    lines = [
        "Fatal Python error: Aborted",
        "",
        "Current thread 0x1 (most recent call first):",
        '  File "t.py", line 7 in f',
    ]
    prefixed = [f"[rank3]:{line}" for line in lines]
    assert [tuple(frame) for frame in frames_in("\n".join(own_lines(3, 1, prefixed)))] == [("f", "t.py", 7)]
