"""Ranks in containers on real SSH nodes, with a runtime that really runs them and keeps a list of containers."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from clusterctl.jobs.run_folder import RunDir
from tests.live.conftest import Shell
from tests.support import runtime

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

POLITE = """
import os, signal, sys, time
def end(*_):
    # The client passes on the signal that the process also got itself; exiting, Python would die of a second one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("saved after SIGTERM", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("rank", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["IN_IMAGE"], os.environ["SECRET"], flush=True)
open(os.path.join(os.environ["CLUSTERCTL_RUN_DIR"], "ready"), "w").close()
while {waits}: time.sleep(0.05)
"""


NAME = "--name=clusterctl-contained"


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    """The program of a runtime that has the image team/train:1."""
    folder = tmp_path / "runtime"
    (folder / "images").mkdir(parents=True)
    (folder / "containers").mkdir()
    (folder / "images" / "team_train:1").write_text("sha256:1")
    program = folder / "docker"
    program.write_text(Path(runtime.__file__).read_text().replace("/usr/bin/env python3", sys.executable))
    program.chmod(0o755)
    return program


def job_file(shell: Shell, docker: Path, *, waits: bool, image: str = "team/train:1") -> str:
    (shell.folder / "code").mkdir(exist_ok=True)
    (shell.folder / "code" / "polite.py").write_text(POLITE.format(waits=waits))
    (shell.folder / "job.yaml").write_text(
        f"name: contained\ncommand: [python, polite.py]\ncode: code\nforward: [SECRET]\n"
        f"container: {{image: '{image}', runtime: {docker}, python: {sys.executable}}}\n"
    )
    return "job.yaml"


def log_of(docker: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (docker.parent / "log").read_text().splitlines()]


def started(shell: Shell, count: int) -> RunDir:
    """Return the run once the ranks of so many nodes can take a signal."""
    run = RunDir(Path(json.loads(shell("runs", "--json").stdout)[0]["folder"]))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        folders = [Path(folder) for folder in run.read_record().run_dirs.values()]
        if len(folders) == count and all((folder / "ready").exists() for folder in folders):
            break
        time.sleep(0.1)
    return run


def test_ranks_run_in_containers_and_get_their_variables_by_name(shell: Shell, docker: Path) -> None:
    done = shell("launch", job_file(shell, docker, waits=False), "--devices", "1", SECRET="hidden")
    assert done.returncode == 0, done.stderr
    assert "rank 0 2 yes hidden" in done.stdout
    entries = log_of(docker)
    ranks = [entry for entry in entries if NAME in json.dumps(entry["options"])]
    # The others looked for the needed parts before the start.
    assert len(ranks) == 2 and len(entries) == 4
    for entry in ranks:
        options = entry["options"]
        assert isinstance(options, list)
        assert {"--rm", "--init", "--network=host", "--ipc=host", "--env=SECRET", "--env=MASTER_ADDR"} <= set(
            options
        )
        assert "hidden" not in json.dumps(entry)
    assert runtime.living(docker.parent) == []


def test_stop_reaches_the_ranks_and_leaves_no_container(shell: Shell, docker: Path) -> None:
    done = shell("launch", job_file(shell, docker, waits=True), "--devices", "1", "--detach", SECRET="x")
    assert done.returncode == 0, done.stderr
    run = started(shell, 2)
    stopped = shell("stop", run.run_id)
    assert stopped.returncode == 0, stopped.stderr
    assert runtime.living(docker.parent) == []
    assert "saved after SIGTERM" in shell("logs", "show", run.run_id).stdout
    # Both took the signal and ended by themselves.
    assert [entry["code"] for entry in log_of(docker) if NAME in json.dumps(entry["options"])] == [0, 0]


def test_stop_removes_containers_whose_supervisor_and_client_were_killed(shell: Shell, docker: Path) -> None:
    text = (shell.folder / job_file(shell, docker, waits=True)).read_text()
    (shell.folder / "job.yaml").write_text(text + "nodes: node1\n")
    done = shell("launch", "job.yaml", "--devices", "1", "--detach", SECRET="x")
    assert done.returncode == 0, done.stderr
    run = started(shell, 1)
    (record,) = (docker.parent / "containers").glob("*")
    inside = json.loads(record.read_text())["pid"]
    (folder,) = run.read_record().run_dirs.values()
    supervisor = json.loads(Path(folder, "attempts", "1", "supervisor.json").read_text())["pid"]
    # The container alone stays, as after a crash of everything that started it.
    os.kill(inside, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    shell("stop", run.run_id)
    assert runtime.living(docker.parent) == []
    assert not Path(f"/proc/{inside}").exists()


def test_a_node_without_the_image_or_its_parts_is_refused_before_the_start(
    shell: Shell, docker: Path
) -> None:
    done = shell("launch", job_file(shell, docker, waits=False, image="team/other:2"), SECRET="x")
    assert done.returncode == 1, done.stderr
    assert "it has no image team/other:2" in done.stderr and "clusterctl push --image" in done.stderr
    text = (shell.folder / job_file(shell, docker, waits=False)).read_text()
    (shell.folder / "job.yaml").write_text(text.replace(f"python: {sys.executable}", "python: python9"))
    done = shell("launch", "job.yaml", SECRET="x")
    assert done.returncode == 1 and "python9 does not run in team/train:1" in done.stderr
    assert runtime.living(docker.parent) == []


def write_archive(path: Path, architecture: str) -> None:
    import io
    import tarfile

    config = json.dumps({"architecture": architecture}).encode()
    entry = [{"Config": "abc.json", "RepoTags": ["team/fresh:3"], "Layers": []}]
    with tarfile.open(path, "w") as archive:
        for name, content in (("abc.json", config), ("manifest.json", json.dumps(entry).encode())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_an_image_archive_is_pushed_loaded_and_deleted(shell: Shell, docker: Path) -> None:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    write_archive(shell.folder / "fresh.tar", machine)
    words = ("push", "--image", "fresh.tar", "--runtime", str(docker), "--relay", "on")
    done = shell(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("team/fresh:3") == 2
    assert (docker.parent / "images" / "team_fresh:3").exists()
    again = shell(*words)
    assert again.returncode == 0 and "nothing to do" in again.stderr, again.stderr
    # The archive itself stays on no node.
    found = shell("exec", "node[1-2]", "--", "sh", "-c", "ls ~/.clusterctl/images")
    assert "fresh.tar" not in found.stdout

    write_archive(shell.folder / "other.tar", "s390x")
    refused = shell("push", "--image", "other.tar", "--runtime", str(docker))
    assert refused.returncode == 4 and "is for s390x, and the node has" in refused.stderr
    (shell.folder / "no.tar").write_text("x")
    refused = shell("push", "--image", "no.tar")
    assert refused.returncode == 2 and "not an archive of an image" in refused.stderr
