"""The command line as users meet it, on real SSH nodes: what it prints, what it refuses, what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.live.conftest import Shell

pytestmark = pytest.mark.live


def refused(done: subprocess.CompletedProcess[str], code: int, *says: str) -> None:
    """An error in words, with a remedy, the right exit code and no traceback."""
    assert done.returncode == code, done.stderr
    for part in says:
        assert part in done.stderr, done.stderr
    # Of ours; a program of the user's may show its own.
    assert not re.search(r"^Traceback", done.stderr, re.MULTILINE)
    assert "try: " in done.stderr


def write(shell: Shell, name: str, text: str) -> Path:
    path = shell.folder / name
    path.write_text(text)
    return path


def test_a_command_runs_on_every_device_and_its_end_is_told(shell: Shell) -> None:
    code = "import os; print('rank', os.environ['RANK'], os.environ['CLUSTERCTL_NODE'])"
    done = shell("launch", "--no-code", "--", "python3", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "node1:0 rank 0 node1\n"
    shown = shell("logs", "show", "last", "--rank", "0-3", "--no-prefix")
    ranks = ["rank 0 node1", "rank 1 node1", "rank 2 node2", "rank 3 node2"]
    # Lines of different ranks are in the order of their times.
    assert sorted(shown.stdout.splitlines()) == ranks
    state = json.loads(shell("status", "--json").stdout)
    assert (state["phase"], [rank["exit_code"] for rank in state["ranks"]]) == ("finished", [0] * 4)


def test_a_rank_that_dies_ends_the_run_with_its_cause_last(shell: Shell) -> None:
    code = """
import os, sys, time
print("step 1", flush=True)
if os.environ["RANK"] == "2":
    raise ValueError("step 3 went wrong")
