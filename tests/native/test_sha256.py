from __future__ import annotations

import hashlib
import os

import pytest

from native.hashes import sha256


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("piece", [1, 55, 56, 63, 64, 65, 1000, 4096])
def test_pieces_have_the_hashes_of_hashlib(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, piece: int
) -> None:
    if compiled and not sha256._is_compiled():
        pytest.skip("no compiled library, or a processor without SHA instructions")
    monkeypatch.setattr(sha256, "_is_compiled", lambda: compiled)
    for size in (0, 1, piece - 1, piece, piece + 1, 2 * piece, 5 * piece + 7, 16 * piece, 37 * piece - 1):
        data = os.urandom(size + 1)
        # From an odd address on, and from memory that may not be written.
        for view in (memoryview(data)[1:], memoryview(bytearray(data))[1:]):
            expected = [hashlib.sha256(view[at : at + piece]).digest() for at in range(0, size, piece)]
            assert sha256.piece_hashes(view, piece) == b"".join(expected)
