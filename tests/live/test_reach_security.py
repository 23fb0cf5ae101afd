"""Five hundred hostile texts on the whole way from a command line to a real node and back: each arrives as it was,
none is executed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
import yaml

from clusterctl import inventory, nodeset
from clusterctl.errors import ClusterctlError
from clusterctl.sandbox import load as load_sandbox
from clusterctl.transport import Connections, transport_to
from tests.clusterctl import hostile

from .conftest import Shell

pytestmark = pytest.mark.live

PYTHON = ("python3", "-I", "-S", "-X", "utf8", "-c")
TELL = "import hashlib; tell = lambda one: print(hashlib.sha256(one).hexdigest(), len(one))"
ARGUMENTS = f"{TELL}\nimport os, sys\nfor one in sys.argv[1:]: tell(os.fsencode(one))"
VARIABLES = f"{TELL}\nimport os\nfor n in range(500): tell(os.environb.get(b'HOSTILE_%d' % n, b'(not there)'))"


def told(texts: list[str]) -> list[str]:
    raw = [one.encode("utf-8", "surrogateescape") for one in texts]
    return [f"{hashlib.sha256(one).hexdigest()} {len(one)}" for one in raw]


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """What exists once any of the texts was executed, wherever that was: nodes see this folder too."""
    return tmp_path / "executed"


def never_executed(canary: Path, cluster_file: Path) -> None:
    assert not canary.exists()
    made = load_sandbox(cluster_file.parent)
    homes = [made.layout.home(node) for node in made.nodes]
    for folder in (Path.cwd(), canary.parent, *homes):
        assert not [name for name in os.listdir(folder) if name.endswith(canary.name)], folder


def as_yaml(value: object) -> str:
    """JSON, but for its pairs of surrogates: yaml has a longer escape for those characters."""

    def joined(pair: re.Match[str]) -> str:
        return f"\\U{ord(json.loads(chr(34) + pair.group() + chr(34))):08x}"

    return re.sub(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}", joined, json.dumps(value))


def shown(text: str, node: str) -> list[str]:
    return [line.removeprefix(f"{node}: ") for line in text.splitlines() if line.startswith(f"{node}: ")]


def test_arguments_arrive_byte_identical_through_the_command_line(
    shell: Shell, canary: Path, cluster_file: Path
) -> None:
    texts = hostile.texts(str(canary))
    assert len(set(texts)) == 500
    done = shell("exec", "node[1-2]", "--", *PYTHON, ARGUMENTS, *texts)
    assert done.returncode == 0, done.stderr
    for node in ("node1", "node2"):
        assert shown(done.stdout, node) == told(texts)
    never_executed(canary, cluster_file)


def test_arguments_and_variables_arrive_byte_identical_through_an_agent(
    canary: Path, cluster_file: Path
) -> None:
    cluster = inventory.load(cluster_file)
    texts = hostile.texts(str(canary))
    values = hostile.values(str(canary))
    env = {f"HOSTILE_{number}": text for number, text in enumerate(values)}
    with Connections(transport_to(cluster)) as connections:
        link = connections.of(cluster.nodes[0])
        arguments = link.run([*PYTHON, ARGUMENTS, *texts])
        variables = link.run([*PYTHON, VARIABLES], env=env)
    assert arguments.text.splitlines() == told(texts)
    assert variables.text.splitlines() == told(values), variables.stderr
    never_executed(canary, cluster_file)


def test_variables_of_the_inventory_arrive_byte_identical(
    shell: Shell, canary: Path, cluster_file: Path
) -> None:
    """What yaml can hold; the bytes that it can't hold go through an agent above."""
    texts = [re.sub("[\udc80-\udcff]", "?", one) for one in hostile.values(str(canary))]
    value = yaml.safe_load(cluster_file.read_text().replace("./", f"{cluster_file.parent}/"))
    value["nodes"]["node1"]["env"] = {f"HOSTILE_{number}": text for number, text in enumerate(texts)}
    mine = shell.folder / "cluster.yaml"
    mine.write_text(as_yaml(value))
    done = shell("exec", "-c", str(mine), "node1", "--", *PYTHON, VARIABLES)
    assert done.returncode == 0, done.stderr
    assert shown(done.stdout, "node1") == told(texts)
    never_executed(canary, cluster_file)


