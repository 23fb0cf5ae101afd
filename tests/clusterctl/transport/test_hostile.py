"""Nodes whose agents lie: whatever one answers, the launcher says it in words, writes nothing outside, keeps its
memory, and serves the other nodes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import ClusterctlError, LinkLost
from clusterctl.text import escape_controls
from clusterctl.transport import local
from clusterctl.transport.connection import Completed, Connection
from clusterctl.transport.local import LocalTransport
from tests.support import evil_agent
from tests.support.nodes import local_node

# Seconds for an answer that an honest node gives in milliseconds.
PATIENCE = 40.0
# Nothing ends these but a time-out or the user.
ENDLESS = ("silence_with_beats",)
GENERAL = [
    name
    for name in evil_agent.MODES
    if not name.startswith(("pull_", "want_", "push_")) and name not in ENDLESS
]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lying agent that floods never ends by itself."""
    monkeypatch.setattr(local, "END_LIMIT", 0.5)


def evil(folder: Path, mode: str) -> Path:
    """A program that an inventory can name as a node's python."""
    path = folder / f"evil-{mode}"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {evil_agent.__file__} {mode} "$@"\n')
    path.chmod(0o755)
    return path


def answered(folder: Path, mode: str, ask: Callable[[Connection], object]) -> object:
    """What comes of asking a lying node: a value or an error in words; anything else, or nothing, fails."""
    said: list[object] = []

    def work() -> None:
        link = None
        try:
            link = LocalTransport(home=folder).connect(local_node(folder, python=str(evil(folder, mode))))
            said.append(ask(link))
        except ClusterctlError as error:
            said.append(error)
        except BaseException as bug:
            said.append(bug)
            raise
        finally:
            if link is not None:
                link.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "no answer"
    result = said[0]
    assert not isinstance(result, BaseException) or isinstance(result, ClusterctlError), repr(result)
    if isinstance(result, ClusterctlError):
        assert result.message.strip() and len(result.message) < 5000
    return result


@pytest.mark.parametrize("mode", GENERAL)
def test_a_command_on_a_lying_node_has_a_result_or_an_error_in_words(tmp_path: Path, mode: str) -> None:
    said = answered(tmp_path, mode, lambda link: link.run(["true"], on_output=lambda stream, data: None))
    if isinstance(said, Completed):
        assert type(said.exit_code) in (int, type(None)) and 0 <= said.code < 256
    assert isinstance(said, (Completed, ClusterctlError))


def test_a_node_that_only_beats_does_not_hold_a_command_beyond_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.transport.link.LATE", 1.0)
    said = answered(tmp_path, "silence_with_beats", lambda there: there.run(["true"], timeout=0.5))
    assert isinstance(said, LinkLost) and "'run' did not end within 1 s of its time-out" in said.message


@pytest.mark.parametrize(
    "mode", [name for name in GENERAL if name.startswith(("end_", "fail_", "credit_", "unknown"))]
)
def test_other_operations_on_a_lying_node_have_a_result_or_an_error_in_words(
    tmp_path: Path, mode: str
) -> None:
    answered(tmp_path, mode, lambda link: link.hello())
    answered(tmp_path, mode, lambda link: link.put("~/x", b"data"))
    answered(tmp_path, mode, lambda link: link.get("~/x"))


def listing(folder: Path) -> dict[str, str]:
    """Everything below a folder, links as such, with what files hold."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found


def inventory_of(folder: Path, modes: list[str]) -> Path:
    """An inventory with one honest node and one lying node a mode, all on this machine."""
    nodes: dict[str, object] = {
        "honest": {"host": "local", "address": "127.0.0.1", "workdir": str(folder / "w")}
    }
    for number, mode in enumerate(modes):
        nodes[mode.replace("_", "-")] = {
            "host": "local", "port": number + 100, "address": f"127.0.1.{number + 1}",
            "python": str(evil(folder, mode)),
        }  # fmt: skip
    path = folder / "cluster.yaml"
    path.write_text(json.dumps({"nodes": nodes}))
    return path


RESTRAINED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
from clusterctl.transport import local
local.END_LIMIT = 0.5
from clusterctl.cli.main import main
sys.argv = ["clusterctl", *sys.argv[2:]]
main()
"""


def shell(folder: Path, *words: str, memory: int = 3 << 30) -> subprocess.CompletedProcess[str]:
    """The command line with its address space held to a size."""
    env = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "COLUMNS": "200", "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]), "LANG": "C.UTF-8",
        "EVIL_TARGET": str(folder / "outside" / "absolute"),
    }  # fmt: skip
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", RESTRAINED, str(memory), *words],
        cwd=folder / "here", env=env, capture_output=True, timeout=100, text=True, errors="surrogateescape",
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def harmless(text: str) -> None:
    """Nothing in it that a terminal obeys."""
    for line in text.split("\n"):
        assert escape_controls(line) == line, ascii(line)


def told_in_words(done: subprocess.CompletedProcess[str], modes: list[str]) -> None:
    assert done.returncode in (0, 3, 4) and "Traceback" not in done.stderr, done.stderr[-3000:]
    harmless(done.stdout)
    harmless(done.stderr)
    for mode in modes:
        # Nodes with the same failure share a line.
        told = rf"^(error: )?([\w-]+,)*{mode.replace('_', '-')}(,[\w-]+)*: "
        assert re.search(told, done.stderr, re.MULTILINE), (mode, done.stderr[-3000:])


