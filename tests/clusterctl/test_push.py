from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.agent import tree
from clusterctl.agent.frames import ByteReader
from clusterctl.agent.tree import Entry
from clusterctl.errors import ClusterctlError, InputFaults, UsageError
from clusterctl.link import RequestFailed
from clusterctl.push import make_manifest, pull_place, pull_tree, push_file, push_store, push_tree
from clusterctl.transport import Connection, ScriptedTransport
from tests.clusterctl.nodes import connect, local_node, wait_for

EMPTY = tree.hash_file(os.devnull)[1]
NAMES = [
    "plain.txt",
    "with space",
    "new\nline",
    "😀",
    "quote'\"",
    "-dash",
    "$(id)",
    "caf\u00e9",
    "\udcff\udcfe",
    "back\\slash",
]


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Connection]:
    connection = connect(tmp_path)
    yield connection
    connection.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "pkg" / "deep").mkdir(parents=True)
    (root / "pkg" / "run.sh").write_text("#!/bin/sh\n")
    (root / "pkg" / "run.sh").chmod(0o755)
    (root / "pkg" / "deep" / "big").write_bytes(os.urandom(3_000_000))
    (root / "link").symlink_to("pkg/run.sh")
    (root / "pkg" / "up").symlink_to("../link")
    (root / "empty").mkdir()
    for name in NAMES:
        (root / name).write_text(name, errors="surrogateescape")
    return root


def same(one: Path, two: Path) -> bool:
    return tree.scan(str(one))[0] == tree.scan(str(two))[0]


def litter(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir() if ".incoming" in one.name or ".aside" in one.name]


# ---- there


