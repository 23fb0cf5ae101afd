from __future__ import annotations

import os
import random

import pytest

from native.compiled import library
from native.hashes import checksum

LANES = 32
FACTOR, OTHER_FACTOR = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93


def mixed(state: int, word: int, factor: int = FACTOR) -> int:
    state = (state ^ word) * factor % 2**64
    return state ^ state >> 32


def reference(block: bytes) -> bytes:
    """The checksum in plain Python."""
    lanes = [(lane + 1) * FACTOR % 2**64 for lane in range(LANES)]
    padded = block + bytes(-len(block) % (8 * LANES))
    for at in range(0, len(padded), 8):
        lane = at // 8 % LANES
        lanes[lane] = mixed(lanes[lane], int.from_bytes(padded[at : at + 8], "little"))
    sums = [len(block)] * 2
    for lane in lanes:
        sums = [mixed(sums[0], lane), mixed(sums[1], lane, OTHER_FACTOR)]
    return b"".join(one.to_bytes(8, "little") for one in sums)


@pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
def test_every_level_gives_the_checksum_of_plain_python(compiled: object, level: int) -> None:
    found = library.load()
    own = found.level
    if level > own:
        pytest.skip(f"this processor's level is {library.LEVELS[own]}")
    data = os.urandom(100_100)
    object.__setattr__(found, "level", level)
    try:
        for size in (*range(301), 511, 512, 513, 8_191, 100_003):
            # Odd and even addresses, and memory that may not be written.
            start = size % 17
            block = data[start : start + size]
            views = [
                memoryview(data)[start : start + size],
                memoryview(bytearray(data))[start : start + size],
            ]
            assert checksum.block_checksums(views) == 2 * reference(block), size
    finally:
        object.__setattr__(found, "level", own)


def test_every_flipped_bit_and_every_lost_or_swapped_word_is_noticed(compiled: object) -> None:
    data = random.Random(7).randbytes(700)
    changed = []
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        changed.append(bytes(flipped))
    for at in range(0, len(data) - 16, 8):
        changed.append(data[:at] + bytes(8) + data[at + 8 :])
        changed.append(data[:at] + data[at + 8 : at + 16] + data[at : at + 8] + data[at + 16 :])
    changed += [data + bytes(more) for more in range(1, 300)] + [data[:-less] for less in range(1, 300)]
    views = [memoryview(one) for one in (data, *changed)]
    found = checksum.block_checksums(views)
    sums = {found[at : at + checksum.SIZE] for at in range(0, len(found), checksum.SIZE)}
    # All differ, also from one another; and so does each half of them.
    assert len(sums) == len(views)
    assert len({one[:8] for one in sums}) == len({one[8:] for one in sums}) == len(views)


def test_the_change_that_is_missed_is_the_documented_one(compiled: object) -> None:
    """It does not resist an attacker: a load is safe from damage, `verify` by SHA-256 from the others."""
    data = random.Random(7).randbytes(700)
    changed = bytearray(data)
    changed[7] ^= 0x80
    changed[256 + 7] ^= 0x80
    changed[256 + 3] ^= 0x80
    one, other = (checksum.block_checksums([memoryview(block)]) for block in (data, bytes(changed)))
    assert one == other