PULLS = [name for name in evil_agent.MODES if name.startswith("pull_")]
# May come out well: nothing in them does harm.
FAIR_PULLS = ["pull_more_than_promised", "pull_never_ready"]


def test_a_pull_from_lying_nodes_writes_only_below_its_place(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "outside").mkdir()
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("right")
    slow = ["pull_manifest_without_end", "pull_manifest_of_many_small_values"]
    cluster = inventory_of(tmp_path, [mode for mode in PULLS if mode not in slow])
    before = {
        name: held for name, held in listing(tmp_path).items() if not name.startswith(("here", "w/", "tmp"))
    }
    done = shell(tmp_path, "pull", "-c", str(cluster), str(source), "back")
    told_in_words(done, [mode for mode in PULLS if mode not in (*slow, *FAIR_PULLS)])
    after = {
        name: held for name, held in listing(tmp_path).items() if not name.startswith(("here", "w/", "tmp"))
    }
    assert {name: held for name, held in after.items() if name != "w"} == before
    assert {name.split("/")[0] for name in listing(tmp_path / "here")} == {"back"}
    assert (tmp_path / "here" / "back" / "honest" / "source" / "file").read_text() == "right"
    kept = listing(tmp_path / "here" / "back")
    assert not [name for name in kept if "escaped" in name or ".incoming" in name]
    assert not os.path.exists("/tmp/evil-absolute")


@pytest.mark.parametrize("mode", ["pull_manifest_without_end", "pull_manifest_of_many_small_values"])
def test_a_manifest_that_does_not_end_or_unfolds_is_given_up_before_it_fills_the_memory(
    tmp_path: Path, mode: str
) -> None:
    (tmp_path / "here").mkdir()
    cluster = inventory_of(tmp_path, [mode])
    done = shell(tmp_path, "pull", "-c", str(cluster), "-n", mode.replace("_", "-"), "/x", "back")
    told_in_words(done, [mode])
    assert "MemoryError" not in done.stderr


PUSHES = [name for name in evil_agent.MODES if name.startswith(("want_", "push_"))]
FAIR_PUSHES = ["push_path_with_escapes"]


def test_a_push_to_lying_nodes_is_refused_in_words_and_reaches_the_honest_one(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("right")
    cluster = inventory_of(tmp_path, PUSHES)
    done = shell(tmp_path, "push", "-c", str(cluster), str(source), str(tmp_path / "dest"))
    told_in_words(done, [mode for mode in PUSHES if mode not in FAIR_PUSHES])
    assert (tmp_path / "dest" / "file").read_text() == "right"


def test_what_lying_nodes_say_reaches_the_terminal_escaped_and_none_hides_another(tmp_path: Path) -> None:
    modes = ["fail_with_escapes", "greeting_with_escapes", "last_words_with_escapes"]
    (tmp_path / "here").mkdir()
    cluster = inventory_of(tmp_path, modes)
    (tmp_path / "here" / "file").write_text("x")
    done = shell(tmp_path, "push", "-c", str(cluster), "file", str(tmp_path / "dest") + "/")
    told_in_words(done, modes)
    assert "\\x1b[2J" in done.stderr and (tmp_path / "dest" / "file").exists()


@pytest.mark.parametrize(
    "mode", ["empty_frames_without_end", "beyond_the_window", "frames_for_nobody_without_end"]
)
def test_a_flood_does_not_fill_the_memory_while_nobody_reads(tmp_path: Path, mode: str) -> None:
    """The reply is opened and not read: what a push does while it waits to send."""
    code = """
import sys, time
from pathlib import Path
from clusterctl.transport import local
from clusterctl.transport.local import LocalTransport
from tests.support.nodes import local_node
local.END_LIMIT = 0.5
folder = Path(sys.argv[1])
link = LocalTransport(home=folder).connect(local_node(folder, python=sys.argv[2]))
asked = link.open("run", {"argv": ["true"]})
def peak():  # not ru_maxrss, which a process has from the one that started it
    return next(int(one.split()[1]) for one in open("/proc/self/status") if one.startswith("VmHWM"))
before = peak()
deadline = time.monotonic() + 60
while time.monotonic() < deadline and not asked.window._closed:
    time.sleep(0.05)
print((peak() - before) // 1024)
link.close()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(evil(tmp_path, mode)), mode],
        capture_output=True, text=True, timeout=100, cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 150, f"grew by {ran.stdout} MB"


def test_a_node_that_floods_does_not_hold_up_another(tmp_path: Path) -> None:
    honest = local_node(tmp_path)
    liar = replace(honest, name="liar", python=str(evil(tmp_path, "beyond_the_window")))
    link = LocalTransport(home=tmp_path).connect(honest)
    flood = LocalTransport(home=tmp_path).connect(liar)
    flood.open("run", {"argv": ["true"]})
    for _ in range(20):
        assert link.run(["echo", "fine"]).stdout == b"fine\n"
    flood.close()
    link.close()


def test_every_mode_is_played_by_some_test() -> None:
    played = {*GENERAL, *PULLS, *PUSHES, *ENDLESS}
    assert played == set(evil_agent.MODES)
    assert all(re.fullmatch("[a-z_]+", name) for name in played)
