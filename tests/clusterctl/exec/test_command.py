from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from clusterctl.cli import main
from clusterctl.errors import InputFaults
from clusterctl.exec.command import Command, FileInput, PipeInput, broadcast
from clusterctl.inventory.cluster import Node
from tests.clusterctl.conftest import Run

NODE = Node(name="node7", host="h", address="10.0.0.7")


@pytest.fixture
def run(tmp_path: Path, command_line: Run) -> Run:
    """`exec` over four nodes on this machine and one that can't be reached."""
    lines = ["nodes:"]
    for number in range(1, 5):
        place = f"host: local, address: 10.0.0.{number}, port: {number}, python: {sys.executable}"
        lines.append(
            f"  node{number}: {{{place}, workdir: {tmp_path}/work{number}, env: {{NUMBER: '{number}'}}}}"
        )
    lines.append("  node9: {host: 127.0.0.1, port: 9}")
    (tmp_path / "cluster.yaml").write_text("\n".join(lines) + "\n")
    return functools.partial(command_line, "exec")


@pytest.fixture
def nothing() -> Iterator[TextIO]:
    """A standard input that is empty."""
    with open(os.devnull) as file:
        yield file


# ---- words and input


def test_each_nodes_own_values_stand_in_the_words_and_every_other_brace_stays() -> None:
    words = (
        "{node}",
        "a{n}b",
        "{address}",
        "{{node}}",
        "{print $1}",
        "${HOME}",
        "{}",
        "{{.Names}}",
        "{other}",
    )
    assert Command(words).on(NODE, 3) == [
        "node7", "a3b", "10.0.0.7", "{node}", "{print $1}", "${HOME}", "{}", "{{.Names}}", "{other}"
    ]  # fmt: skip
    assert Command(words, literal=True).on(NODE, 3) == list(words)
    assert Command(("echo", "{n}"), shell=True).on(NODE, 0) == ["/bin/sh", "-c", "echo 0"]


def test_all_words_that_no_argument_can_hold_are_named_at_once() -> None:
    with pytest.raises(InputFaults) as refused:
        Command(("a", "b\0", "c\0"))
    assert [fault.where for fault in refused.value.faults] == [
        "word 2 of the command",
        "word 3 of the command",
    ]


def test_a_file_is_read_by_each_node_at_its_own_pace(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(os.urandom(1_000_000))
    with path.open("rb") as file:
        file.seek(5)
        os.lseek(file.fileno(), 5, os.SEEK_SET)
        source = broadcast(file.fileno(), ["a", "b"])
        assert isinstance(source, FileInput)
        assert b"".join(source.view("a")) == b"".join(source.view("b")) == path.read_bytes()[5:]


def test_a_pipe_reaches_every_node_whole_and_is_never_held_whole() -> None:
    reading, writing = os.pipe()
    sent = os.urandom(8 << 20)

    def write() -> None:
        with open(writing, "wb") as file:
            file.write(sent)

    source = PipeInput(reading, ["fast", "slow"])
    threading.Thread(target=write, daemon=True).start()
    fast = source.view("fast")
    ahead = b"".join(itertools.islice(fast, 2))
    assert max(len(queue) for queue in source._queues.values()) <= 9
    rest: list[bytes] = []
    thread = threading.Thread(target=lambda: rest.extend(fast), daemon=True)
    thread.start()
    assert b"".join(source.view("slow")) == sent
    thread.join(30)
    assert ahead + b"".join(rest) == sent
    os.close(reading)


def test_nobody_waits_for_a_node_that_takes_no_more() -> None:
    reading, writing = os.pipe()
    source = PipeInput(reading, ["here", "gone"])
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.extend(source.view("here")), daemon=True)
    thread.start()
    threading.Thread(
        target=lambda: os.write(writing, b"x" * 4_000_000) and os.close(writing), daemon=True
    ).start()
    source.leave("gone")
    thread.join(30)
    assert sum(map(len, got)) == 4_000_000
    os.close(reading)


# ---- what users see


def test_values_reach_each_node(run: Run) -> None:
    code, out, _ = run("node[2-3]", "--", "printf", "%s ", "{node}", "{n}", "{address}", "{{n}}")
    assert code == 0
    assert sorted(out.splitlines()) == ["node2: node2 0 10.0.0.2 {n} ", "node3: node3 1 10.0.0.3 {n} "]


