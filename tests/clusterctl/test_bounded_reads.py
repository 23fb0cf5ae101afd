"""Every read of what a node, a program or a run wrote is bounded in size and in time."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterctl.agent.bounded import outputs_of

ROOT = Path(__file__).resolve().parents[2] / "clusterctl"
FILES = sorted(
    path
    for pattern in (
        "agent/**/*.py",
        "runs/*.py",
        "logs/*.py",
        "checks/*.py",
        "jobs/run_folder.py",
        "jobs/record.py",
    )
    for path in ROOT.glob(pattern)
)
# Reads of everything that comes; each of them with the reason why that is bounded.
REASONS = {
    "agent/bootstrap.py:is_whole:read": "an installed file of the agent, which this login wrote",
    "agent/bootstrap.py:start:readline": "the launcher's own first line: the launcher is trusted",
    "agent/frames.py:take:wait": "waits for credit; a request that ends closes the window",
    "agent/files/peer_tls.py:_flush:read": "what TLS made of one piece that is about to be sent",
    "agent/child.py:_wait:wait": "in a thread that waits for a command of the user; a timeout ends the command",
    "agent/child.py:finish:wait": "after the command's output has ended, or after it was killed",
    "agent/ranks/kernel.py:_run_dmesg:wait": "after SIGKILL",
    "agent/setups.py:_wait:wait": "after SIGKILL",
    "agent/ranks/supervisor.py:end:wait": "after SIGKILL",
    "agent/ranks/mpi_links.py:_report:wait": "the end of the user's own mpirun, which a stop ends",
    "agent/ranks/mpi_links.py:first:wait": "the end of the user's own mpirun, which a stop ends",
    "agent/files/work_folder.py:_update:read": "the record that this login wrote of a working folder",
    "agent/files/work_folder.py:_used:read": "the record that this login wrote of a working folder",
    "agent/ranks/mpi_links.py:start:read": "the daemon of the user's own mpirun sends nothing; its end closes the link",
    "checks/query.py:touch_text:read_text": "an installed file of clusterctl",
    "checks/touch.py:main:readline": "a line of its own child; the agent ends the program after its time limit",
    "checks/touch.py:_touch:read": "a word that its own parent wrote",
    "checks/touch.py:add:read": "a word that its own parent wrote",
    "runs/start.py:_files:read_text": "an installed file of the agent",
    "runs/carry.py:_work:wait": "a thread that waits for the next checkpoint; close() ends it",
}
READS = ("read", "readline", "readlines", "communicate", "wait")


def unbounded(path: Path, root: Path = ROOT) -> set[str]:
    """Return each call in a file that reads all that comes, as FILE:FUNCTION:CALL."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
            name, limits = call.func.attr, bool(call.args or call.keywords)
            where = f"{path.relative_to(root).as_posix()}:{function.name}:{name}"
            if owner == "subprocess" and name in ("run", "check_output", "call", "check_call"):
                if not any(keyword.arg == "timeout" for keyword in call.keywords):
                    found.add(where)
            elif (
                (name == "load" and owner == "json")
                or name in ("read_text", "read_bytes")
                or (name in READS and not limits)
            ):
                found.add(where)
    return found


def test_every_read_without_a_limit_is_listed_with_its_reason() -> None:
    found = {entry for path in FILES for entry in unbounded(path)}
    assert found - set(REASONS) == set(), "reads without a limit"
    assert set(REASONS) - found == set(), "reasons for reads that are no more"


def test_the_search_finds_each_kind_of_unbounded_read(tmp_path: Path) -> None:
    text = (
        "def f(x):\n    x.read()\n    x.readline()\n    x.read_text()\n    json.load(x)\n    x.communicate()\n"
        "    subprocess.run(x)\n    subprocess.run(x, timeout=1)\n    x.read(9)\n    x.wait(1)\n"
    )
    file = tmp_path / "f.py"
    file.write_text(text)
    kinds = {entry.rpartition(":")[2] for entry in unbounded(file, tmp_path)}
    assert kinds == {"read", "readline", "read_text", "load", "communicate", "run"}


def started(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_program_that_prints_without_end_is_read_up_to_the_limit() -> None:
    process = started("import os\nwhile True: os.write(1, b'x' * 65536)")
    began = time.monotonic()
    out, err, ended = outputs_of(process, 1.0, 1000)
    process.kill()
    process.wait()
    assert (out, err, ended) == (b"x" * 1000, b"", False)
    assert time.monotonic() - began < 5.0


CLOSES = "import os, time; os.close(1); os.close(2); time.sleep(600)"


@pytest.mark.parametrize("code", ["import time; time.sleep(600)", CLOSES])
def test_a_program_that_never_ends_is_left_after_its_time(code: str) -> None:
    process = started(code)
    assert outputs_of(process, 1.0, 1000) == (b"", b"", False)
    process.kill()
    process.wait()


def test_both_outputs_of_a_program_are_read_to_their_end() -> None:
    process = started("import sys; sys.stdout.write('a' * 70_000); sys.stderr.write('b' * 70_000)")
    assert outputs_of(process, 60.0, 1 << 20) == (b"a" * 70_000, b"b" * 70_000, True)
    assert process.returncode == 0
