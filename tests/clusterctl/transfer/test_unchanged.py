from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterctl.agent.files import tree_cache, tree_state
from clusterctl.agent.files.tree_cache import TICK
from clusterctl.inventory.cluster import Node
from clusterctl.transfer.push import (
    PushResult,
    Source,
    file_source,
    make_manifest,
    push_tree,
)
from clusterctl.transfer.unchanged import UnchangedCheck
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import ChildStream, LocalTransport
from tests.support.nodes import local_node

# Each as the /bin/sh of a node.
SHELLS = ["sh", "dash", "bash", "busybox"]
DESTS = ["~/plain", "in/two  words", '/ROOT/it\'s "quoted" $(touch owned) `touch owned`', "~/-n", "~/漢字 😀"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


class Nodes:
    """This machine as a node, whose /bin/sh may be any, and whose programs may be missing."""

    def __init__(self, folder: Path, shell: str = "/bin/sh") -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.shell = shell
        self.path = os.environ["PATH"]
        self.says = ""
        self.agents = 0
        self.node = local_node(folder)

    def connect(self, node: Node) -> Connection:
        self.agents += 1
        return LocalTransport(home=self.home).connect(node)

    def start(self, node: Node, command: str) -> ChildStream:
        env = {"HOME": str(self.home), "PATH": self.path, "t": "of the login's own"}
        argv = [self.shell] if not self.says else ["/bin/sh", "-c", f"{self.says}; exec {self.shell}"]
        return ChildStream(node.name, argv, env, "/")

    def push(self, source: Source, dest: str) -> tuple[PushResult, bool]:
        """One push as the command makes it, and whether a glance was enough."""
        with Connections(self) as connections:
            found = UnchangedCheck(connections, lambda: (source, dest)).at(self.node)
            if found is not None:
                return found, True
            return push_tree(connections.of(self.node), source, dest, note=True), False

    def settle(self, source: Source, dest: str) -> None:
        """Push until the node has noted the tree's state."""
        self.push(source, dest)
        time.sleep(2 * TICK / 1e9)
        assert self.push(source, dest)[0].unchanged


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    yield Nodes(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "run.sh").write_text("#!/bin/sh\n")
    (root / "new\nline").write_text("odd")
    (root / "link").symlink_to("pkg/run.sh")
    return root


def read(root: Path) -> Source:
    return Source(root, make_manifest(root))


@pytest.mark.parametrize(
    "name, dest", [*((name, DESTS[0]) for name in SHELLS), *(("sh", dest) for dest in DESTS[1:])]
)
def test_what_a_node_found_unchanged_is_known_at_a_glance(
    name: str, dest: str, folder: Path, tmp_path: Path
) -> None:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here")
    (tmp_path / "sh").symlink_to(found)
    nodes = Nodes(tmp_path, str(tmp_path / "sh"))
    dest = dest.replace("ROOT", str(tmp_path)[1:])
    nodes.settle(read(folder), dest)
    result, at_a_glance = nodes.push(read(folder), dest)
    where = nodes.home / dest.removeprefix("~/")
    assert at_a_glance == (name != "busybox") and result.unchanged and result.path == str(where)
    # Where one was wanted, it came over the same connection.
    assert nodes.agents == 0
    assert not list(tmp_path.rglob("owned")) and (where / "pkg" / "run.sh").is_file()


def edited(dest: Path) -> None:
    about = (dest / "pkg" / "run.sh").stat()
    (dest / "pkg" / "run.sh").write_text("#!/bin/no\n")
    os.utime(dest / "pkg" / "run.sh", ns=(about.st_atime_ns, about.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "content, its time forged": edited,
    "mode": lambda dest: (dest / "pkg" / "run.sh").chmod(0o600),
    "mode of a folder": lambda dest: (dest / "pkg").chmod(0o700),
    "file gone": lambda dest: (dest / "pkg" / "run.sh").unlink(),
    "all gone": shutil.rmtree,
    "link elsewhere": lambda dest: ((dest / "link").unlink(), (dest / "link").symlink_to("pkg")),
    "file made there": lambda dest: (dest / "pkg" / "own").write_text("own"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changed_there_is_seen(change: str, nodes: Nodes, folder: Path) -> None:
    nodes.settle(read(folder), "~/dest")
    CHANGES[change](nodes.home / "dest")
    result, at_a_glance = nodes.push(read(folder), "~/dest")
    assert not at_a_glance and result.unchanged == (change == "file made there")
    assert (nodes.home / "dest" / "pkg" / "run.sh").read_text() == "#!/bin/sh\n"
    assert (nodes.home / "dest" / "link").readlink() == Path("pkg/run.sh")


def test_another_tree_here_is_no_tree_that_is_there(nodes: Nodes, folder: Path) -> None:
    nodes.settle(read(folder), "~/dest")
    (folder / "pkg" / "run.sh").write_text("#!/bin/no\n")
    result, at_a_glance = nodes.push(read(folder), "~/dest")
    assert not at_a_glance and result.files_sent == 1


def test_what_changed_back_is_noted_anew(nodes: Nodes, folder: Path) -> None:
    nodes.settle(read(folder), "~/dest")
    (nodes.home / "dest" / "own").write_text("own")
    (nodes.home / "dest" / "own").unlink()
    assert [nodes.push(read(folder), "~/dest")[1] for _ in range(2)] == [False, True]


def test_a_file_just_written_is_not_noted(folder: Path) -> None:
    rows = {"a": tree_cache.seen(os.stat(folder / "link"), "x")}
    for later, noted in ((TICK // 2, False), (3_000_000_000, True)):
        tree_state.keep(str(folder / "note"), "tree", "told", "/dest", rows, rows["a"].ctime + later)
        assert (folder / "note").exists() == noted


def test_one_file_is_known_too(nodes: Nodes, folder: Path) -> None:
    source, dest = file_source(folder / "pkg" / "run.sh", "~/bin/")
    nodes.settle(source, dest)
    assert nodes.push(source, dest)[1]
    (nodes.home / "bin" / "run.sh").write_text("other")
    assert nodes.push(source, dest)[0].files_sent == 1


@pytest.mark.parametrize("program", ["find", "sha256sum"])
@pytest.mark.parametrize("instead", ["exit 1", "echo something else", ""])
def test_a_node_whose_programs_are_others_has_its_agent(
    program: str, instead: str, nodes: Nodes, folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "bin"
    own.mkdir()
    if instead:
        (own / program).write_text(f"#!/bin/sh\n{instead}\n")
        (own / program).chmod(0o755)
    else:
        # There is none.
        for name in ("sh", "find", "sha256sum"):
            if name != program:
                (own / name).symlink_to(str(shutil.which(name)))
    nodes.path = str(own) + (f":{nodes.path}" if instead else "")
    nodes.settle(read(folder), "~/dest")
    (nodes.home / "dest" / "pkg" / "run.sh").write_text("#!/bin/no\n")
    for _ in range(2):
        result, at_a_glance = nodes.push(read(folder), "~/dest")
        assert not at_a_glance
    assert result.unchanged


@pytest.mark.parametrize("note", [b"", b"\n", b"no note", b"\xff\0" * 50_000])
def test_a_note_that_makes_no_sense_is_none(note: bytes, nodes: Nodes, folder: Path) -> None:
    nodes.settle(read(folder), "~/dest")
    (place,) = Path(nodes.node.workdir).glob("trees/*.look")
    place.write_bytes(note)
    assert [nodes.push(read(folder), "~/dest")[1] for _ in range(2)] == [False, True]


def test_what_login_scripts_print_is_no_answer(nodes: Nodes, folder: Path) -> None:
    nodes.says = "echo welcome; echo CLUSTERCTL-ONCE; seq 10000; echo same /somewhere >&2"
    nodes.settle(read(folder), "~/dest")
    assert nodes.push(read(folder), "~/dest")[1]


def test_a_look_that_is_cut_is_left_to_the_ordinary_way(nodes: Nodes, folder: Path, tmp_path: Path) -> None:
    nodes.settle(read(folder), "~/dest")
    own, cut = tmp_path / "bin", tmp_path / "cut"
    own.mkdir()
    (own / "find").write_text(
        f'#!/bin/sh\n[ -e {cut} ]&&rm {cut}&&kill -9 0\nexec {shutil.which("find")} "$@"\n'
    )
    (own / "find").chmod(0o755)
    nodes.path = f"{own}:{nodes.path}"
    cut.touch()
    result, at_a_glance = nodes.push(read(folder), "~/dest")
    assert result.unchanged and not at_a_glance and nodes.agents == 1 and not cut.exists()
    assert nodes.push(read(folder), "~/dest")[1]


def test_a_login_without_a_shell_is_left_to_the_ordinary_way(nodes: Nodes, folder: Path) -> None:
    nodes.says = "exit 3"
    assert not nodes.push(read(folder), "~/dest")[1] and nodes.agents == 1