def test_differences_and_folds_tell_the_ends_too(run: Run) -> None:
    script = "echo same; [ $NUMBER != 3 ] || { echo other; exit 4; }"
    code, out, _ = run("node[1-4]", "--diff", "--shell", "--", script)
    assert code == 4
    assert out.splitlines()[:2] == ["--- node[1-2,4] (3)", "+++ node3 (1): exit 4"] and "+other" in out
    code, out, _ = run("node[1-4]", "-b", "--shell", "--", script)
    assert "node[1-2,4] (3)\n" in out and "node3 (1): exit 4\n" in out and out.count("same") == 2
    code, out, err = run("node[1-4]", "--diff", "--", "echo", "same")
    assert (code, out) == (0, "") and "the output is the same" in err


def test_json_lines_come_with_every_end(run: Run) -> None:
    code, out, err = run("node1,node9", "--json-lines", "--", "echo", "hi")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 255 and err == ""
    assert {"node": "node1", "stream": "stdout", "text": "hi"} in rows
    assert {row["node"]: row.get("exit_code") for row in rows if "stream" not in row} == {
        "node1": 0,
        "node9": None,
    }


def test_a_folder_of_answers_is_byte_exact(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(
        "node[1-2],node9", "--out", "said", "--shell", "--", r"printf '\033[2J\377'; echo $NUMBER >&2"
    )
    assert (code, out) == (255, "")
    found = {path.name: path.read_bytes() for path in (tmp_path / "said").iterdir()}
    raw = b"\x1b[2J\xff"
    assert found == {"node1.out": raw, "node1.err": b"1\n", "node2.out": raw, "node2.err": b"2\n"}


def test_a_dry_run_shows_each_command_and_asks_no_node(run: Run) -> None:
    code, out, _ = run("node1,node9", "--dry-run", "--", "echo", "a b", "\x1b[2J")
    assert (code, out) == (0, "node[1,9]: echo 'a b' '\\x1b[2J'\n")
    code, out, _ = run("node1,node9", "--dry-run", "--json", "--", "echo", "{node}")
    assert code == 0 and [row["argv"][1] for row in json.loads(out)] == ["node1", "node9"]


def test_forms_that_exclude_each_other_are_refused(run: Run) -> None:
    code, _, err = run("node1", "--json", "--fold", "--diff", "--", "true")
    assert code == 2 and "--fold and --diff and --json" in err and "try:" in err
    assert run("node1", "--against", "node2", "--", "true")[0] == 2


def test_the_inventory_may_be_named_before_the_verb(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").rename(tmp_path / "other.yaml")
    assert run("node2", "--", "true")[0] == 2
    assert main.run(["-c", "other.yaml", "exec", "node2", "--", "echo", "here"]) == 0
    assert main.run(["--hostfile", "other.yaml", "nodes", "list", "-n", "node3"]) == 0
    out = capfd.readouterr().out
    assert "node2: here" in out and "node3" in out and "node1" not in out


def test_input_reaches_every_node(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_text("line\n" * 50_000)
    with (tmp_path / "in").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        code, out, _ = run("node[1-2],node9", "--stdin", "--connect-timeout", "2", "--", "wc", "-l")
    assert code == 255 and sorted(out.split()) == ["50000", "50000", "node1:", "node2:"]


@pytest.mark.parametrize("stdin", [(), ("--stdin",)], ids=["light", "agent"])
def test_both_ways_to_run_a_command_look_the_same(
    run: Run, stdin: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing: TextIO
) -> None:
    # With no first line that names an interpreter, as execvp takes it.
    script = tmp_path / "script"
    script.write_text("echo ran $1\n")
    script.chmod(0o755)
    plain = tmp_path / "plain"
    plain.write_text("")
    cases = {
        ("printf", "%s|", "a b", "", "'", "$(x)", "\n"): (0, "node1: a b||'|$(x)|\nnode1: |\n"),
        ("/bin/sh", "-c", "exit 7"): (7, ""),
        ("/bin/sh", "-c", "kill -TERM $$"): (143, ""),
        ("/bin/sh", "-c", "echo $NUMBER $CLUSTERCTL_EXEC | wc -w; pwd"): (
            0,
            f"node1: 2\nnode1: {Path.home()}\n",
        ),
        ("no-such-program",): (127, ""),
        (str(plain),): (126, ""),
        ("/",): (126, ""),
        (f"{plain}/below",): (127, ""),
        (str(script), "it"): (0, "node1: ran it\n"),
        ("/bin/sh", "-c", "sleep 3 & echo left"): (0, "node1: left\n"),
        ("/bin/sh", "-c", "ulimit -c; trap"): (0, None),
    }
    monkeypatch.setattr(sys, "stdin", nothing)
    for argv, (code, out) in cases.items():
        done = run("node1", *stdin, "--", *argv)
        assert done[0] == code and (out is None or done[1] == out), (argv, done)
        assert bool(done[2]) == (code != 0)
    done = run("node1", *stdin, "--timeout", "0.3", "--", "sleep", "600")
    assert done[0] == 124 and "ended by its time-out" in done[2]
