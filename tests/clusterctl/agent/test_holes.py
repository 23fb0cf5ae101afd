"""Logs that grow too long: the middle becomes a hole, which readers skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterctl.agent.holes import HEAD, read, trim
from clusterctl.logs.store import KeptFile, LogKeeper

LINE = b"0123456789abcde\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return a log of 8 MB, trimmed to 2 MB and its head."""
    path = tmp_path / "rank-0.out"
    path.write_bytes(LINE * (1 << 19))
    if not trim(str(path), 4 << 20):
        pytest.skip("no holes on this file system")
    return path


def test_the_middle_is_freed_and_all_other_bytes_keep_their_places(log: Path) -> None:
    status = log.stat()
    assert status.st_size == 1 << 23 and status.st_blocks * 512 <= HEAD + (2 << 20) + (1 << 16)
    assert trim(str(log), 4 << 20) == 0, "it is small enough now"
    with log.open("rb") as file:
        assert read(file.fileno(), 0, 100) == (0, (LINE * 7)[:100])
        assert read(file.fileno(), HEAD - 16, 100) == (HEAD - 16, LINE)
        start, data = read(file.fileno(), HEAD, 1 << 22)
        assert start == (1 << 23) - len(data) and data == LINE * (len(data) // 16) and len(data) == 2 << 20
        assert read(file.fileno(), HEAD + 5000, 16) == (start, LINE)
        assert read(file.fileno(), 1 << 23, 16) == (1 << 23, b"")


def test_a_hole_at_the_end_and_zeros_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"ab\0\0cd")
    with path.open("rb+") as file:
        assert read(file.fileno(), 0, 10) == (0, b"ab\0\0cd")
        os.truncate(path, 1 << 20)
        start, data = read(file.fileno(), 0, 10)
        assert (start, data[:6]) == (0, b"ab\0\0cd")
        assert read(file.fileno(), 1 << 16, 10) == (1 << 20, b"")


def test_a_copy_has_the_hole_too_and_is_shown_with_a_line_in_its_place(log: Path, tmp_path: Path) -> None:
    home = tmp_path / "home" / "rank-0.out"
    offset = 0
    with log.open("rb") as file:
        while offset < log.stat().st_size:
            start, data = read(file.fileno(), offset, 1 << 16)
            assert LogKeeper.keep(home, start, data, start - offset) == data
            offset = start + len(data)
    assert home.stat().st_size == 1 << 23 and home.stat().st_blocks * 512 < 4 << 20
    with pytest.raises(ValueError, match="are missing"):
        LogKeeper.keep(home, (1 << 23) + 100, b"x", 50)
    lines = b"".join(chunk.data for chunk in KeptFile("n", 0, "out", home).chunks()).splitlines(keepends=True)
    gap = lines.index(b"[clusterctl: 5.2 MB of this log were dropped: log_limit]\n")
    assert gap == HEAD // 16 and lines[:gap] == [LINE] * gap and set(lines[gap + 1 :]) == {LINE}
    assert len(lines) == 1 + (HEAD + (2 << 20)) // 16


def test_a_copy_is_trimmed_as_it_grows(tmp_path: Path) -> None:
    home, offset = tmp_path / "rank-0.out", 0
    for _ in range(40):
        LogKeeper.keep(home, offset, LINE * (1 << 16), limit=16 << 20)
        offset += 1 << 20
    assert home.stat().st_size == 40 << 20 and home.stat().st_blocks * 512 <= 32 << 20
