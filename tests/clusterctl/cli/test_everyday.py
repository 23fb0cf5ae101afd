"""What users of kubectl, docker, pdsh and git type, and hints that can be pasted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl import __version__
from clusterctl.cli import choices, screen
from clusterctl.cli.everyday import ssh_argv
from clusterctl.cli.nodes import doctor
from clusterctl.errors import UsageError
from clusterctl.finding import Finding
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job as jobs
from clusterctl.jobs.program_files import missing_script
from clusterctl.settings import load_settings, project_folder
from tests.clusterctl.conftest import Run
from tests.support.run_folders import restarted_run

INVENTORY = "name: lab\nnodes: {node1: {}, node2: {}}\n"


def test_version_and_help_are_commands_too(command_line: Run) -> None:
    assert command_line("version")[:2] == (0, f"clusterctl {__version__}\n")
    assert command_line("help", "ranktable", "merge")[1] == command_line("ranktable", "merge", "--help")[1]
    assert "Results" in command_line("help")[1]


def test_a_missing_double_dash_is_explained_with_the_line_to_type(command_line: Run) -> None:
    _, _, err = command_line("exec", "-c", "a b.yaml", "all", "uname", "-n")
    assert "clusterctl exec -c 'a b.yaml' all -- uname -n" in err
    code, _, err = command_line("exec", "all", "uname", "-n")
    assert code == 2 and "clusterctl exec all -- uname -n" in err
    code, _, err = command_line("launch", "python", "train.py", "--lr", "1")
    assert code == 2 and "clusterctl launch -- python train.py --lr 1" in err
    code, _, err = command_line("doctor", "--nope")
    assert code == 2 and "--nope" in err and "--" in err


def test_exec_takes_its_nodes_as_pdsh_and_other_commands_do(tmp_path: Path, command_line: Run) -> None:
    (tmp_path / "cluster.yaml").write_text(INVENTORY)
    expected = command_line("exec", "node1", "--dry-run", "--", "true")
    assert expected[0] == 0 and "node1" in expected[1]
    for option in ("-n", "-w", "--nodes"):
        assert command_line("exec", option, "node1", "--dry-run", "--", "true")[:2] == expected[:2]
        words = (
            "exec",
            "-c",
            "cluster.yaml",
            "--fold",
            option,
            "node1",
            "--dry-run",
            "--",
            "true",
            "-n",
            "1",
        )
        code, out, _ = command_line(*words)
        assert code == 0 and "true -n 1" in out and "node2" not in out


def test_logs_of_a_run_need_no_second_verb(tmp_path: Path, command_line: Run) -> None:
    run = restarted_run(tmp_path / "runs")
    log = run.log("node1", 0, "out", 2)
    log.parent.mkdir(parents=True)
    log.write_text("a line\n")
    assert command_line("logs", "last")[:2] == command_line("logs", "show", "last")[:2]
    assert "a line" in command_line("logs", "last", "--no-prefix")[1]


def test_ssh_is_called_with_the_recorded_host_keys(tmp_path: Path, command_line: Run) -> None:
    node = Node("n1", "h1", "10.0.0.1", port=2222, user="ann", key="/k", gateway="bob@gate")
    argv = ssh_argv(Cluster("c", (node,), known_hosts="/kh"), node, [])
    assert argv[:7] == ["ssh", "-p", "2222", "-l", "ann", "-i", "/k"] and argv[-2:] == ["-t", "h1"]
    assert "StrictHostKeyChecking=yes" in argv and "-J" in argv
    (tmp_path / "cluster.yaml").write_text(INVENTORY)
    assert command_line("ssh", "node1", "--dry-run", "--", "uname", "-n")[1] == "ssh -p 22 node1 uname -n\n"
    assert command_line("ssh", "node[1-2]", "--dry-run")[0] == 2


def test_hints_name_the_inventory_of_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "_inventory", [])
    screen.error_console.cache_clear()
    error = UsageError("wrong", "clusterctl nodes trust\nclusterctl doctor -c x\nclusterctl status last")
    screen.report_error(error)
    assert "clusterctl nodes trust" in capfd.readouterr().err
    file = tmp_path / "my cluster.yaml"
    file.write_text(INVENTORY)
    choices.cluster_of(file)
    screen.report_error(error)
    hints = capfd.readouterr().err
    assert f"clusterctl -c '{file}' nodes trust" in hints.replace("\n", "")
    assert "clusterctl doctor -c x" in hints and "clusterctl status last" in hints


def test_inventory_and_runs_are_found_from_a_folder_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    below = tmp_path / "project" / "src" / "deep"
    below.mkdir(parents=True)
    assert project_folder(below) == below and load_settings(below).cluster == "cluster.yaml"
    (tmp_path / "project" / "cluster.yaml").write_text(INVENTORY)
    settings = load_settings(below)
    assert settings.cluster == str(tmp_path / "project" / "cluster.yaml")
    assert settings.runs == str(tmp_path / "project" / "runs")
    (below / "runs").mkdir()
    assert load_settings(below).runs == "runs", "runs that are here stay here"
    (below.parent / ".git").mkdir()
    assert project_folder(below) == below, "another repository is another project"


def test_a_script_that_is_not_there_is_reported_before_the_start(tmp_path: Path, command_line: Run) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "cluster.yaml").write_text(INVENTORY)
    code, _, err = command_line("plan", "--", "python", "-u", "trian.py", "--lr", "1")
    assert code == 2 and "trian.py: no such file" in err and "did you mean 'train.py'?" in err
    for command in (
        ["python", "train.py"],
        ["python", "-m", "x.py"],
        ["python", "{data}/t.py"],
        ["./a.py"],
        ["python", "/x.py"],
    ):
        assert missing_script(command, tmp_path) is None
    assert missing_script(["torchrun", "--nnodes", "2", "nosuch.py"], tmp_path) is not None
    assert missing_script(["python", "nosuch.py"], None) is None
    (tmp_path / "j.yaml").write_text("name: j\ncommand: [python, train.py]\n")
    code, _, err = command_line("plan", "j.yaml")
    assert code == 2 and "train.py is here, but no folder is pushed" in err and "add `code: .`" in err
    (tmp_path / "j.yaml").write_text("name: j\ncode: .\ncommand: [python, train.py]\n")
    assert command_line("plan", "j.yaml")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_runs_and_nodes(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "cluster.yaml").write_text(INVENTORY)
    restarted_run(tmp_path / "runs")
    program = tmp_path / "bin" / "clusterctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m clusterctl "$@"\n')
    program.chmod(0o755)
    root = str(Path(__file__).resolve().parents[3])
    env = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": root,
        "HOME": str(tmp_path),
    }
    assert "tiny-1122-100000-abcd" in completions(shell, "clusterctl status ti", env, tmp_path)
    assert "node1" in completions(shell, "clusterctl ssh no", env, tmp_path)
    assert "compare" in completions(shell, "clusterctl com", env, tmp_path)
    assert "npu" in completions(shell, "clusterctl nodes --kind n", env, tmp_path)
    assert "mindspore" in completions(shell, "clusterctl checkpoint export last --to m", env, tmp_path)


def completions(shell: str, line: str, env: dict[str, str], folder: Path) -> str:
    """Return what a shell offers for a line, through the function that `--install-completion` gives it."""
    words = line.split()
    if shell == "bash":
        script = (
            'eval "$(clusterctl --show-completion bash)"; '
            f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
            'complete -p clusterctl >/dev/null; _clusterctl_completion clusterctl; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        argv = ["bash", "-c", script]
    elif shell == "fish":
        argv = ["fish", "-c", f"clusterctl --show-completion fish | source; complete -C '{line}'"]
    else:
        env = {**env, "_CLUSTERCTL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
        argv = ["zsh", "-c", "clusterctl"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=folder, timeout=60)
    return done.stdout + done.stderr


def test_init_writes_a_job_that_the_planner_understands(tmp_path: Path, command_line: Run) -> None:
    (tmp_path / "cluster.yaml").write_text("nodes:\n  node[1-2]: {devices: 2, kind: cpu}\n")
    code, _, err = command_line("init", "--job", "train")
    assert code == 0 and "clusterctl plan train.yaml" in err
    text = (tmp_path / "train.yaml").read_text()
    assert "global_batch: 16" in text and "precision: fp32" in text
    assert "--output data/corpus_text_document" in text and '"{data}/corpus_text_document"' in text
    (tmp_path / "data").mkdir()
    job = jobs.load(tmp_path / "train.yaml")
    assert job.name == "train" and job.train and job.data == tmp_path / "data"
    assert command_line("init", "--job", "a b")[0] == 2
    (tmp_path / "train.yaml").write_text("mine")
    assert command_line("init", "--job", "train")[0] == 2 and (tmp_path / "train.yaml").read_text() == "mine"


def test_a_closed_standard_output_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    script = f"exec {sys.executable} -m clusterctl nodes expand node1 >&-"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run(["/bin/sh", "-c", script], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "standard output is closed" in done.stderr and "try: " in done.stderr


def test_job_files_and_folders_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clusterctl.cli.options import complete_jobs

    monkeypatch.chdir(tmp_path)
    for name in ("job.yaml", "joke.txt", "jobs/deep.yml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert complete_jobs("jo") == ["job.yaml", "jobs"]
    assert complete_jobs("jobs/") == ["jobs/deep.yml"]
    assert complete_jobs("none/x") == []


def test_a_dry_run_names_what_is_pushed(tmp_path: Path, command_line: Run) -> None:
    (tmp_path / "cluster.yaml").write_text("nodes: {'node[1-2]': {host: '10.0.0.{n}', devices: 1}}\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "p.py").write_text("print(1)\n")
    (tmp_path / "job.yaml").write_text("command: [python, p.py]\ncode: ./code\n")
    code, out, err = command_line("launch", "job.yaml", "--dry-run")
    assert code == 0, err
    assert f"pushes code {tmp_path / 'code'} (1 file, 9 B) to 2 nodes, unless they have it" in out


def test_nodes_that_fail_alike_give_one_hint(capsys: pytest.CaptureFixture[str]) -> None:
    screen.error_console.cache_clear()
    given = set[str]()
    for node in ("node1", "node2"):
        screen.report_error(UsageError(f"{node}: no route", "check the cable"), given)
    screen.report_error(UsageError("node3: refused", "start sshd"), given)
    shown = capsys.readouterr().err.splitlines()
    assert shown == [
        "error: node1: no route",
        "  try: check the cable",
        "error: node2: no route",
        "error: node3: refused",
        "  try: start sshd",
    ]


def test_init_says_that_it_assumes_the_kind_of_devices(tmp_path: Path, command_line: Run) -> None:
    (tmp_path / "cluster.yaml").unlink(missing_ok=True)
    (tmp_path / "hostfile").write_text("10.0.0.1 slots=2\n")
    for words in (("--hosts", "a"), ("--hostfile", "hostfile")):
        assert "kind npu is assumed: --ask" in command_line("init", *words, "-o", "c.yaml", "--force")[2]
        assert "assumed" not in command_line("init", *words, "--kind", "npu", "-o", "c.yaml", "--force")[2]


def test_init_takes_kind_and_devices_of_the_inventory_or_of_this_machine(
    tmp_path: Path, command_line: Run
) -> None:
    (tmp_path / "mine.yaml").write_text("nodes: {n1: {host: 10.0.0.9, kind: cuda, devices: 3}}\n")
    for words in (("-c", "mine.yaml", "init"), ("init", "-c", "mine.yaml", "--hosts", "a")):
        code, out, err = command_line(*words, "--dry-run")
        assert (code, err) == (0, "") and "  devices: 3 " in out and "  kind: cuda " in out
    assert "  kind: cpu " in command_line("init", "-c", "mine.yaml", "--kind", "cpu", "--dry-run")[1]
    code, out, _ = command_line("-c", "mine.yaml", "init", "--job", "small", "--dry-run")
    assert code == 0 and "  precision: bf16 " in out
    code, out, err = command_line("init", "--hosts", "local", "--dry-run")
    assert code == 0 and "assumed" not in err and err.startswith("local: ")


def test_init_takes_the_kind_of_the_settings(
    tmp_path: Path, command_line: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERCTL_KIND", "cuda")
    (tmp_path / "hostfile").write_text("10.0.0.1 slots=2\n")
    for words in (("--hosts", "a"), ("--hostfile", "hostfile")):
        assert "assumed" not in command_line("init", *words, "-o", "c.yaml", "--force")[2]
        assert "kind: cuda " in (tmp_path / "c.yaml").read_text()
    assert "`address` must be the IP address" in (tmp_path / "c.yaml").read_text()


def test_a_missing_double_dash_keeps_the_inventory_out_of_the_command(
    tmp_path: Path, command_line: Run
) -> None:
    (tmp_path / "mine.yaml").write_text(INVENTORY)
    code, _, err = command_line("exec", "node1", "uname", "-n", "-c", "mine.yaml")
    assert code == 2 and "clusterctl exec -c mine.yaml node1 -- uname -n\n" in err


def test_an_error_of_many_nodes_is_shown_once(tmp_path: Path, command_line: Run) -> None:
    (tmp_path / "cluster.yaml").write_text("defaults: {key: nosuch}\nnodes: {'node[1-300]': {}}\n")
    code, _, err = command_line("nodes")
    assert code == 2 and "nodes.node1.key" in err and "nosuch (also " in err
    assert "nodes.node3.key and 297 more places)" in err
    assert err.count("no identity file") == 1


def test_findings_name_the_inventory_and_show_a_common_remedy_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen, "_inventory", ["mine.yaml"])
    screen.out_console.cache_clear()
    findings = [
        Finding("bad", f"node{number}", "its host key is not known", "`clusterctl nodes trust` records it")
        for number in (1, 2)
    ]
    screen.show(doctor.view(findings))
    screen.out_console.cache_clear()
    shown = capsys.readouterr().out
    assert shown.count("try: `clusterctl -c mine.yaml nodes trust` records it") == 1
    assert doctor.fix_command(Finding("bad", "node1", "x", fix="df -h")).startswith(
        "clusterctl -c mine.yaml exec node1"
    )
