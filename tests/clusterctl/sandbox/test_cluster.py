"""What `sandbox up` refuses before it makes anything, and what it writes."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.sandbox import cluster as sandbox_cluster
from clusterctl.sandbox import namespaces, queue, sshd
from clusterctl.sandbox.layout import (
    Layout,
    State,
    device_files,
    make_folders,
    make_keys,
    write_inventory,
)


def test_importing_the_sandbox_loads_no_ssh_and_no_cryptography() -> None:
    code = "import clusterctl.sandbox.cluster, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"paramiko", "fabric", "cryptography", "torch", "rich"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"nodes": 0}, "-n 0: so many"),
        ({"nodes": 251, "mode": "embedded"}, "-n 251: so many"),
        ({"devices": 0}, "--devices 0: so many"),
        ({"devices": 17}, "--devices 17: so many"),
        ({"mode": "loopbak"}, "unknown mode 'loopbak'"),
    ],
)
def test_a_wrong_argument_is_refused_and_nothing_is_made(
    tmp_path: Path, arguments: dict[str, object], word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        sandbox_cluster.up(tmp_path / "box", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "box").exists()


@pytest.mark.parametrize("name", ['with"quote', "with%percent", "with\nnewline", "with\\backslash"])
def test_a_folder_that_sshd_could_not_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot hold a sandbox"):
        sandbox_cluster.up(tmp_path / name)


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        sandbox_cluster.up(tmp_path)
    with pytest.raises(UsageError, match="is not a sandbox"):
        sandbox_cluster.down(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_no_folder_and_a_missing_parent_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        sandbox_cluster.up(tmp_path / "file")
    with pytest.raises(UsageError, match="does not exist") as caught:
        sandbox_cluster.up(tmp_path / "no" / "box")
    assert "mkdir -p" in caught.value.hint
    with pytest.raises(UsageError, match="the nodes replace parts"):
        sandbox_cluster.up(Path("/etc/box"))


def test_load_without_a_sandbox_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        sandbox_cluster.load(tmp_path)
    assert "sandbox up" in caught.value.hint
    assert sandbox_cluster.down(tmp_path / "never was") == 0


def test_a_state_file_of_another_version_or_torn_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"version": 0}')
    with pytest.raises(UsageError, match="another version"):
        sandbox_cluster.down(tmp_path)
    for text, problem in {
        '{"version"': "damaged: not JSON",
        "[]": "damaged: the value",
        '{"version": 1}': "damaged: mode is missing",
        '{"version": 1, "mode": "loopback", "devices": "2"}': "damaged: devices: '2'",
    }.items():
        (tmp_path / "state.json").write_text(text)
        with pytest.raises(UsageError, match=f"state.json: {problem}"):
            sandbox_cluster.load(tmp_path)


def test_auto_takes_sshd_where_it_is_and_else_the_embedded_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sshd, "why_not_root", lambda: "")
    monkeypatch.setattr(sshd, "find_sshd", lambda: "/usr/sbin/sshd")
    assert sandbox_cluster.choose_mode("auto") == "loopback"
    monkeypatch.setattr(sshd, "why_not_root", lambda: "the root account is locked")
    assert sandbox_cluster.choose_mode("auto") == "embedded"
    with pytest.raises(UsageError, match="locked"):
        sandbox_cluster.choose_mode("loopback")
    monkeypatch.setattr(sshd, "find_sshd", lambda: None)
    assert sandbox_cluster.choose_mode("auto") == "embedded"
    with pytest.raises(UsageError, match="sshd is not installed"):
        sandbox_cluster.choose_mode("loopback")
    monkeypatch.setattr(namespaces, "why_not", lambda: "root is needed")
    with pytest.raises(UsageError, match="namespaces is not possible on this machine: root is needed"):
        sandbox_cluster.choose_mode("namespaces")


def half_made(folder: Path, mode: str) -> tuple[Layout, State]:
    layout = Layout(folder)
    folder.mkdir(mode=0o700)
    nodes = sandbox_cluster._plan_nodes(layout, mode, 3)
    return layout, State(mode, 4, sys.executable, "root", True, nodes)


@pytest.mark.parametrize("mode", ["loopback", "embedded", "namespaces"])
def test_the_inventory_it_writes_is_one_that_the_launcher_reads(tmp_path: Path, mode: str) -> None:
    layout, state = half_made(tmp_path / "box", mode)
    state = replace(state, nodes=tuple(replace(node, port=40000 + node.index) for node in state.nodes))
    make_folders(layout, state)
    write_inventory(layout, state, make_keys(layout, state.nodes))
    cluster = inventory_cluster.load(layout.cluster_file)
    assert cluster.names == ["node1", "node2", "node3"]
    assert cluster.known_hosts == str(layout.known_hosts)
    first = cluster.nodes[0]
    assert (first.port, first.devices, first.kind, first.server_id) == (40001, (0, 1, 2, 3), "cpu", "node1")
    assert first.key == str(layout.key)
    assert (first.hccn_conf, first.hccn_tool) == device_files(layout, state, state.nodes[0])
    assert len({node.address for node in cluster.nodes}) == 3
    # In every mode, only loopback addresses.
    assert first.host.startswith("127.")


def test_secrets_are_the_user_s_alone(tmp_path: Path) -> None:
    layout, state = half_made(tmp_path / "box", "loopback")
    make_folders(layout, state)
    make_keys(layout, state.nodes)
    private = [path for path in (layout.directory / "keys").iterdir() if path.suffix != ".pub"]
    # The user's, three hosts', authorized_keys.
    assert len(private) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert stat.S_IMODE((layout.directory / "keys").stat().st_mode) == 0o700


def test_down_clears_what_an_up_that_was_killed_early_left(tmp_path: Path) -> None:
    layout, state = half_made(tmp_path / "box", "loopback")
    state.save(layout)
    make_folders(layout, state)
    # A run may have made folders it can't enter.
    (layout.home(state.nodes[0]) / "locked").mkdir(mode=0o000)
    with pytest.raises(UsageError, match="was not stopped"):
        sandbox_cluster.up(layout.directory)
    assert sandbox_cluster.down(layout.directory) == 0
    assert not layout.directory.exists()


def test_down_clears_what_an_up_killed_before_it_wrote_its_state_left(tmp_path: Path) -> None:
    box = tmp_path / "box"
    box.mkdir()
    (box / "lock").touch()
    (box / ".state.json.123.abc").write_text("{")
    assert sandbox_cluster.down(box) == 0
    assert not box.exists()


def test_down_leaves_an_empty_folder_of_the_user_s(tmp_path: Path) -> None:
    assert sandbox_cluster.down(tmp_path) == 0
    assert tmp_path.exists() and not list(tmp_path.iterdir())


def test_a_record_of_another_boot_ends_no_process_of_this_one(tmp_path: Path) -> None:
    layout, state = half_made(tmp_path / "box", "loopback")
    state.save(layout)
    make_folders(layout, state)
    with subprocess.Popen(["sleep", "30"]) as bystander:
        record = {"name": "node1", "pid": bystander.pid, "start_time": "1", "boot_id": "another", "argv": []}
        layout.record("node1").write_text(json.dumps(record))
        assert sandbox_cluster.down(layout.directory) == 0
        assert bystander.poll() is None
        bystander.kill()


def test_sshd_is_told_to_let_in_one_key_of_one_user_and_forward_nothing_else(tmp_path: Path) -> None:
    layout, state = half_made(tmp_path / "box", "loopback")
    make_folders(layout, state)
    text = sshd.write_config(layout, state, state.nodes[0], "/bin/false").read_text()
    for line in (
        "AllowUsers root",
        "AuthenticationMethods publickey",
        "PasswordAuthentication no",
        "UsePAM no",
        "AllowAgentForwarding no",
        f'AuthorizedKeysFile "{layout.authorized_keys}"',
    ):
        assert line in text.splitlines()


def test_a_tmpdir_too_deep_for_sockets_is_not_set(tmp_path: Path) -> None:
    deep = Layout(tmp_path / ("x" * 80))
    node = sandbox_cluster._plan_nodes(deep, "loopback", 1)[0]
    assert deep.temporary(node) is None
    shallow = Layout(Path("/srv/box"))
    assert shallow.temporary(node) == Path("/srv/box/node1/tmp")


def test_no_two_nodes_of_the_largest_sandbox_share_an_address(tmp_path: Path) -> None:
    from clusterctl.sandbox import namespaces
    from clusterctl.sandbox.layout import MAX_NODES, Layout

    layout = Layout(tmp_path)
    every = [namespaces.node_address(layout, index) for index in range(1, MAX_NODES + 1)]
    assert len({*every, namespaces.bridge_address(layout)}) == MAX_NODES + 1


def test_the_login_of_slurm_leaves_the_options_of_a_command_to_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `env` takes options as nsenter does.
    monkeypatch.setattr(queue, "_in_network", lambda layout, state, command: ["env", *command])
    made = Layout(tmp_path)
    queue._write_login(made, State("namespaces", 1, sys.executable, "root", True, ()))
    script = str(queue.login_script(made))
    assert subprocess.run([script, "sh", "-c", "exit 7"]).returncode == 7
    assert subprocess.run([script, "--version"], capture_output=True).returncode == 127