def test_a_tree_arrives_whole_with_modes_links_and_odd_names(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    manifest = make_manifest(source)
    result = push_tree(link, source, manifest, str(tmp_path / "dest"))
    assert same(source, tmp_path / "dest") and not result.unchanged and litter(tmp_path) == []
    assert result.bytes_sent == manifest.size and result.files_sent == len(manifest.files)


def test_nothing_travels_when_nothing_changed_and_one_file_when_one_did(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    push_tree(link, source, make_manifest(source), str(tmp_path / "dest"))
    again = push_tree(link, source, make_manifest(source), str(tmp_path / "dest"))
    assert again.unchanged and again.bytes_sent == 0
    (source / "plain.txt").write_text("changed")
    (source / "with space").unlink()
    third = push_tree(link, source, make_manifest(source), str(tmp_path / "dest"))
    assert (third.files_sent, third.bytes_sent, third.unchanged) == (1, 7, False)
    assert same(source, tmp_path / "dest")


def test_a_changed_mode_or_link_is_a_change(link: Connection, source: Path, tmp_path: Path) -> None:
    push_tree(link, source, make_manifest(source), str(tmp_path / "dest"))
    (source / "pkg" / "run.sh").chmod(0o600)
    (source / "link").unlink()
    (source / "link").symlink_to("pkg")
    assert push_tree(link, source, make_manifest(source), str(tmp_path / "dest")).bytes_sent == 0
    assert same(source, tmp_path / "dest")


def test_what_the_node_made_in_a_pushed_tree_stays(link: Connection, source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    push_tree(link, source, make_manifest(source), str(dest))
    (dest / "outputs").mkdir()
    (dest / "outputs" / "model").write_text("weights")
    (dest / "plain.txt").write_text("edited on the node")
    (source / "new").write_text("new")
    push_tree(link, source, make_manifest(source), str(dest))
    assert (dest / "outputs" / "model").read_text() == "weights" and (
        dest / "plain.txt"
    ).read_text() == "plain.txt"


def test_a_folder_that_no_push_made_is_not_replaced_unasked(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "home" / "precious"
    dest.mkdir()
    (dest / "thesis").write_text("years")
    with pytest.raises(RequestFailed, match="not put there by a push") as caught:
        push_tree(link, source, make_manifest(source), "~/precious")
    assert "--replace" in caught.value.hint and (dest / "thesis").read_text() == "years"
    push_tree(link, source, make_manifest(source), "~/precious", replace=True)
    assert same(source, dest)


@pytest.mark.parametrize("fault", ["cut", "damaged", "cancelled"])
def test_an_interrupted_or_damaged_push_leaves_the_old_tree(
    link: Connection, source: Path, tmp_path: Path, fault: str
) -> None:
    dest = tmp_path / "dest"
    push_tree(link, source, make_manifest(source), str(dest))
    before = tree.scan(str(dest))[0]
    (source / "pkg" / "deep" / "big").write_bytes(os.urandom(3_000_000))
    text = make_manifest(source).text
    asked = link.open("receive", {"dest": str(dest), "tree": tree.tree_id(text), "manifest_size": len(text)})
    asked.send(text)
    assert next(iter(asked)).fields["want"]
    asked.send(bytes(3_000_000 if fault == "damaged" else 1_000_000))
    if fault == "cancelled":
        link.close()
    else:
        asked.finish()
        with pytest.raises(RequestFailed, match="the old tree is untouched"):
            asked.end()
    assert tree.scan(str(dest))[0] == before and litter(tmp_path) == []


def test_a_file_that_changes_while_it_is_sent_is_noticed(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    manifest = make_manifest(source)
    (source / "plain.txt").write_text("PLAIN.TXT")
    with pytest.raises(RequestFailed, match="changed while it was sent"):
        push_tree(link, source, manifest, str(tmp_path / "dest"))
    (source / "plain.txt").write_text("short")
    with pytest.raises(RequestFailed, match="became shorter"):
        push_tree(link, source, manifest, str(tmp_path / "dest"))
    wait_for(lambda: litter(tmp_path) == [])  # the node hears of the cancel a moment later
    assert not (tmp_path / "dest").exists()


def test_a_stored_tree_is_named_by_its_content_and_sent_once(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    manifest = make_manifest(source)
    first = push_store(link, source, manifest, "code")
    second = push_store(link, source, manifest, "code")
    assert first.path == second.path == str(tmp_path / "work" / "store" / "code" / manifest.id)
    assert not first.unchanged and second.unchanged and same(source, Path(first.path))


def test_a_full_disk_is_found_before_the_transfer(tmp_path: Path) -> None:
    builder = tree.Builder(str(tmp_path / "dest"), [Entry("f", "f", 0o644, 1 << 59, EMPTY)])
    with pytest.raises(Exception, match="MB are needed"):
        builder.room(builder.look())


def test_one_file_goes_into_a_folder_or_under_a_name(link: Connection, source: Path, tmp_path: Path) -> None:
    push_file(link, source / "pkg" / "run.sh", str(tmp_path / "bin") + "/")
    push_file(link, source / "pkg" / "run.sh", str(tmp_path / "other"))
    for path in (tmp_path / "bin" / "run.sh", tmp_path / "other"):
        assert path.read_text() == "#!/bin/sh\n" and path.stat().st_mode & 0o777 == 0o755


# ---- and back


def test_a_tree_comes_back_the_same_and_only_once(link: Connection, source: Path, tmp_path: Path) -> None:
    home = tmp_path / "pulled" / "node1"
    result = pull_tree(link, str(source), home)
    assert same(source, home) and result.bytes_sent > 3_000_000
    (home / "mine").write_text("mine")
    (source / "plain.txt").write_text("newer")
    second = pull_tree(link, str(source), home)
    assert (
        second.files_sent == 1
        and (home / "mine").read_text() == "mine"
        and (home / "plain.txt").read_text() == "newer"
    )
    assert pull_tree(link, str(source), home).unchanged


def test_pulling_what_is_not_there_says_so(link: Connection, tmp_path: Path) -> None:
    with pytest.raises(RequestFailed, match="no /not/there"):
        pull_tree(link, "/not/there", tmp_path / "dest")
    assert not (tmp_path / "dest").exists()


def test_a_pull_goes_below_the_nodes_own_folder() -> None:
    assert pull_place(Path("out"), "node1", "~/runs/x/") == Path("out/node1/x")
    for whole in ("~", "/", "..", "a/.."):
        assert pull_place(Path("out"), "node1", whole) == Path("out/node1")


HOSTILE = {
    "climbs": [("../evil", "f")],
    "is absolute": [("/tmp/evil", "f")],
    "climbs inside": [("d", "d"), ("d/../../evil", "f")],
    "hides a null byte": [("a\0b", "f")],
    "is the folder itself": [(".", "d")],
    "has no folder": [("d/f", "f")],
    "goes through a file": [("d", "f"), ("d/f", "f")],
    "goes through a link": [("d", "l", "."), ("d/f", "f")],
    "links to the root": [("l", "l", "/etc")],
    "links above": [("l", "l", "../x")],
    "links above through a folder": [("d", "d"), ("d/l", "l", "../../x")],
    "links above behind a name": [("d", "d"), ("d/l", "l", "x/../../..")],
    "comes twice": [("f", "f"), ("f", "f")],
    "differs by case": [("Makefile", "f"), ("makefile", "f")],
    "differs by accents": [("caf\u00e9", "f"), ("cafe\u0301", "f")],
    "is a device": [("null", "c")],
    "has no size": [("f", "f", "", "x")],
}


def rows(case: list[tuple[str, ...]]) -> bytes:
    return json.dumps(
        [
            [one[0], one[1], 0o644, one[3] if len(one) > 3 else 0, one[2] if len(one) > 2 else EMPTY]
            for one in case
        ]
    ).encode()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tree_is_refused_whole_on_both_sides(link: Connection, tmp_path: Path, name: str) -> None:
    text = rows(HOSTILE[name])
    asked = link.open(
        "receive", {"dest": str(tmp_path / "dest"), "tree": tree.tree_id(text), "manifest_size": len(text)}
    )
    asked.send(text)
    asked.finish()
    with pytest.raises(RequestFailed) as refused:
        asked.end()
    assert refused.value.kind == "bad-tree"
    hostile = ScriptedTransport(
        {("*", "tree"): [({"manifest": len(text)}, text), ({"ready": True}, b""), {}]}
    )
    with pytest.raises(RequestFailed):
        pull_tree(hostile.connect(local_node(tmp_path)), "x", tmp_path / "inside" / "dest")
    assert sorted(one.name for one in tmp_path.iterdir() if one.name not in ("home", "work")) == []


def test_a_node_that_sends_other_bytes_than_it_named_leaves_nothing(tmp_path: Path) -> None:
    text = rows([("f", "f", EMPTY, 5)])  # type: ignore[list-item]
    for content in (b"12345", b"12", b""):
        hostile = ScriptedTransport({("*", "tree"): [({}, text), ({"ready": True}, b""), ({}, content), {}]})
        with pytest.raises(RequestFailed):
            pull_tree(hostile.connect(local_node(tmp_path)), "x", tmp_path / "dest")
        assert list(tmp_path.iterdir()) == []


def test_a_node_that_asks_for_files_outside_the_tree_gets_none(source: Path, tmp_path: Path) -> None:
    for wish in (b"[99999]", b"[-1]", b'["/etc/passwd"]', b"{}x"):
        hostile = ScriptedTransport({("*", "receive"): [({"want": True}, wish), {"path": "x"}]})
        try:
            result = push_tree(hostile.connect(local_node(tmp_path)), source, make_manifest(source), "x")
            assert result.files_sent == 0
        except ClusterctlError as refusal:
            assert "not in the tree" in refusal.message


part = st.text(st.sampled_from("ab./\\\0é"), max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(part, st.sampled_from("fdl"), part), max_size=5))
def test_whatever_a_manifest_says_nothing_lands_outside(
    tmp_path_factory: pytest.TempPathFactory, case: list[tuple[str, str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    entries = [Entry(path, kind, 0o644, 0, EMPTY if kind == "f" else target) for path, kind, target in case]
    try:
        checked = tree.parse(tree.to_bytes(entries))
    except tree.BadTree:
        return
    builder = tree.Builder(str(folder / "in" / "dest"), checked)
    (folder / "in").mkdir()
    builder.build(builder.look(), ByteReader(lambda: b""))
    builder.switch()
    root = os.path.realpath(folder / "in" / "dest")
    for path, _, files in os.walk(root):
        assert all(os.path.realpath(os.path.join(path, one)).startswith(root) for one in files)
    assert os.listdir(folder) == ["in"] and os.listdir(folder / "in") == ["dest"]


# ---- what stays at home


def test_ignore_files_mean_what_git_means_by_them(tmp_path: Path) -> None:
    rules = "*.log\n!keep.log\n/build\ndoc/**\n# no\n\nsub/*.tmp\ncache/\n**/deep.txt\na[bc].x\n\\!odd\n"
    (tmp_path / ".gitignore").write_text(rules)
    paths = [
        "a.log",
        "keep.log",
        "x/b.log",
        "build/out",
        "x/build/in",
        "doc/a/b",
        "sub/one.tmp",
        "sub/in/two.tmp",
        "cache/f",
        "x/cache/f",
        "cachefile",
        "x/y/deep.txt",
        "ab.x",
        "ad.x",
        "!odd",
        "x/local.txt",
        "x/other.txt",
    ]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "x" / ".gitignore").write_text("local.txt\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    listed = subprocess.run(
        ["git", "-C", str(tmp_path), "ls-files", "-coz", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert sorted(one.path for one in make_manifest(tmp_path).files) == sorted(
        filter(None, listed.split("\0"))
    )


def test_version_control_and_caches_stay_home_and_everything_means_all_but_caches(tmp_path: Path) -> None:
    for path in (".git/config", "pkg/__pycache__/x.pyc", ".venv/bin/python", "pkg/code.py", "other/x"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / ".clusterctlignore").write_text("other\n")
    names = {one.path for one in make_manifest(tmp_path).files}
    assert names == {".clusterctlignore", "pkg/code.py"}
    assert ".git/config" in {one.path for one in make_manifest(tmp_path, include_vcs=True).files}
    assert len(make_manifest(tmp_path, everything=True).files) == 4
    assert {one.path for one in make_manifest(tmp_path, only=("pkg",)).files} == {"pkg/code.py"}


def test_links_that_leave_the_tree_are_named_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("/etc/passwd")
    (tmp_path / "two").symlink_to("../elsewhere")
    with pytest.raises(InputFaults) as caught:
        make_manifest(tmp_path)
    assert len(caught.value.faults) == 2 and ".clusterctlignore" in str(caught.value)


def test_a_source_that_is_no_folder_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        make_manifest(tmp_path / "missing")


def test_a_manifest_warns_of_what_nobody_can_have_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.push.MANY_FILES", 2)
    monkeypatch.setattr("clusterctl.push.MANY_BYTES", 5)
    os.mkfifo(tmp_path / "pipe")
    for name in "abc":
        (tmp_path / name).write_text("xxx")
    warnings = "\n".join(make_manifest(tmp_path).warnings)
    assert "pipe" in warnings and "3 entries" in warnings and "GB" in warnings