def test_names_of_files_go_there_and_back_byte_identical(
    shell: Shell, canary: Path, cluster_file: Path
) -> None:
    names = hostile.names(str(canary))
    source = shell.folder / "source"
    source.mkdir()
    for number, name in enumerate(names):
        (source / name).write_bytes(b"%d" % number)
    made = load_sandbox(cluster_file.parent)
    pushed = shell("push", str(source), "~/hostile names")
    assert pushed.returncode == 0, pushed.stderr
    for node in made.nodes:
        there = made.layout.home(node) / "hostile names"
        assert {name: (there / name).read_bytes() for name in os.listdir(there)} == {
            name: b"%d" % number for number, name in enumerate(names)
        }
    pulled = shell("pull", "~/hostile names", "back")
    assert pulled.returncode == 0, pulled.stderr
    for node in made.nodes:
        here = shell.folder / "back" / node.name / "hostile names"
        assert sorted(map(os.fsencode, os.listdir(here))) == sorted(map(os.fsencode, names))
    never_executed(canary, cluster_file)


def test_a_path_on_the_node_is_never_a_command(shell: Shell, canary: Path, cluster_file: Path) -> None:
    source = shell.folder / "source"
    source.mkdir()
    (source / "file").write_text("whole")
    made = load_sandbox(cluster_file.parent)
    for name in hostile.names(str(canary))[::70]:
        path = f"~/paths/{name[:120]}/ {name[:120]}"
        pushed = shell("push", "-n", "node1", str(source), path)
        assert pushed.returncode == 0, pushed.stderr
        kept = made.layout.home(made.nodes[0]) / path.removeprefix("~/") / "file"
        assert kept.read_text() == "whole"
    never_executed(canary, cluster_file)


def test_names_of_nodes_are_refused_in_words_or_only_ever_names(canary: Path, tmp_path: Path) -> None:
    taken = 0
    for text in hostile.texts(str(canary)):
        for known in ((), ("node1", "node2")):
            try:
                names = nodeset.expand(text, {}, known)
            except ClusterctlError as refusal:
                assert refusal.message.strip()
                continue
            assert all(not nodeset.name_fault(name) for name in names)
        document = json.dumps({"nodes": {text: {"host": "local"}}})
        try:
            cluster = inventory.parse(document, tmp_path / "cluster.yaml")
        except ClusterctlError as refusal:
            assert refusal.message.strip() or refusal.hint
            continue
        taken += 1
        assert all(re.fullmatch(r"[A-Za-z0-9_.:%+@-]+", name) and name[0] != "-" for name in cluster.names)
    assert taken < 100
    assert not canary.exists()


def test_hosts_users_and_gateways_that_are_options_or_commands_are_refused(
    shell: Shell, canary: Path, cluster_file: Path
) -> None:
    value = yaml.safe_load(cluster_file.read_text().replace("./", f"{cluster_file.parent}/"))
    mine = shell.folder / "cluster.yaml"
    for key, text in (
        ("host", f"-oProxyCommand=touch {canary}"), ("host", f"$(touch {canary})"), ("user", f"`touch {canary}`"),
        ("user", f"-oProxyCommand=touch {canary}"), ("gateway", f"-oProxyCommand=touch {canary}"),
        ("gateway", f"a;touch {canary};@127.0.0.1:1"), ("python", f"true; touch {canary};"),
        ("workdir", f"~/$(touch {canary})"), ("key", f"$(touch {canary})"),
    ):  # fmt: skip
        changed = json.loads(json.dumps(value))
        changed["nodes"]["node1"][key] = text
        mine.write_text(json.dumps(changed))
        for command in (("exec", "node1", "--timeout", "5", "--", "true"), ("push", "-n", "node1", str(mine))):
            verb, *words = command
            done = shell(verb, "-c", str(mine), *words)
            assert not canary.exists(), (key, text, verb)
            assert "Traceback" not in done.stderr and done.returncode != 70, (key, text, verb, done.stderr)


