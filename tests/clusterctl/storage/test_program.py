"""Uploads and downloads: interrupted, damaged, refused, and what the store then holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from clusterctl.errors import UsageError, WorkFailed
from clusterctl.storage import program
from clusterctl.storage.address import parse_address
from clusterctl.storage.client import Downloaded, FileList, StoredFile, here, read_list
from clusterctl.storage.credentials import Access
from tests.support.object_store import KEY, SECRET, ObjectStore, object_store

pytest.importorskip("boto3", reason="boto3 is not installed: the extra `storage`")
SIZE = 5 * (1 << 20) + 12345


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "PIECE", 1 << 20)


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with object_store() as found:
        yield found


@pytest.fixture
def access(store: ObjectStore) -> Access:
    return Access(parse_address("s3://bucket/data"), store.url, "", (KEY, SECRET, ""))


@pytest.fixture
def big(tmp_path: Path) -> Path:
    (tmp_path / "big").write_bytes(os.urandom(SIZE))
    return tmp_path / "big"


def sent(access: Access, *paths: Path) -> FileList:
    return FileList(
        here(access).upload({path.name: str(path) for path in paths}, parse_address("s3://bucket/data"))
    )


def fetched(access: Access, found: FileList, folder: Path) -> Downloaded:
    return here(access).download(found.files, access.address, str(folder))


def test_files_go_there_and_come_back_whole(
    tmp_path: Path, store: ObjectStore, access: Access, big: Path
) -> None:
    (tmp_path / "empty").touch()
    found = sent(access, big, tmp_path / "empty")
    assert store.objects["data/big"] == big.read_bytes() and store.objects["data/empty"] == b""
    assert read_list(found.text(), "list") == found and found.size == SIZE
    assert fetched(access, found, tmp_path / "back") == Downloaded(SIZE, 0)
    assert (tmp_path / "back" / "big").read_bytes() == big.read_bytes()
    assert fetched(access, found, tmp_path / "back") == Downloaded(0, SIZE)
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["big", "empty"]


def test_an_interrupted_upload_leaves_no_object_and_continues_with_its_parts(
    store: ObjectStore, access: Access, big: Path
) -> None:
    store.parts_allowed = 3
    with pytest.raises(
        WorkFailed, match=r"s3://bucket/data/big: the store refuses UploadPart: AccessDenied \(HTTP 403\)"
    ):
        sent(access, big)
    assert "data/big" not in store.objects and len(store.uploads) == 1
    store.parts_allowed, before = None, len(store.requests)
    sent(access, big)
    assert store.objects["data/big"] == big.read_bytes() and not store.uploads
    assert sum(line.startswith("PUT") for line in store.requests[before:]) == 3


def test_a_part_that_is_damaged_on_the_way_is_sent_again(
    store: ObjectStore, access: Access, big: Path
) -> None:
    store.damages = 2
    found = sent(access, big)
    assert store.objects["data/big"] == big.read_bytes()
    pieces = [big.read_bytes()[start : start + (1 << 20)] for start in range(0, SIZE, 1 << 20)]
    assert found.files["big"].pieces == tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)


def test_a_way_that_always_damages_is_reported(store: ObjectStore, access: Access, big: Path) -> None:
    store.damages = 1000
    with pytest.raises(WorkFailed, match="UploadPart: XAmzContentSHA256Mismatch") as raised:
        sent(access, big)
    assert "bytes change on the way" in raised.value.hint and not store.objects


class Counted:
    """The hashes of the program, counted."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(hashlib, name)


