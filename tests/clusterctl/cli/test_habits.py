"""What users of pdsh, clush, torchrun and kubectl type: it works, or the error names our words."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from clusterctl.cli import habits, main, node_words
from clusterctl.cli.commands import TABLE, built
from clusterctl.cli.screen import hints_with
from clusterctl.errors import UsageError
from clusterctl.exec.command import AS_ROOT
from clusterctl.inventory import group_files
from clusterctl.inventory.cluster import Cluster, Node

NAMES = ("node1", "node2", "node3", "root@odd")
LAB = Cluster(
    "lab", tuple(Node(name, f"10.0.0.{number}", f"10.0.0.{number}") for number, name in enumerate(NAMES, 1)),
    {"web": ("node1", "node3")}, source="cluster.yaml",
)  # fmt: skip


def chosen(nodes: str, exclude: str | None = None) -> dict[str, str | None]:
    return {node.name: node.user for node in node_words.select(LAB, nodes, exclude).nodes}


def test_a_set_can_name_the_login_of_some_nodes() -> None:
    assert chosen("alice@node[1-2],node3") == {"node1": "alice", "node2": "alice", "node3": None}
    assert chosen("alice@@web,bob@node2") == {"node1": "alice", "node2": "bob", "node3": "alice"}
    assert chosen("alice@node1,bob@node2!node1") == {"node2": "bob"}
    # A name of the inventory may have the same form.
    assert chosen("root@odd") == {"root@odd": None}


def test_a_set_can_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("# the rack on the left\nnode1 node3\n\n  node2  # new\n")
    assert list(chosen(f"^{file}")) == ["node1", "node2", "node3"]
    assert list(chosen(f"root@odd,^{file}", "node2")) == ["node1", "node3", "root@odd"]
    assert list(chosen("node[1-2]^node[2-3]")) == ["node1", "node3"]
    file.write_text("# none\n")
    with pytest.raises(UsageError, match="names no nodes"):
        chosen(f"^{file}")
    with pytest.raises(UsageError, match=r"\^/no/file: No such file"):
        chosen("^/no/file")


def test_groups_of_clustershell_and_genders_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "groups.d").mkdir()
    (tmp_path / "groups").write_text("# ours\nold: node[1-2]\nboth: @old,node3\n")
    (tmp_path / "groups.d" / "lab.yaml").write_text(
        "racks: {left: 'node[1-2]', right: [node3]}\nroles: {web: node2}\n"
    )
    (tmp_path / "groups.d" / "bad.yaml").write_text("{: [")
    (tmp_path / "genders").write_text("node[1-2] compute,rack=1\nnode3\tlogin\nnode3 compute,rack=2  # new\n")
    monkeypatch.setattr(group_files, "CLUSTERSHELL", (tmp_path, Path("/nowhere")))
    monkeypatch.setattr(group_files, "GENDERS", tmp_path / "genders")
    assert list(chosen("@old")) == ["node1", "node2"] and list(chosen("@both")) == ["node1", "node2", "node3"]
    assert list(chosen("@racks:left")) == ["node1", "node2"] and list(chosen("@right")) == ["node3"]
    assert list(chosen("@compute")) == ["node1", "node2", "node3"] and list(chosen("@login")) == ["node3"]
    assert list(chosen("@rack=2")) == ["node3"] and list(chosen("@compute", "@rack=1")) == ["node3"]
    # The inventory's own group comes first.
    assert list(chosen("@web")) == ["node1", "node3"]
    with pytest.raises(UsageError, match="no group 'nothing'"):
        chosen("@nothing")


@pytest.mark.parametrize(
    ("nodes", "remedy"),
    [("2", "-n node[1-2]"), ("10.0.0.2", "-n node2"), ("10.0.0.2,node1", "-n node2,node1")],
)
def test_a_number_of_nodes_and_an_address_are_answered_with_names(nodes: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(nodes)
    assert caught.value.hint.endswith(remedy)


@pytest.mark.parametrize("command", habits.OPTIONS)
def test_options_of_others_are_not_ours_and_their_remedies_are(command: str) -> None:
    found = built("")
    for name in command.split():
        found = found.commands[name]
    own = {name for param in found.params for name in (*param.opts, *param.secondary_opts)}
    if command == "exec":
        own |= {"-n"}
    for option, remedy in habits.OPTIONS[command].items():
        assert option not in own
        for named in re.findall(r"(?<!\S)--?[a-z][a-z-]*", remedy):
            of_other_command = "clusterctl " in remedy
            assert named in own or of_other_command, f"{option}: {remedy}"


def test_commands_of_others_are_not_ours_and_their_remedies_are() -> None:
    for word, ours in habits.COMMANDS.items():
        assert word not in TABLE and ours in TABLE


LINES = {
    "-w node[1-2] -- uname": "node[1-2]: uname\n",
    "-w node[1-3] -x node2 -l alice -f 2 -t 3 -u 5 -- uname": "node[1,3]: uname\n",
    "-a -f 1 -- uname": "node[1-3]: uname\n",
    "-g web -- uname": "node[1,3]: uname\n",
    "-w alice@node1 -- uname": "node1: uname\n",
    "-bw node[1-2] uname": "node[1-2]: uname\n",
    "-ab uname": "node[1-3]: uname\n",
    "-bgweb -- uname -ab": "node[1,3]: uname -ab\n",
    "-bb -f 3": "missing argument 'SET'",
    "-R ssh -w node1 -- uname": "--ssh openssh",
    "-w node1 -p 22 uname": "--port N",
    "-w node1 -t 3 --command_timeout 5 uname": "--timeout SECONDS",
    "-w node1 --copy corpus --dest /data": "clusterctl push SRC DEST",
    "--tty node1 -- bash": "clusterctl ssh NODE",
    "-it node1 -- bash": "clusterctl ssh NODE",
    # It belongs to `ls`.
    "-w node1 ls -R": "node1 -- ls -R",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_pdsh_or_clush_works_or_names_ours(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'nodes: {"node[1-3]": {host: "10.0.0.{n}"}}\ngroups: {web: "node[1,3]"}\n'
    (tmp_path / "cluster.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    # An earlier command line of this process named its inventory.
    hints_with("other.yaml")
    words = line.split()
    code = main.run(["exec", "--dry-run", *words])
    printed = capsys.readouterr()
    expected = LINES[line]
    works = expected.endswith("\n")
    if works:
        assert printed.out == expected
    else:
        # A narrow terminal breaks lines.
        assert expected in " ".join(printed.err.split())
    assert (code == 0) == works


SUDO = """#!/bin/sh
[ -z "$LOG" ] || echo "$*" >>"$LOG"
case "$1" in
-S) IFS= read -r typed; [ "$typed" = secret ] && touch "$LOG.known" ;;
-n) [ -e "$LOG.known" ] || { echo 'sudo: a password is required' >&2; exit 1; }; shift 2; exec "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("password", "code", "printed"),
    [("secret", 0, b"as root\n"), ("wrong", 1, b""), ("", 1, b"")],
)
def test_sudo_gets_the_password_and_the_command_does_not(
    tmp_path: Path, password: str, code: int, printed: bytes
) -> None:
    (tmp_path / "sudo").write_text(SUDO)
    (tmp_path / "sudo").chmod(0o755)
    argv = ["/bin/sh", "-c", AS_ROOT, "sudo", "sh", "-c", "cat; echo as root"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(tmp_path / "log")}
    done = subprocess.run(argv, input=f"{password}\n".encode(), env=env, capture_output=True)
    assert (done.returncode, done.stdout) == (code, printed)
    assert password == "" or password not in (tmp_path / "log").read_text()
