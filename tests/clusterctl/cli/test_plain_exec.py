"""An `exec` with few options is run without the library that reads command lines, and with few modules."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.cli.nodes.plain_exec import PlainExec, read


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("exec node1 -- ls -l", PlainExec(("ls", "-l"), "node1")),
        ("exec -w node[1-2] true", PlainExec(("true",), "node[1-2]")),
        ("exec -n node1 -c c.yaml -- true", PlainExec(("true",), "node1", "c.yaml")),
        ("exec -c c.yaml node1 -- true", PlainExec(("true",), "node1", "c.yaml")),
        ("exec node1 --hostfile c.yaml -- true --", PlainExec(("true", "--"), "node1", "c.yaml")),
        ("exec -w all -x node2 --ssh openssh true", PlainExec(("true",), "all", None, "node2", "openssh")),
        ("exec --persist 1m -w all true", PlainExec(("true",), "all", persist="1m")),
        ("exec node1 hostname", PlainExec(("hostname",), "node1")),
    ],
)
def test_a_plain_command_line_is_read(line: str, expected: PlainExec) -> None:
    assert read(shlex.split(line)) == expected


@pytest.mark.parametrize(
    "line",
    [
        "exec",
        "exec node1",
        "exec node1 --",
        "exec node1 -- ''",
        "exec '' -- true",
        "exec -w '' -- true",
        "exec -w --shell true",
        "exec -w node1 -w node2 -- true",
        "exec -c a -c b node1 -- true",
        "exec --fold node1 -- true",
        "exec node1 --timeout 3 -- true",
        "exec node1 ls -l",
        "exec node1 true -c c.yaml",
        "exec --help",
        "push a b",
    ],
)
def test_any_other_command_line_is_left_to_the_library(line: str) -> None:
    assert read(shlex.split(line)) is None


RUN = """
import json, sys
from clusterctl.cli import main
code = main.run(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]))
"""
# Modules of the launcher, with the packages, that a command on this machine imports.
MOST_MODULES = 59


def test_a_plain_command_imports_neither_that_library_nor_many_modules(tmp_path: Path) -> None:
    inventory = tmp_path / "cluster.yaml"
    inventory.write_text("nodes:\n  here: {host: local}\n")
    argv = [sys.executable, "-c", RUN, "exec", "-c", str(inventory), "-w", "here", "sh", "-c"]
    done = subprocess.run([*argv[:-2], "--", "sh", "-c", "exit 3"], capture_output=True, text=True)
    code, loaded = json.loads(done.stdout.splitlines()[-1])
    assert (code, done.stderr) == (3, "here: exit 3\n")
    assert not {"typer", "rich", "click", "asyncio", "paramiko"} & set(loaded)
    own = [name for name in loaded if name.split(".")[0] == "clusterctl"]
    assert len(own) <= MOST_MODULES, own


COLLECTIONS = """
import atexit, gc, runpy, sys
atexit.register(lambda: print(sum(entry["collections"] for entry in gc.get_stats()), gc.get_freeze_count() > 10_000))
sys.argv = ["clusterctl", "--version"]
runpy.run_module("clusterctl", run_name="__main__")
"""


def test_no_garbage_is_collected_while_modules_load_and_at_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTIONS], capture_output=True, text=True)
    collections, frozen = done.stdout.splitlines()[-1].split()
    assert int(collections) < 20, done.stderr
    assert frozen == "True"
