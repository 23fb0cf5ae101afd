"""A load compares the checksum of each piece. It compares the SHA-256 if a piece has no checksum or a different one."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from native.hashes import checksum
from tests.support.checkpoints import saved, state_at
from trainer.checkpoint import read, write
from trainer.checkpoint.read import VerifiedFile, block_hashes
from trainer.checkpoint.store import open_checkpoint, verify
from trainer.errors import CheckpointError

PART = "part-00000.safetensors"
needs_library = pytest.mark.skipif(not checksum.is_available(), reason="no compiled library")


class Hashing:
    """Counts the pieces whose SHA-256 is compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces = 0
        monkeypatch.setattr(read, "block_hashes", self.block_hashes)

    def block_hashes(self, blocks: Sequence[memoryview]) -> bytes:
        self.pieces += len(blocks)
        return block_hashes(blocks)


def assert_loads(folder: Path) -> None:
    state = state_at(1)
    tensors = open_checkpoint(folder).read(list(state))
    assert all(torch.equal(tensors[key], state[key]) for key in state)


def assert_refused_when_damaged(folder: Path) -> None:
    file = folder / PART
    sound = file.read_bytes()
    data = 8 + int.from_bytes(sound[:8], "little")
    # Two bits of each word of the data.
    for place in range(8 * data, 8 * len(sound), 29):
        flipped = bytearray(sound)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"part-00000.*damaged: bytes .* are not what was saved"):
            assert_loads(folder)
    file.write_bytes(sound)


@needs_library
def test_a_load_compares_checksums_and_verify_the_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1,008 bytes.
    monkeypatch.setattr(write, "PIECE", 128)
    folder, hashing = saved(tmp_path, 1).path, Hashing(monkeypatch)
    assert_loads(folder)
    assert hashing.pieces == 0
    verify(folder)
    assert hashing.pieces == 8
    assert_refused_when_damaged(folder)


@needs_library
def test_where_a_checksum_differs_the_hash_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "PIECE", 128)
    with monkeypatch.context() as patch:
        right, numbers = checksum.block_checksums, itertools.count()

        def third_wrong(blocks: Sequence[memoryview]) -> bytes:
            return b"".join(bytes(checksum.SIZE) if next(numbers) == 2 else right([one]) for one in blocks)

        patch.setattr(checksum, "block_checksums", third_wrong)
        folder = saved(tmp_path, 1).path
    hashing = Hashing(monkeypatch)
    assert_loads(folder)
    assert hashing.pieces == 1
    assert_refused_when_damaged(folder)


@needs_library
@pytest.mark.parametrize("without", ["in the file", "on the node that loads"])
def test_without_checksums_a_load_compares_the_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    monkeypatch.setattr(write, "PIECE", 128)
    with monkeypatch.context() as patch:
        if without == "in the file":
            patch.setattr(checksum, "is_available", lambda: False)
        folder = saved(tmp_path, 1).path
    assert (b"checksum128" in (folder / PART).read_bytes()) == (without != "in the file")
    if without != "in the file":
        monkeypatch.setattr(checksum, "is_available", lambda: False)
    hashing = Hashing(monkeypatch)
    assert_loads(folder)
    assert hashing.pieces == 8
    assert_refused_when_damaged(folder)


@needs_library
@pytest.mark.parametrize("text", ["00", "zz" * checksum.SIZE, "00" * 2 * checksum.SIZE])
def test_checksums_that_are_not_one_for_each_piece_are_refused(tmp_path: Path, text: str) -> None:
    file = saved(tmp_path, 1).path / PART
    content = file.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    header = content[8:data]
    start = header.index(b'"checksum128":"') + len(b'"checksum128":"')
    header = header[:start] + text.encode() + header[start + 2 * checksum.SIZE :]
    header += b" " * (-len(header) % 8)
    start_of_file = len(header).to_bytes(8, "little") + header
    file.write_bytes(start_of_file + content[data:])
    with pytest.raises(CheckpointError, match="not one checksum for each piece"):
        VerifiedFile(file, hashlib.sha256(start_of_file).hexdigest())


@pytest.mark.parametrize("read_back", [True, False])
def test_a_save_leaves_the_data_in_memory_unless_it_reads_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_back: bool
) -> None:
    dropped = dict[str, tuple[int, int]]()
    advise = os.posix_fadvise

    def record(handle: int, offset: int, size: int, advice: int) -> None:
        dropped[Path(os.readlink(f"/proc/self/fd/{handle}")).name] = offset, size
        advise(handle, offset, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", record)
    saved(tmp_path, 1, read_back=read_back)
    # 0: all of the file.
    assert dropped[PART] == (0, 0 if read_back else write.PIECE)
