from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.clusterctl.conftest import Run


@pytest.fixture
def run(tmp_path: Path, command_line: Run) -> Run:
    """Over two nodes on this machine and one that can't be reached."""
    lines = ["nodes:"]
    for number in (1, 2):
        place = f"host: local, port: {number}, python: {sys.executable}, workdir: {tmp_path}/work{number}"
        lines.append(f"  node{number}: {{{place}, env: {{NUMBER: '{number}'}}}}")
    lines.append("  node3: {host: 127.0.0.1, port: 9}")
    (tmp_path / "cluster.yaml").write_text("\n".join(lines) + "\n")
    return command_line


def test_exec_prefixes_whole_lines_and_keeps_stderr_apart(run: Run) -> None:
    code, out, err = run("exec", "node[1-2]", "--", "/bin/sh", "-c", "echo out $NUMBER; echo err >&2")
    assert (code, sorted(out.splitlines())) == (0, ["node1: out 1", "node2: out 2"])
    assert sorted(err.splitlines()) == ["node1: err", "node2: err"]


def test_exec_folds_equal_output_and_gives_the_largest_exit_code(run: Run) -> None:
    code, out, err = run("exec", "node[1-2]", "-b", "--shell", "--", "echo same; exit $NUMBER")
    # The same words, but not the same end.
    assert code == 2 and out.count("same") == 2
    assert "node1: exit 1" in err and "node2: exit 2" in err
    _, out, _ = run("exec", "node[1-2]", "-b", "--", "echo", "same")
    assert out == "---------------\nnode[1-2] (2)\n---------------\nsame\n"


def test_exec_names_the_unreachable_node_and_still_gives_the_others_answers(run: Run) -> None:
    code, out, err = run("exec", "all", "--", "echo", "here")
    assert code == 255 and sorted(out.splitlines()) == ["node1: here", "node2: here"]
    assert "node3: nothing listens" in err and "try:" in err


@pytest.mark.parametrize("form", [(), ("-b",), ("--fanout", "5")])
def test_exec_names_all_nodes_with_the_same_reason_in_one_line(
    run: Run, tmp_path: Path, form: tuple[str, ...]
) -> None:
    lines = [
        "nodes:",
        "  node[1-100]: {host: '127.0.0.{n}', port: 9}",
        "  far[1-2]: {host: 'far{n}.invalid'}",
    ]
    (tmp_path / "cluster.yaml").write_text("\n".join(lines) + "\n")
    code, _, err = run("exec", "all", *form, "--", "true")
    assert code == 255
    first, hint, second, last = err.splitlines()
    assert first == "error: node[1-100]: nothing listens at 127.0.0.[1-100] port 9 (100 nodes)"
    assert second.startswith("error: far[1-2]: no address for 'far[1-2].invalid'")
    assert hint.startswith("  try: ") and last.startswith("  try: ")
    code, out, err = run("exec", "all", "--json-lines", "--", "true")
    assert code == 255 and not err and len(out.splitlines()) == 102


def test_a_node_that_fails_is_reported_while_the_command_runs_on_others(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.cli.nodes.execution.QUIET", 0.1)
    late = "test $NUMBER = 1 || exit 0; sleep 1.5; echo now >&2"
    code, _, err = run("exec", "all", "--shell", "--", late)
    assert code == 255 and err.index("error: node3") < err.index("now")


def test_exec_as_json_is_one_document_with_every_node(run: Run) -> None:
    code, out, _ = run("exec", "all", "--json", "--timeout", "0.5", "--", "sleep", "60")
    rows = json.loads(out)
    assert code == 255 and [row["node"] for row in rows] == ["node1", "node2", "node3"]
    assert rows[0]["timed_out"] and rows[2]["kind"] == "Unreachable"


def test_push_and_pull_say_what_moved_and_dry_run_moves_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "code.py").write_text("print()")
    dest = str(tmp_path / "dest")
    code, out, _ = run("push", "src", dest, "-n", "node1", "--dry-run")
    assert code == 0 and "code.py" in out and not Path(dest).exists()
    code, out, _ = run("push", "src", dest, "-n", "node1", "--json")
    assert code == 0 and json.loads(out)[0]["files_sent"] == 1
    assert "unchanged" in run("push", "src", dest, "-n", "node1")[1]
    code, _, _ = run("pull", dest, "home", "-n", "node1")
    assert code == 0 and (tmp_path / "home" / "node1" / "dest" / "code.py").read_text() == "print()"


