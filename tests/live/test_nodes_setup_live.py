"""Environments on real nodes: made, unchanged, interrupted, refused; and fabric tasks over checked logins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.live.conftest import Shell
from tests.support.wheels import make_wheelhouse

pytestmark = pytest.mark.live
TRAINER = ("torch", "numpy", "safetensors", "tokenizers")


def with_python(shell: Shell, python: str, **more: object) -> str:
    """Write an inventory whose nodes have another Python; return its path."""
    source = Path(shell.env["CLUSTERCTL_CLUSTER"])
    value = yaml.safe_load(source.read_text())
    value["known_hosts"] = str(source.parent / value["known_hosts"])
    value["defaults"] |= {"python": python, "key": str(source.parent / value["defaults"]["key"]), **more}
    (shell.folder / "cluster.yaml").write_text(yaml.safe_dump(value))
    return str(shell.folder / "cluster.yaml")


def test_an_environment_is_made_once_on_every_node_and_doctor_then_passes(shell: Shell) -> None:
    make_wheelhouse(shell.folder / "wheels", *TRAINER)
    cluster = with_python(shell, "~/own/bin/python")
    setup = ("nodes", "setup", "-c", cluster, "--wheelhouse", "wheels", "--json")
    planned = shell(*setup, "--dry-run")
    assert [row["change"] for row in json.loads(planned.stdout)] == ["install", "install"], planned.stderr
    made = shell(*setup)
    assert made.returncode == 0, made.stderr
    assert [(row["node"], row["installed"]) for row in json.loads(made.stdout)] == [
        ("node1", True),
        ("node2", True),
    ]
    again = shell(*setup)
    assert [row["installed"] for row in json.loads(again.stdout)] == [False, False], again.stderr
    assert shell(*setup[:-1]).stdout.startswith("node[1-2]: ~/own: unchanged (")
    ran = shell(
        "exec", "-c", cluster, "all", "--", "own/bin/python", "-c", "import torch; print(torch.version)"
    )
    assert sorted(ran.stdout.splitlines()) == ["node1: 1.0", "node2: 1.0"], ran.stderr
    doctor = shell("doctor", "-c", cluster, "--verbose")
    assert "ranks run with Python" in doctor.stdout and "torch 1.0" in doctor.stdout, (
        doctor.stdout + doctor.stderr
    )

    # A part of an environment is no environment, and is completed.
    shell("exec", "-c", cluster, "node1", "--", "rm", "own/.clusterctl-environment")
    third = shell(*setup)
    assert [row["installed"] for row in json.loads(third.stdout)] == [True, False], third.stderr

    # Another lock file makes another environment beside it, from a bundle, and the link is switched.
    make_wheelhouse(shell.folder / "newer", *TRAINER, version="2.0")
    packed = shell("bundle", "--wheelhouse", "newer", "-o", "site.tar")
    assert packed.returncode == 0, packed.stderr
    switched = shell("nodes", "setup", "-c", cluster, "--bundle", "site.tar", "--prune", "--json")
    assert switched.returncode == 0, switched.stderr
    assert [len(row["removed"]) for row in json.loads(switched.stdout)] == [1, 1]
    ran = shell(
        "exec", "-c", cluster, "-b", "all", "--", "own/bin/python", "-c", "import torch; print(torch.version)"
    )
    assert "node1,node2 (2)" in ran.stdout.replace("node[1-2]", "node1,node2") and "2.0" in ran.stdout
    assert not list(shell.folder.glob(".unpacked-*"))


def test_what_cannot_be_set_up_is_refused_before_anything_changes(shell: Shell) -> None:
    make_wheelhouse(shell.folder / "wheels", "alpha")
    cluster = with_python(shell, "~/taken/bin/python")
    setup = ("nodes", "setup", "-c", cluster, "--wheelhouse", "wheels")
    shell("exec", "-c", cluster, "node2", "--", "mkdir", "taken")
    refused = shell(*setup)
    assert refused.returncode == 2
    assert "node2: ~/taken exists and is not an environment of clusterctl" in refused.stderr
    assert shell("exec", "-c", cluster, "node1", "--", "test", "-e", "taken").returncode == 1
    missing = shell(*setup, "--base", "python9.9")
    assert missing.returncode == 2 and "node1: python9.9 does not run" in missing.stderr
    assert "name another Python of the nodes" in missing.stderr
    lock = shell.folder / "wheels" / "requirements.lock"
    lock.write_text(lock.read_text() + "beta==1.0 --hash=sha256:" + "0" * 64 + "\n")
    lacking = shell(*setup, "-n", "node1")
    assert lacking.returncode == 2 and "no wheel of beta 1.0 for Python" in lacking.stderr
    lock.write_text("alpha>=1\n")
    assert "requirements.lock:1: 'alpha>=1' pins no version" in shell(*setup).stderr


FABFILE = '''
from fabric import task

@task
def hello(c, name="nobody", code=0):
    """Say hello."""
    print("for", name)
    c.run("uname -s; exit %d" % int(code))

@task
def fails(c):
    raise ValueError("a bug of mine")

@task
def hides(c):
    print(len(c.run("echo topsecret", hide=True).stdout))
    c.run("echo topsecret; echo shown >&2", hide="out")

@task
def elsewhere(c):
    import fabric
    c.close()
    assert c.run("echo again", hide=True).ok
    fabric.Connection(c.host, port=c.port, user=c.user).run("echo never")
'''


def test_a_fabfile_runs_on_each_node_with_its_output_and_exit_code(shell: Shell) -> None:
    (shell.folder / "fabfile.py").write_text(FABFILE)
    listed = shell("fab", "fabfile.py", "--list", "--json")
    assert json.loads(listed.stdout) == {"elsewhere": "", "fails": "", "hello": "Say hello.", "hides": ""}
    done = shell("fab", "fabfile.py", "hello", "-n", "all", "--json", "--", "--name", "you")
    rows = json.loads(done.stdout)
    assert [(row["node"], row["exit_code"], row["stdout"]) for row in rows] == [
        ("node1", 0, "for you\nLinux\n"),
        ("node2", 0, "for you\nLinux\n"),
    ]
    failed = shell("fab", "fabfile.py", "hello", "-n", "node1", "--", "--code", "7")
    assert failed.returncode == 7 and "node1: Linux" in failed.stdout and "node1: exit 7" in failed.stderr
    bug = shell("fab", "fabfile.py", "fails", "-n", "node1")
    assert bug.returncode == 1 and "node1: ValueError: a bug of mine" in bug.stderr
    assert "clusterctl/ssh" not in bug.stderr
    hides = shell("fab", "fabfile.py", "hides", "-n", "node1")
    assert hides.stdout == "node1: 10\n" and hides.stderr == "node1: shown\n"
    elsewhere = shell("fab", "fabfile.py", "elsewhere", "-n", "node1")
    assert elsewhere.returncode == 1 and "not found in known_hosts" in elsewhere.stderr
    unknown = shell("fab", "fabfile.py", "helo", "-n", "node1")
    assert unknown.returncode == 2 and "did you mean 'hello'" in unknown.stderr


def test_a_wrong_host_key_is_refused_before_a_task_or_a_setup_starts(shell: Shell) -> None:
    (shell.folder / "fabfile.py").write_text(FABFILE)
    make_wheelhouse(shell.folder / "wheels", "alpha")
    cluster = with_python(shell, "~/own/bin/python")
    known = Path(shell.env["CLUSTERCTL_CLUSTER"]).parent / "known_hosts"
    lines = known.read_text().splitlines()
    first, second = (line.split() for line in lines[:2])
    # node1 shows node2's key.
    swapped = [" ".join((first[0], *second[1:])), " ".join(second), *lines[2:]]
    (shell.folder / "swapped").write_text("\n".join(swapped) + "\n")
    (shell.folder / "cluster.yaml").write_text(
        (shell.folder / "cluster.yaml").read_text().replace(str(known), str(shell.folder / "swapped"))
    )
    task = shell("fab", "fabfile.py", "hello", "-n", "node1", "-c", cluster)
    assert task.returncode == 255 and "host key" in task.stderr and "Linux" not in task.stdout
    setup = shell("nodes", "setup", "-c", cluster, "--wheelhouse", "wheels")
    assert setup.returncode == 3 and "host key" in setup.stderr