time.sleep(600)
"""
    done = shell("launch", "--no-code", "--", "python3", "-c", code)
    refused(
        done, 5, "root cause: rank 2 on node2 (device 0) exited with code 1", "ValueError: step 3 went wrong"
    )
    assert done.stderr.rstrip().splitlines()[-2].startswith("error: root cause")
    run = json.loads(shell("runs", "--json").stdout)[0]
    assert run["phase"] == "failed"
    assert "step 1" in (Path(run["folder"]) / "attempts/1/logs/node2/rank-2.out").read_text()
    errors = shell("logs", "show", "--errors").stdout
    assert "node2:2 ValueError: step 3 went wrong" in errors


def test_a_detached_run_goes_on_and_is_followed_and_stopped_from_elsewhere(shell: Shell) -> None:
    code = "import time\nfor n in range(6000):\n    print(n, flush=True)\n    time.sleep(0.1)"
    done = shell("launch", "--detach", "-n", "node1", "--no-code", "--", "python3", "-c", code)
    assert done.returncode == 0, done.stderr
    run = done.stdout.strip()
    time.sleep(1.0)
    assert "running" in shell("status", run).stdout
    assert re.search(r"^node1:0 \d+$", shell("logs", "tail", run).stdout, re.MULTILINE)
    # Its record is cut: the error has the command that brings it back.
    os.truncate(shell.folder / "runs" / run / "run.json", 100)
    refusal = shell("stop", run)
    refused(refusal, 2, "run.json: unreadable", "has the same content")
    subprocess.run(refusal.stderr.split("`")[1], shell=True, check=True)
    stopped = shell("stop", run)
    assert stopped.returncode == 0
    assert "0 processes left" in stopped.stderr
    assert json.loads(shell("status", "--json", run).stdout)["phase"] == "stopped"


def test_ctrl_c_stops_the_run_and_leaves_nothing(shell: Shell) -> None:
    argv = [sys.executable, "-m", "clusterctl", "launch", "--no-code", "--", "sleep", "600"]
    process = subprocess.Popen(argv, cwd=shell.folder, env=shell.env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while "start " not in said:
        said += process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130, rest
    assert "stopping sleep-" in rest
    assert "0 processes left" in rest
    run = json.loads(shell("runs", "--json").stdout)[0]
    assert run["phase"] == "stopped"
    assert not marked(run["run"])


def test_a_closed_terminal_ends_the_watching_and_not_the_run(shell: Shell) -> None:
    code = "import time\nfor n in range(25):\n    print(n, flush=True)\n    time.sleep(0.3)"
    argv = [sys.executable, "-m", "clusterctl", "launch", "--no-code", "--", "python3", "-c", code]
    process = subprocess.Popen(argv, cwd=shell.folder, env=shell.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "node1:0 0\n"
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 129
    run = json.loads(shell("runs", "--json").stdout)[0]
    assert marked(run["run"])
    deadline = time.monotonic() + 30
    while json.loads(shell("runs", "--json").stdout)[0]["phase"] != "finished":
        assert time.monotonic() < deadline
        time.sleep(0.3)
    kept = Path(run["folder"]) / "attempts/1/logs/node2/rank-3.out"
    assert kept.read_text().split() == [str(n) for n in range(25)]


def marked(run: str) -> list[str]:
    mark = f"CLUSTERCTL_RUN_ID={run}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_the_dry_run_starts_nothing_and_shows_the_words(shell: Shell) -> None:
    done = shell("launch", "--dry-run", "--no-code", "--", "python3", "-c", "print('a b')")
    assert done.returncode == 0
    assert "-c 'print('\"'\"'a b'\"'\"')'" in done.stdout
    assert not (shell.folder / "runs").exists()


# -- bad input at every door -------------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_its_line_and_near_miss(shell: Shell) -> None:
    write(shell, "job.yaml", "name: x\ncomand: [a]\ncommand: [b]\n")
    refused(
        shell("plan", "job.yaml"), 2, "job.yaml:2 comand: unknown key 'comand'", "did you mean 'command'?"
    )


def test_faults_of_the_train_part_have_their_lines_and_come_all_at_once(shell: Shell) -> None:
    write(
        shell,
        "job.yaml",
        "train:\n  model: gpt-tini\n  steps: -3\n  stpes: 4\n  micro_batch: 3\n  global_batch: 32\n",
    )
    done = shell("plan", "job.yaml")
    refused(done, 2, "job.yaml:2 train.model", "job.yaml:3 train.steps", "job.yaml:4 train.stpes", "steps")


def test_a_missing_file_is_named(shell: Shell) -> None:
    refused(shell("launch", "nowhere.yaml"), 2, "nowhere.yaml: no such file")
    refused(shell("nodes", "-c", "nowhere.yaml"), 2, "nowhere.yaml: no such file")
    refused(shell("status", "last"), 2, "no runs in")


def test_more_devices_than_there_are_is_refused_before_anything_starts(shell: Shell) -> None:
    done = shell("launch", "--devices", "[0,8)", "--no-code", "--", "true")
    refused(done, 2, "node[1-2] have no device 2, 3, 4, 5, 6, 7; they have 0, 1")
    refused(
        shell("launch", "--devices", "[0,4]", "--no-code", "--", "true"),
        2,
        "read differently by different tools",
    )


def test_an_unknown_node_is_an_error_with_near_misses(shell: Shell) -> None:
    refused(shell("exec", "nod1", "--", "true"), 2, "nod1", "node1")


def test_a_node_that_does_not_answer_is_named_and_the_others_are_not_touched(
    shell: Shell, cluster_file: Path
) -> None:
    text = cluster_file.read_text().replace("./", f"{cluster_file.parent}/")
    broken = re.sub(r'(node2:.*?"port": )\d+', r"\g<1>9", text, count=1, flags=re.DOTALL)
    assert broken != text
    write(shell, "broken.yaml", broken)
    done = shell("launch", "-c", "broken.yaml", "--no-code", "--", "true")
    refused(done, 3, "node2: ")
    assert "node1: " not in done.stderr


def test_a_wrong_key_is_refused_once_and_in_words(shell: Shell, cluster_file: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(shell.folder / "wrong")], check=True
    )
    text = cluster_file.read_text().replace("./", f"{cluster_file.parent}/")
    write(shell, "wrong.yaml", re.sub(r'"key": "[^"]+"', f'"key": "{shell.folder}/wrong"', text))
    done = shell("exec", "-c", "wrong.yaml", "node1", "--", "true")
    assert done.returncode == 255
    assert "node1: " in done.stderr
    assert "key" in done.stderr
    # Of ours; a program of the user's may show its own.
    assert not re.search(r"^Traceback", done.stderr, re.MULTILINE)
    refused(shell("launch", "-c", "wrong.yaml", "-n", "node1", "--no-code", "--", "true"), 3, "node1: ")


def test_a_changed_host_key_is_refused_with_both_fingerprints(shell: Shell, cluster_file: Path) -> None:
    text = cluster_file.read_text().replace("./", f"{cluster_file.parent}/")
    kept = (cluster_file.parent / "known_hosts").read_text().splitlines()
    hosts, keys = [line.split(None, 1)[0] for line in kept], [line.split(None, 1)[1] for line in kept]
    swapped = "".join(f"{host} {key}\n" for host, key in zip(hosts, reversed(keys), strict=True))
    write(shell, "swapped_hosts", swapped)
    write(shell, "changed.yaml", re.sub(r"known_hosts: \S+", "known_hosts: ./swapped_hosts", text))
    done = shell("launch", "-c", "changed.yaml", "--no-code", "--", "true")
    refused(done, 3, "node1: ", "node2: ", "SHA256:")
    assert done.stderr.count("SHA256:") >= 4


def test_bad_settings_and_a_damaged_run_are_told(shell: Shell) -> None:
    refused(shell("nodes", CLUSTERCTL_FANOUT="many"), 2, "CLUSTERCTL_FANOUT", "'many'")
    write(shell, "clusterctl.yaml", "fanuot: 3\n")
    refused(shell("nodes"), 2, "clusterctl.yaml:1 fanuot", "did you mean 'fanout'?")
    os.unlink(shell.folder / "clusterctl.yaml")
    folder = shell.folder / "runs" / "r-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{ half")
    refused(shell("status", "r-1"), 2, "run.json: unreadable")


def test_help_version_and_a_wrong_verb(shell: Shell) -> None:
    assert shell("--version").stdout.startswith("clusterctl 0.")
    assert "launch" in shell("--help").stdout
    wrong = shell("lunch")
    assert wrong.returncode == 2
    assert "launch" in wrong.stderr