def test_odd_names_and_files_are_shown_in_one_line_or_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a\nb").write_text("x")
    code, out, _ = run("push", "src", str(tmp_path / "dest"), "-n", "node1", "--dry-run")
    assert code == 0 and out.split() == ["1", "a\\x0ab"]
    os.mkfifo(tmp_path / "pipe")
    code, _, err = run("push", "pipe", str(tmp_path / "dest"), "-n", "node1")
    assert code == 2 and "pipe: neither a file nor a folder" in err


def test_mistakes_end_with_2_and_a_failed_transfer_with_4(run: Run, tmp_path: Path) -> None:
    assert run("exec", "nodd1", "--", "true")[0] == 2
    assert run("push", "missing", "x")[0] == 2
    code, _, err = run("pull", "/not/there", "home", "-n", "node1")
    assert code == 4 and "no /not/there" in err and not (tmp_path / "home").exists()


def test_trust_without_anybody_to_ask_records_nothing(run: Run) -> None:
    code, _, err = run("nodes", "trust", "node3")
    assert code == 3 and "nothing listens" in err


def test_what_this_machine_refuses_is_no_bug_of_ours(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run("exec", "node1", "--out", "file/below", "--", "true")
    assert code == 2 and "--out file/below: Not a directory" in err and "try: " in err
    monkeypatch.setenv("CLUSTERCTL_RUNS", str(tmp_path / "file"))
    code, _, err = run("launch", "--no-code", "-n", "node1", "--", "true")
    assert code == 2 and "cannot keep runs here" in err and "CLUSTERCTL_RUNS" in err
    code, _, err = run("exec", "node1", "--out", "full", "--", "true")
    assert code == 0
    (tmp_path / "full" / "node1.out").unlink()
    (tmp_path / "full" / "node1.out").symlink_to("/dev/full")
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    code, _, err = run("exec", "node1", "--out", "full", "--", "/bin/echo", "x")
    assert code == 1 and "No space left on device" in err and "df -h" in err


def test_a_folder_that_was_removed_under_a_command_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, err = run("nodes")
    assert code == 1 and "is gone" in err and "bug" not in err


def test_an_inventory_named_before_a_noun_that_is_a_command_itself_counts(run: Run) -> None:
    assert run("-c", "other.yaml", "nodes")[0] == 2
    assert run("-c", "cluster.yaml", "nodes")[0] == 0


@pytest.mark.slow
def test_a_plan_tells_faults_of_the_job_of_its_nodes_and_of_its_spares_at_once(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(
        "nam: x\nnodes: node[1-2]\nrestart: {spare_nodes: node7}\ntrain:\n  model: gpt-tiny\n  steps: many\n"
    )
    code, _, err = run("plan", "job.yaml")
    assert code == 2 and "job.yaml:1 nam: unknown key" in err
    assert "job.yaml:3 restart.spare_nodes: node set 'node7'" in err and "try: did you mean" in err
    code, _, err = run("plan", "job.yaml", "--set", "restart.spare_nodes=node3")
    assert code == 2 and "job.yaml:1 nam: unknown key" in err and "job.yaml:6 train.steps" in err
    (tmp_path / "job.yaml").write_text("nodes: node[1-9]\nrestart: {spare_nodes: node1}\ncommand: [true]\n")
    code, _, err = run("plan", "job.yaml")
    assert code == 2 and "job.yaml:1 nodes: node set 'node[1-9]'" in err
    code, _, err = run("plan", "job.yaml", "--nodes", "node[1-2]")
    assert (
        code == 2 and "job.yaml:2 restart.spare_nodes: node1: nodes of the run cannot be spare nodes" in err
    )
    assert run("plan", "job.yaml", "--nodes", "node2")[0] == 0


def test_a_pull_to_where_no_folder_can_be_is_told_once_before_any_node_is_asked(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run("pull", "/etc/hostname", "file/below")
    assert code == 2 and err.count("is not a folder") == 1 and "node" not in err
