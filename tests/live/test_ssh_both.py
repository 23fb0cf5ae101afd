"""What matters over SSH, once with each of the two transports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.agent import processes
from clusterctl.sandbox import cluster, namespaces
from clusterctl.sandbox.cluster import Sandbox
from tests.live.conftest import Shell
from tests.live.test_commands import marked, refused
from tests.support.nodes import wait_for

pytestmark = pytest.mark.live


@pytest.fixture(params=["paramiko", "openssh"])
def ssh(request: pytest.FixtureRequest, shell: Shell) -> Shell:
    return replace(shell, env={**shell.env, "CLUSTERCTL_SSH": request.param})


def test_exec_keeps_streams_and_exit_codes_apart(ssh: Shell) -> None:
    done = ssh("exec", "all", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert done.returncode == 3
    assert sorted(re.findall(r"node\d.*out$", done.stdout, re.MULTILINE)) and "err" not in done.stdout
    assert len(re.findall(r"node\d.*err$", done.stderr, re.MULTILINE)) == 2
    killed = ssh("exec", "node1", "--", "sh", "-c", "kill -9 $$")
    assert killed.returncode == 128 + 9


def test_folders_go_out_and_come_back_whole(ssh: Shell, cluster_file: Path) -> None:
    (ssh.folder / "code").mkdir()
    (ssh.folder / "code" / "a b\n'c.bin").write_bytes(bytes(range(256)) * 4000)
    target = f"{cluster_file.parent}/both-{ssh.env['CLUSTERCTL_SSH']}"
    pushed = ssh("push", "-n", "node1", "code", target)
    assert pushed.returncode == 0, pushed.stderr
    pulled = ssh("pull", "-n", "node1", target, "back")
    assert pulled.returncode == 0, pulled.stderr
    (back,) = [path for path in (ssh.folder / "back" / "node1").rglob("*.bin") if path.is_file()]
    assert back.name == "a b\n'c.bin" and back.read_bytes() == bytes(range(256)) * 4000


def test_a_run_is_launched_followed_and_stopped_by_ctrl_c(ssh: Shell) -> None:
    done = ssh("launch", "--no-code", "--", "python3", "-c", "import os; print('rank', os.environ['RANK'])")
    assert done.returncode == 0 and "rank 0" in done.stdout, done.stderr
    argv = [sys.executable, "-m", "clusterctl", "launch", "--no-code", "--", "sleep", "600"]
    process = subprocess.Popen(argv, cwd=ssh.folder, env=ssh.env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while "start " not in said:
        said += process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130, rest
    assert not marked(json.loads(ssh("runs", "--json").stdout)[0]["run"])


def test_keys_are_shown_recorded_on_consent_and_refused_when_changed(ssh: Shell, cluster_file: Path) -> None:
    fresh = ssh.folder / "cluster.yaml"
    text = cluster_file.read_text().replace("./keys/", f"{cluster_file.parent}/keys/")
    fresh.write_text(text.replace("./known_hosts", "./mine"))
    refused(
        ssh("exec", "all", "-c", "cluster.yaml", "--", "true"),
        255,
        "its host key is not known",
        "nodes trust",
    )
    seen = json.loads(ssh("nodes", "trust", "-c", "cluster.yaml", "--dry-run", "--json").stdout)
    assert [one["state"] for one in seen] == ["new", "new"] and not (ssh.folder / "mine").exists()
    assert ssh("nodes", "trust", "-c", "cluster.yaml", "--yes").returncode == 0
    assert ssh("exec", "all", "-c", "cluster.yaml", "--", "true").returncode == 0
    lines = (ssh.folder / "mine").read_text().splitlines()
    names, keys = [one.split(" ", 1)[0] for one in lines], [one.split(" ", 1)[1] for one in lines]
    (ssh.folder / "mine").write_text(
        "".join(f"{a} {b}\n" for a, b in zip(names, reversed(keys), strict=True))
    )
    for command in (
        ["exec", "all", "-c", "cluster.yaml", "--", "true"],
        ["nodes", "trust", "-c", "cluster.yaml"],
    ):
        done = ssh(*command)
        refused(done, 255 if "exec" in command else 3, "its host key changed")
        for one in seen:
            assert one["fingerprint"] in done.stderr


def test_a_node_behind_another_is_reached_and_its_key_recorded_through_it(
    ssh: Shell, cluster_file: Path
) -> None:
    text = cluster_file.read_text().replace("./keys/", f"{cluster_file.parent}/keys/")
    lines = text.replace("./known_hosts", "./mine").splitlines()
    gate, behind = (json.loads(line.split(": ", 1)[1]) for line in lines if re.match(r"  node\d:", line))
    place = f"{gate['host']}:{gate['port']}"
    behind["gateway"] = place
    head = [line for line in lines if not re.match(r"  node\d:", line)]
    (ssh.folder / "cluster.yaml").write_text("\n".join([*head, f"  node2: {json.dumps(behind)}"]) + "\n")
    recorded = (cluster_file.parent / "known_hosts").read_text().splitlines()
    (ssh.folder / "mine").write_text(
        next(one for one in recorded if one.startswith(f"[{gate['host']}]:{gate['port']} ")) + "\n"
    )
    trusted = ssh("nodes", "trust", "-c", "cluster.yaml", "--yes")
    assert trusted.returncode == 0, trusted.stderr
    assert sorted((ssh.folder / "mine").read_text().splitlines()) == sorted(
        " ".join(one.split()[:3]) for one in recorded
    )
    done = ssh("exec", "all", "-c", "cluster.yaml", "--", "echo", "through")
    assert done.returncode == 0 and "through" in done.stdout, done.stderr


def test_an_unknown_way_is_refused_before_anything_is_done(shell: Shell) -> None:
    refused(
        shell("exec", "all", "--ssh", "opensh", "--", "true"),
        2,
        "no SSH client is called 'opensh'",
        "openssh",
    )
    wide = shell("nodes", "list", "--wide")
    assert wide.returncode == 0 and "paramiko" in wide.stdout


def test_a_killed_client_leaves_nothing_running_on_the_nodes(ssh: Shell) -> None:
    marker = f"CLUSTERCTL_TEST_KILL=both-{ssh.env['CLUSTERCTL_SSH']}-{os.getpid()}"
    argv = [sys.executable, "-m", "clusterctl", "exec", "all", "--", "env", marker, "sh", "-c"]
    process = subprocess.Popen(
        [*argv, "setsid sleep 600 & echo up; sleep 600"], cwd=ssh.folder, env=ssh.env, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    # Both are up.
    assert process.stdout.readline() and process.stdout.readline()
    name, value = marker.split("=")
    assert processes.marked({name: value})
    process.kill()
    process.communicate()
    wait_for(lambda: not processes.marked({name: value}))


def test_without_ssh_the_inventory_alone_counts_and_that_is_said_once(shell: Shell) -> None:
    (shell.folder / ".ssh").mkdir()
    (shell.folder / ".ssh" / "config").write_text("Host *\n  Port 1\n")
    alone = {"HOME": str(shell.folder), "PATH": str(shell.folder)}
    done = shell("exec", "all", "--", "echo", "there", **alone)
    assert done.returncode == 0 and done.stdout.count("there") == 2, done.stderr
    assert done.stderr.count("`ssh` is not installed") == 1
    refused(
        shell("exec", "all", "--ssh", "openssh", "--", "true", **alone),
        2,
        "this machine has no `ssh` program",
    )


@pytest.mark.parametrize(
    ("ssh", "loser"), [("paramiko", "node1"), ("paramiko", "node2"), ("openssh", "node2")], indirect=["ssh"]
)
def test_a_path_that_loses_large_packets_is_told_from_a_busy_server(
    ssh: Shell, narrow: Sandbox, loser: str
) -> None:
    done = ssh("exec", loser, "--", "true", CLUSTERCTL_CLUSTER=str(narrow.cluster_file))
    assert done.returncode == 255, done.stderr
    assert f"{loser}: the handshake failed" in done.stderr and "no key exchange" in done.stderr
    assert "the path to it may lose large packets" in done.stderr and "MaxStartups" not in done.stderr


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """Two nodes that promise to take large packets: node1 never gets any, and those of node2 never arrive here."""
    if why := namespaces.why_not():
        pytest.skip(why)
    directory = tmp_path_factory.mktemp("narrow") / "sandbox"
    made = cluster.up(directory, nodes=2, devices=1, mode="namespaces")
    pid = namespaces.first_process(made.layout, made.node("node1"))
    inside = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip"]
    route = subprocess.run([*inside, "route"], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run([*inside, "link", "set", "eth0", "mtu", "600"], check=True)
    subprocess.run([*inside, "route", "change", *route.split(), "advmss", "1460"], check=True)
    namespaces.ip_in_switch(made.layout, "link set node2 mtu 600", "link set br0 mtu 1500")
    yield made
    cluster.down(directory)
