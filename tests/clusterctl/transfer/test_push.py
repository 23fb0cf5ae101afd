from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.agent.files import tree, tree_build
from clusterctl.agent.files.tree import Entry
from clusterctl.agent.request import Refused
from clusterctl.errors import InputFaults, LinkLost, UsageError
from clusterctl.transfer.pull import fold, pull_place, pull_tree
from clusterctl.transfer.push import (
    PushResult,
    Source,
    estimate,
    file_source,
    make_manifest,
    push_store,
    push_tree,
)
from clusterctl.transport.connection import Connection
from clusterctl.transport.link import PendingRequest, RequestFailed
from tests.support.nodes import connect, local_node, wait_for
from tests.support.scripted import ScriptedTransport

EMPTY = tree.hash_file(os.devnull)[1]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


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
    result = push_tree(link, Source(source, manifest), str(tmp_path / "dest"))
    assert same(source, tmp_path / "dest") and not result.unchanged and litter(tmp_path) == []
    assert result.bytes_sent == manifest.size and result.files_sent == len(manifest.files)


def test_nothing_travels_when_nothing_changed_and_one_file_when_one_did(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    push_tree(link, Source(source, make_manifest(source)), str(tmp_path / "dest"))
    again = push_tree(link, Source(source, make_manifest(source)), str(tmp_path / "dest"))
    assert again.unchanged and again.bytes_sent == 0
    (source / "plain.txt").write_text("changed")
    (source / "with space").unlink()
    third = push_tree(link, Source(source, make_manifest(source)), str(tmp_path / "dest"))
    assert (third.files_sent, third.bytes_sent, third.unchanged) == (1, 7, False)
    assert same(source, tmp_path / "dest")


def test_a_changed_mode_or_link_is_a_change(link: Connection, source: Path, tmp_path: Path) -> None:
    push_tree(link, Source(source, make_manifest(source)), str(tmp_path / "dest"))
    (source / "pkg" / "run.sh").chmod(0o600)
    (source / "link").unlink()
    (source / "link").symlink_to("pkg")
    assert push_tree(link, Source(source, make_manifest(source)), str(tmp_path / "dest")).bytes_sent == 0
    assert same(source, tmp_path / "dest")


def test_a_file_that_is_gone_here_goes_there_though_nothing_travels(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    push_tree(link, Source(source, make_manifest(source)), str(tmp_path / "dest"))
    (tmp_path / "dest" / "made there").write_text("stays")
    (source / "plain.txt").unlink()
    result = push_tree(link, Source(source, make_manifest(source)), str(tmp_path / "dest"))
    assert not result.unchanged and result.bytes_sent == 0
    assert not (tmp_path / "dest" / "plain.txt").exists()
    assert (tmp_path / "dest" / "made there").read_text() == "stays"


def test_what_the_node_made_in_a_pushed_tree_stays(link: Connection, source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    push_tree(link, Source(source, make_manifest(source)), str(dest))
    (dest / "outputs").mkdir()
    (dest / "outputs" / "model").write_text("weights")
    (dest / "plain.txt").write_text("edited on the node")
    (source / "new").write_text("new")
    push_tree(link, Source(source, make_manifest(source)), str(dest))
    assert (dest / "outputs" / "model").read_text() == "weights" and (
        dest / "plain.txt"
    ).read_text() == "plain.txt"


def test_a_folder_that_no_push_made_is_not_replaced_unasked(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "home" / "precious"
    dest.mkdir()
    (dest / "thesis").write_text("years")
    with pytest.raises(RequestFailed, match="no push created it") as caught:
        push_tree(link, Source(source, make_manifest(source)), "~/precious")
    assert "--replace" in caught.value.hint and (dest / "thesis").read_text() == "years"
    push_tree(link, Source(source, make_manifest(source)), "~/precious", replace=True)
    assert same(source, dest)


def test_a_path_that_cannot_be_written_or_is_missing_has_a_remedy(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestFailed, match="/proc/x cannot be written: No such file") as caught:
        push_tree(link, Source(source, make_manifest(source)), "/proc/x")
    assert "that you can write to" in caught.value.hint
    with pytest.raises(RequestFailed, match="no /no such/x") as caught:
        pull_tree(link, "/no such/x", tmp_path / "pulled")
    assert caught.value.hint == "list what is there: clusterctl exec -b all -- ls -la '/no such'"
    with pytest.raises(RequestFailed) as caught:
        pull_tree(link, "~/none/x", tmp_path / "pulled")
    assert caught.value.hint.endswith("clusterctl exec -b --shell all -- 'ls -la ~/none'")


@pytest.mark.parametrize("fault", ["cut", "damaged", "cancelled"])
def test_an_interrupted_or_damaged_push_leaves_the_old_tree(
    link: Connection, source: Path, tmp_path: Path, fault: str
) -> None:
    dest = tmp_path / "dest"
    push_tree(link, Source(source, make_manifest(source)), str(dest))
    before = tree.scan(str(dest))[0]
    (source / "pkg" / "deep" / "big").write_bytes(os.urandom(3_000_000))
    manifest = make_manifest(source)
    asked = receive(link, manifest.text, manifest.table, str(dest))
    assert next(iter(asked)).fields["want"]
    asked.send(bytes(3_000_000 if fault == "damaged" else 1_000_000))
    if fault == "cancelled":
        link.close()
    else:
        asked.finish()
        with pytest.raises(RequestFailed, match="the old tree is untouched"):
            asked.end()
    assert tree.scan(str(dest))[0] == before
    link.close()
    again = connect(tmp_path)
    push_tree(again, Source(source, manifest), str(dest))
    again.close()
    assert same(source, dest) and litter(tmp_path) == []


def receive(link: Connection, text: bytes, table: bytes, dest: str) -> PendingRequest:
    """A push up to its manifest, as a client would begin it."""
    params = {"dest": dest, "tree": tree.tree_id(text), "manifest_size": len(text), "table_size": len(table)}
    asked = link.open("receive", params)
    assert next(iter(asked)).fields["manifest"]
    asked.send(text)
    asked.send(table)
    return asked


@pytest.mark.parametrize("fault", ["the link is cut", "the agent is killed", "the client gives up"])
def test_after_a_cut_only_the_rest_travels(
    link: Connection, source: Path, tmp_path: Path, fault: str
) -> None:
    (source / "pkg" / "deep" / "big").write_bytes(os.urandom(8_000_000))
    manifest = make_manifest(source)
    dest = tmp_path / "dest"
    asked = receive(link, manifest.text, manifest.table, str(dest))
    assert next(iter(asked)).fields["want"]
    whole: list[bytes] = []
    Source(source, manifest).send([(0, manifest.pieces.count)], whole.append)
    asked.send(b"".join(whole)[: manifest.size - 3_000_000])
    aside = tmp_path / ".dest.incoming" / "pkg" / "deep" / "big"
    wait_for(lambda: aside.exists() and aside.stat().st_size >= 5_000_000 - tree.PIECE)
    if fault == "the agent is killed":
        os.kill(link.hello().pid, signal.SIGKILL)
    elif fault == "the client gives up":
        asked.cancel()
    link.close()
    assert not dest.exists()
    again = connect(tmp_path)
    try:
        result = push_tree(again, Source(source, manifest), str(dest))
    finally:
        again.close()
    assert result.bytes_sent <= 3_000_000 + tree.PIECE and same(source, dest) and litter(tmp_path) == []


def test_after_a_cut_the_remedy_is_to_continue(link: Connection, source: Path, tmp_path: Path) -> None:
    (source / "pkg" / "deep" / "big").write_bytes(os.urandom(30_000_000))
    pid = link.hello().pid
    with pytest.raises(LinkLost) as caught:
        push_tree(
            link,
            Source(source, make_manifest(source)),
            str(tmp_path / "dest"),
            progress=lambda sent, total: os.kill(pid, signal.SIGKILL),
        )
    assert "the same command again: it continues with what has arrived" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of another user")
def test_nothing_is_written_through_another_users_link(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    shared, secret = tmp_path / "shared", tmp_path / "secret"
    for folder in (shared, secret):
        folder.mkdir()
    shared.chmod(0o1777)
    (shared / "theirs").symlink_to(secret)
    (shared / "ours").symlink_to(secret)
    os.lchown(shared / "theirs", 12345, 12345)
    manifest = make_manifest(source)
    for dest in (shared / "theirs", shared / "theirs" / "below", shared / "theirs" / "a" / "b"):
        with pytest.raises(RequestFailed, match=f"{shared}/theirs is another user's link"):
            push_tree(link, Source(source, manifest), str(dest))
    assert not any(secret.iterdir())
    push_tree(link, Source(source, manifest), str(shared / "ours" / "below"))
    assert same(source, secret / "below")


def test_what_a_cut_left_is_not_believed(link: Connection, source: Path, tmp_path: Path) -> None:
    aside = tmp_path / ".dest.incoming"
    (aside / "pkg" / "deep").mkdir(parents=True)
    aside.chmod(0o700)
    (aside / "pkg" / "deep" / "big").write_bytes(b"x" * 3_000_000)
    (aside / "plain.txt").write_text("PLAIN.TXT")
    (aside / "evil").symlink_to("/etc")
    (aside / "with space").mkdir()
    (aside / "empty").symlink_to("/etc")
    (aside / "other").mkdir()
    push_tree(link, Source(source, make_manifest(source)), str(tmp_path / "dest"))
    assert same(source, tmp_path / "dest") and litter(tmp_path) == []


def test_a_folder_aside_that_somebody_else_can_write_is_not_used(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    (tmp_path / ".dest.incoming").mkdir()
    (tmp_path / ".dest.incoming").chmod(0o777)
    with pytest.raises(RequestFailed, match="not private to this user"):
        push_tree(link, Source(source, make_manifest(source)), str(tmp_path / "dest"))


def test_two_pushes_to_one_place_at_once_end_one_after_the_other(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_bytes(os.urandom(5_000_000))
    results: list[str] = []

    def push(root: Path) -> None:
        results.append(push_tree(link, Source(root, make_manifest(root)), str(tmp_path / "dest")).path)

    threads = [threading.Thread(target=push, args=(root,)) for root in (source, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and litter(tmp_path) == []
    assert all((tmp_path / "dest" / one).exists() for one in ("file",)) or same(source, tmp_path / "dest")


def test_nodes_that_share_a_file_system_take_a_tree_once(source: Path, tmp_path: Path) -> None:
    links = [connect(tmp_path) for _ in range(3)]
    manifest = make_manifest(source)
    results: list[PushResult] = []

    def push(link: Connection) -> None:
        results.append(push_tree(link, Source(source, manifest), str(tmp_path / "dest")))

    threads = [threading.Thread(target=push, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for link in links:
        link.close()
    assert sorted(one.bytes_sent for one in results) == [0, 0, manifest.size]
    assert same(source, tmp_path / "dest") and litter(tmp_path) == []


def test_an_unchanged_tree_is_known_by_its_times_and_a_forged_time_changes_nothing_else(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    """A change within the grain of a file system's clock leaves no trace: files just written are read again."""
    dest = tmp_path / "dest"
    push_tree(link, Source(source, make_manifest(source)), str(dest))
    big, status = dest / "pkg" / "deep" / "big", (dest / "pkg" / "deep" / "big").stat()
    big.write_bytes(os.urandom(3_000_000))
    # The change's own time can't be set back.
    os.utime(big, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not push_tree(link, Source(source, make_manifest(source)), str(dest)).unchanged
    assert same(source, dest)


@pytest.mark.parametrize("names", [("Data.txt", "data.TXT"), ("stra\u00dfe", "STRASSE"), ("a\nb", "A\nB")])
def test_two_names_that_are_one_on_some_disks_are_refused_before_anything_is_sent(
    names: tuple[str, str], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).touch()
    if len(os.listdir(tmp_path)) == 1:
        pytest.skip("the disk of this machine has one name for both")
    with pytest.raises(UsageError, match="are one name on some file systems") as refused:
        make_manifest(tmp_path)
    assert "rename one of them" in refused.value.hint


def test_files_are_not_read_again_until_they_change(source: Path) -> None:
    make_manifest(source)
    # Longer than the grain of file times.
    time.sleep(0.1)
    first = make_manifest(source)
    os.chmod(source / "plain.txt", 0)
    os.chmod(source / "plain.txt", 0o644)
    (source / "with space").write_text("other text")
    second = make_manifest(source)
    changed = {one.path for one in set(second.entries) - set(first.entries)}
    assert changed == {"with space"} and make_manifest(source, recheck=True) == second


def test_code_that_changed_a_little_sends_a_little(link: Connection, source: Path) -> None:
    push_store(link, Source(source, make_manifest(source)), "code")
    (source / "plain.txt").write_text("changed")
    result = push_store(link, Source(source, make_manifest(source)), "code")
    assert (result.bytes_sent, result.files_sent) == (7, 1) and same(source, Path(result.path))


def test_a_rehearsal_says_what_would_travel_and_changes_nothing(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    manifest = make_manifest(source)
    would = estimate(link, Source(source, manifest), str(tmp_path / "deep" / "dest"))
    assert (would.files, would.bytes) == (len(manifest.files), manifest.size) and not would.unchanged
    assert not (tmp_path / "deep").exists()
    push_tree(link, Source(source, manifest), str(tmp_path / "dest"))
    assert estimate(link, Source(source, manifest), str(tmp_path / "dest")).unchanged


def test_a_file_that_changes_while_it_is_sent_is_noticed(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    manifest = make_manifest(source)
    (source / "plain.txt").write_text("PLAIN.TXT")
    with pytest.raises(RequestFailed, match="changed while it was sent"):
        push_tree(link, Source(source, manifest), str(tmp_path / "dest"))
    (source / "plain.txt").write_text("short")
    with pytest.raises(RequestFailed, match="became shorter"):
        push_tree(link, Source(source, manifest), str(tmp_path / "dest"))
    assert not (tmp_path / "dest").exists()
    push_tree(link, Source(source, make_manifest(source)), str(tmp_path / "dest"))
    assert same(source, tmp_path / "dest") and litter(tmp_path) == []


def test_a_file_that_grows_while_it_is_sent_is_named(link: Connection, source: Path, tmp_path: Path) -> None:
    manifest = make_manifest(source)
    with (source / "plain.txt").open("a") as file:
        file.write(", and more")
    result = push_tree(link, Source(source, manifest), str(tmp_path / "dest"))
    assert result.notes == ("plain.txt grew while it was sent: its first 9 of 19 bytes came",)
    assert (tmp_path / "dest" / "plain.txt").read_text() == "plain.txt"
    again = push_tree(link, Source(source, make_manifest(source)), str(tmp_path / "dest"))
    assert again.notes == () and again.files_sent == 1
    # Its first and third piece are sent, and the second is not.
    manifest = make_manifest(source)
    with (source / "pkg" / "deep" / "big").open("ab") as file:
        file.write(b"and more")
    begin, end = manifest.pieces.of([entry.path for entry in manifest.files].index("pkg/deep/big"))
    sent: list[bytes] = []
    notes = Source(source, manifest).send([(begin, begin + 1), (end - 1, end)], sent.append)
    assert notes == ("pkg/deep/big grew while it was sent: its first 3000000 of 3000008 bytes came",)
    assert sum(map(len, sent)) == 3_000_000 - tree.PIECE


def test_a_path_may_begin_with_two_slashes(link: Connection, source: Path, tmp_path: Path) -> None:
    push_tree(link, Source(source, make_manifest(source)), f"/{tmp_path}/dest")
    assert same(source, tmp_path / "dest")


def test_a_stored_tree_is_named_by_its_content_and_sent_once(
    link: Connection, source: Path, tmp_path: Path
) -> None:
    manifest = make_manifest(source)
    first = push_store(link, Source(source, manifest), "code")
    second = push_store(link, Source(source, manifest), "code")
    assert first.path == second.path == str(tmp_path / "work" / "store" / "code" / manifest.id)
    assert not first.unchanged and second.unchanged and same(source, Path(first.path))


def test_a_full_disk_is_found_before_the_transfer(tmp_path: Path) -> None:
    # 64 TB.
    size = 1 << 46
    table = bytes(tree.DIGEST * (size // tree.piece_size(size)))
    entry = Entry("f", "f", 0o644, size, tree.content_name(table))
    builder = tree_build.Builder(str(tmp_path / "dest"), [entry], table)
    with pytest.raises(Refused, match="MB are needed"):
        builder.room(builder.find_missing([]))


def test_a_disk_without_room_for_more_files_is_found_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs(tmp_path)
    values = list(full)
    # f_favail.
    values[7] = 3
    monkeypatch.setattr("os.statvfs", lambda path: os.statvfs_result(values))
    entries = [Entry(f"f{number}", "f", 0o644, 0, EMPTY) for number in range(5)]
    with pytest.raises(Refused, match="3 more files"):
        tree_build.Builder(str(tmp_path / "dest"), entries).room([])


def test_one_file_goes_into_a_folder_or_under_a_name(link: Connection, source: Path, tmp_path: Path) -> None:
    for dest in (str(tmp_path / "bin") + "/", str(tmp_path / "other")):
        one, target = file_source(source / "pkg" / "run.sh", dest)
        assert not push_tree(link, one, target).unchanged
        assert push_tree(link, one, target).unchanged
        assert Path(target).read_text() == "#!/bin/sh\n" and Path(target).stat().st_mode & 0o777 == 0o755
    (source / "pkg" / "run.sh").write_text("other")
    push_tree(link, *file_source(source / "pkg" / "run.sh", str(tmp_path / "other")))
    assert (tmp_path / "other").read_text() == "other" and litter(tmp_path) == litter(tmp_path / "bin") == []
    with pytest.raises(RequestFailed, match="is a folder"):
        push_tree(link, *file_source(source / "pkg" / "run.sh", str(tmp_path / "bin")))
    with pytest.raises(UsageError, match="is a folder"):
        file_source(source / "pkg" / "run.sh", "~")


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


def test_a_device_or_a_pipe_is_not_pulled(link: Connection, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(RequestFailed, match=f"{path} is neither a file nor a folder"):
            pull_tree(link, path, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_pull_says_what_it_left_out(link: Connection, source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "pkg" / "pipe")
    left_out = ("pkg/pipe: neither file, folder nor link; left out",)
    for unchanged in (False, True):
        result = pull_tree(link, str(source), tmp_path / "dest")
        assert (result.unchanged, result.notes) == (unchanged, left_out)


def test_a_pull_names_a_file_that_grows_while_it_is_copied(link: Connection, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    log, copied = tmp_path / "source" / "out.log", tmp_path / "dest" / "out.log"
    log.write_bytes(bytes(range(256)) * (12 << 12))
    over = threading.Event()

    def write() -> None:
        with log.open("ab", buffering=0) as file:
            while not over.wait(0.0005):
                file.write(b"a line\n")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        result = pull_tree(link, str(log.parent), copied.parent)
    finally:
        over.set()
        writer.join()
    size = copied.stat().st_size
    assert len(result.notes) == 1
    assert re.fullmatch(
        rf"out.log grew while it was sent: its first {size} of \d+ bytes came", result.notes[0]
    )
    assert copied.read_bytes() == log.read_bytes()[:size]


def test_a_file_that_is_always_written_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * (3 * tree.PIECE))
    before = tree.content_of(str(path))
    with pytest.MonkeyPatch.context() as patch, path.open("ab", buffering=0) as file:
        read, more = os.pread, iter([b"b" * tree.PIECE] * 9)
        patch.setattr(os, "pread", lambda *which: (file.write(next(more, b"")), read(*which))[1])
        assert tree.content_of(str(path)) == before


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
    asked = receive(link, text, b"", str(tmp_path / "dest"))
    asked.finish()
    with pytest.raises(RequestFailed) as refused:
        asked.end()
    assert refused.value.kind == "bad-tree"
    hostile = ScriptedTransport(
        {("*", "tree"): [({"manifest": len(text)}, text), ({"ready": True}, b""), {}]}
    )
    with pytest.raises(
        RequestFailed, match=r"leads outside|one name on some|in no folder of|not an entry of a tree"
    ):
        pull_tree(hostile.connect(local_node(tmp_path)), "x", tmp_path / "inside" / "dest")
    assert sorted(one.name for one in tmp_path.iterdir() if one.name not in ("home", "work")) == []


def test_a_node_that_sends_other_bytes_than_it_named_leaves_nothing(tmp_path: Path) -> None:
    text = rows([("f", "f", EMPTY, 5)])  # type: ignore[list-item]
    sizes = {"manifest": len(text)}
    for content in (b"12345", b"12", b""):
        hostile = ScriptedTransport(
            {("*", "tree"): [(sizes, text), ({"ready": True}, b""), ({}, content), {}]}
        )
        with pytest.raises(RequestFailed, match=r"arrived damaged|ended inside f"):
            pull_tree(hostile.connect(local_node(tmp_path)), "x", tmp_path / "dest")
        assert list(tmp_path.iterdir()) == []


def test_a_node_that_asks_for_files_outside_the_tree_gets_none(source: Path, tmp_path: Path) -> None:
    wishes = [b"[[0,99999]]", b"[[-1,1]]", b"[[1,1]]", b"[[0,2],[1,3]]", b'["/etc/passwd"]', b"[99]", b"{}x"]
    for wish in [*wishes, b"[[0,1]]" * 2, b"[[0,true]]", b"[" * 100_000]:
        for field in ("want", "feed"):
            hostile = ScriptedTransport({("*", "receive"): [({field: True}, wish), {"path": "x"}]})
            with pytest.raises(RequestFailed, match="not in the tree"):
                push_tree(hostile.connect(local_node(tmp_path)), Source(source, make_manifest(source)), "x")


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
    builder = tree_build.Builder(str(folder / "in" / "dest"), checked)
    builder.stage()
    builder.adopt()
    for begin, end in builder.find_missing([]):
        for number in range(begin, end):
            builder.take(number, b"", builder.pieces[number])
    builder.copy_over()
    builder.finish()
    builder.switch()
    builder.close()
    root = os.path.realpath(folder / "in" / "dest")
    for path, _, files in os.walk(root):
        assert all(os.path.realpath(os.path.join(path, one)).startswith(root) for one in files)
    assert os.listdir(folder) == ["in"] and os.listdir(folder / "in") == ["dest"]


def test_a_cut_pull_goes_on(link: Connection, source: Path, tmp_path: Path) -> None:
    (source / "pkg" / "deep" / "big").write_bytes(os.urandom(8_000_000))
    home = tmp_path / "pulled"

    def cut(done: int, total: int) -> None:
        if done > 5_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_tree(link, str(source), home, progress=cut)
    assert not home.exists()
    result = pull_tree(link, str(source), home)
    assert same(source, home) and result.bytes_sent < 5_000_000 and litter(tmp_path) == []


def test_equal_files_of_several_nodes_are_folded_into_one(tmp_path: Path) -> None:
    for node, text in (("a", "same"), ("b", "same"), ("c", "else")):
        (tmp_path / node / "deep").mkdir(parents=True)
        (tmp_path / node / "deep" / "file").write_text(text)
        (tmp_path / node / "script").write_text("same")
        (tmp_path / node / "script").chmod(0o755)
    assert fold([tmp_path / node for node in "abc"]) == (3, 12)
    assert (tmp_path / "a" / "deep" / "file").samefile(tmp_path / "b" / "deep" / "file")
    assert (tmp_path / "c" / "deep" / "file").read_text() == "else"
    assert (tmp_path / "a" / "script").stat().st_nlink == 3 and litter(tmp_path / "a") == []
    assert fold([tmp_path / node for node in "abc"]) == (0, 0)


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


def test_the_runs_of_a_project_and_a_sandbox_in_it_do_not_travel_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x")
    alone = make_manifest(tmp_path, without=tmp_path / "out" / "runs")
    for path in ("out/runs/one/run.json", "out/kept", "runs.py", ".clusterctl-sandbox/keys/id_ed25519"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    beside = make_manifest(tmp_path, without=tmp_path / "out" / "runs")
    assert {one.path for one in beside.files} == {"train.py", "runs.py", "out/kept"}
    (tmp_path / "out" / "kept").unlink()
    (tmp_path / "runs.py").unlink()
    assert make_manifest(tmp_path, without=tmp_path / "out").id == alone.id
    elsewhere = make_manifest(tmp_path / "out", without=tmp_path)
    assert {one.path for one in elsewhere.files} == {"runs/one/run.json"}


def test_links_that_leave_the_tree_are_named_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("/etc/passwd")
    (tmp_path / "two").symlink_to("../elsewhere")
    with pytest.raises(InputFaults) as caught:
        make_manifest(tmp_path)
    assert len(caught.value.faults) == 2 and ".clusterctlignore" in str(caught.value)


def test_a_source_that_is_no_folder_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        make_manifest(tmp_path / "missing")


def test_a_manifest_warns_of_what_nobody_can_have_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.transfer.manifest.MANY_FILES", 2)
    monkeypatch.setattr("clusterctl.transfer.manifest.MANY_BYTES", 5)
    os.mkfifo(tmp_path / "pipe")
    for name in "abc":
        (tmp_path / name).write_text("xxx")
    warnings = "\n".join(make_manifest(tmp_path).warnings)
    assert "pipe" in warnings and "3 entries" in warnings and "GB" in warnings


def test_the_files_of_some_pieces_are_counted_once_each(tmp_path: Path) -> None:
    for name, size in (("a", 10), ("b", 3 * tree.PIECE), ("c", 0), ("d", 10)):
        (tmp_path / name).write_bytes(b"x" * size)
    scanned = tree.scan(str(tmp_path))
    pieces = tree.Pieces(scanned.entries, scanned.table)
    for ranges in ([], [(0, 6)], [(0, 1), (1, 2), (3, 4)], [(2, 5)], [(1, 2), (3, 4), (5, 6)]):
        files = [pieces[number].file for begin, end in ranges for number in range(begin, end)]
        assert pieces.file_count(ranges) == len(set(files))
        spans = [(file, number) for file, begin, end in pieces.spans(ranges) for number in range(begin, end)]
        assert [file for file, _ in spans] == files


def test_keys_and_passwords_stay_home_by_name_and_are_named(tmp_path: Path) -> None:
    secrets = [".env", ".env.local", "x/id_ed25519", "x/ca.pem", ".ssh/config", ".netrc", ".aws/credentials"]
    others = [".env.example", "x/id_ed25519.pub", "environment", "pem.py", "x/.envrc"]
    for path in (*secrets, *others, "ignored/.env"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    rules = tmp_path / ".clusterctlignore"
    rules.write_text("ignored\n")
    manifest = make_manifest(tmp_path)
    assert {one.path for one in manifest.files} == {*others, rules.name}
    (warning,) = manifest.warnings
    named = warning.partition("passwords: ")[2].partition(";")[0]
    assert named == ".aws/, .env, .env.local, .netrc, .ssh/ and 2 more" and "!.env in" in warning
    # A rule decides, whether it keeps the file or leaves it out, and then nothing is said about it.
    rules.write_text("ignored\n!.env\n!x/ca.pem\n.env.local\n.ssh\n.aws\n.netrc\nx/id_ed25519\n")
    manifest = make_manifest(tmp_path)
    assert {one.path for one in manifest.files} == {*others, rules.name, ".env", "x/ca.pem"}
    assert manifest.warnings == ()
    # Data is sent as it is.
    assert ".env" in {one.path for one in make_manifest(tmp_path, everything=True).files}