def test_bytes_are_hashed_once(
    tmp_path: Path, access: Access, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()
    monkeypatch.setattr(program, "hashlib", counted)
    found = sent(access, big)
    # Each part has the hash that its request was signed with.
    assert counted.names == []
    fetched(access, found, tmp_path / "back")
    assert counted.names == ["sha256"] * 6
    fetched(access, found, tmp_path / "back")
    assert counted.names == ["sha256"] * 12


def test_this_machine_opens_a_store_once(
    tmp_path: Path, access: Access, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = []
    opened = program.open_store
    monkeypatch.setattr(program, "open_store", lambda order: (orders.append(order), opened(order))[1])
    client = here(access)
    found = client.upload({"big": str(big)}, access.address)
    client.download(found, access.address, str(tmp_path / "back"))
    assert len(orders) == 1


def test_small_files_are_moved_at_the_same_time(tmp_path: Path, store: ObjectStore, access: Access) -> None:
    files = [tmp_path / f"small{number}" for number in range(4)]
    for path in files:
        path.write_bytes(path.name.encode())
    store.before_write = Barrier(2, timeout=20).wait
    found = sent(access, *files)
    assert fetched(access, found, tmp_path / "back") == Downloaded(24, 0)


def test_a_download_survives_broken_connections_and_continues_after_an_end(
    tmp_path: Path, store: ObjectStore, access: Access, big: Path
) -> None:
    found = sent(access, big)
    store.cuts = 3
    assert fetched(access, found, tmp_path / "one").fetched == SIZE
    # As an interrupted download leaves it: some pieces are there, one is half.
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "big.part").write_bytes(big.read_bytes()[: 3 * (1 << 20) + 5])
    assert fetched(access, found, tmp_path / "two").fetched == SIZE - 3 * (1 << 20)
    assert (tmp_path / "two" / "big").read_bytes() == big.read_bytes()


def test_no_more_is_read_than_a_piece_has(
    tmp_path: Path, store: ObjectStore, access: Access, big: Path
) -> None:
    found = sent(access, big)
    store.is_endless = True
    assert fetched(access, found, tmp_path / "back").fetched == SIZE
    assert (tmp_path / "back" / "big").read_bytes() == big.read_bytes()


def test_a_damaged_object_is_never_taken(
    tmp_path: Path, store: ObjectStore, access: Access, big: Path
) -> None:
    found = sent(access, big)
    whole = store.objects["data/big"]
    store.objects["data/big"] = whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]
    with pytest.raises(WorkFailed, match="data/big: bytes from 0 differ from their hash"):
        fetched(access, found, tmp_path / "back")
    store.objects["data/big"] = whole[:-1]
    with pytest.raises(WorkFailed, match=f"has {SIZE - 1} bytes in the store, {SIZE} were expected"):
        fetched(access, found, tmp_path / "back")
    assert not (tmp_path / "back" / "big").exists()
    # A file here that was damaged later is repaired.
    store.objects["data/big"] = whole
    fetched(access, found, tmp_path / "back")
    with (tmp_path / "back" / "big").open("r+b") as file:
        file.seek(2 << 20)
        file.write(b"other")
    assert fetched(access, found, tmp_path / "back").fetched == 1 << 20


@pytest.mark.parametrize(
    ("change", "text", "hint"),
    [
        ({"address": parse_address("s3://other-bucket/x")}, "NoSuchBucket", "create the bucket"),
        ({"keys": ("WRONG", SECRET, "")}, "InvalidAccessKeyId", "check AWS_ACCESS_KEY_ID"),
        ({"endpoint": "http://127.0.0.1:1"}, "the store cannot be reached", "endpoint: URL"),
    ],
)
def test_a_store_that_refuses_or_does_not_answer_is_named_with_a_remedy(
    access: Access, change: dict[str, Any], text: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=text) as raised:
        changed = replace(access, **change)
        here(changed).probe(changed.address / "probe")
    assert hint in raised.value.hint
    assert SECRET not in str(raised.value) + raised.value.hint


def test_a_probe_leaves_nothing(store: ObjectStore, access: Access) -> None:
    here(access).probe(access.address / "probe")
    assert not store.objects
    store.refuses_writes = True
    with pytest.raises(UsageError, match="refuses PutObject: AccessDenied"):
        here(access).probe(access.address / "probe")


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/./b", "a\\b", ""])
def test_a_list_that_names_files_elsewhere_is_refused(name: str) -> None:
    text = FileList({name: StoredFile(0, 1 << 20, (hashlib.sha256().hexdigest(),))}).text()
    with pytest.raises(WorkFailed, match="no path inside the folder"):
        read_list(text, "list")


def test_a_damaged_list_is_refused() -> None:
    bad = [
        "",
        "[]",
        '{"files": 1}',
        FileList({"x": StoredFile(5, 0, ())}).text(),
        FileList({}, format=9).text(),
    ]
    for text in bad:
        with pytest.raises(WorkFailed, match="list: "):
            read_list(text, "list")
