from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.agent.frames import (
    MAX_PAYLOAD,
    PREFIX,
    BadFrame,
    ByteReader,
    Frame,
    Inbox,
    encode,
    parse_payload,
    read_frame,
    to_payload,
)

ROOT = Path(__file__).resolve().parents[3]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
frames = st.builds(
    Frame,
    st.integers(0, 2**31),
    st.text(max_size=8),
    st.dictionaries(st.text(max_size=8), json_values, max_size=3),
    st.binary(max_size=2000),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(frames, max_size=5), st.integers(1, 700))
def test_frames_arrive_as_they_were_sent_whatever_the_pieces(sent: list[Frame], piece: int) -> None:
    stream = io.BytesIO(b"".join(encode(frame) for frame in sent))
    reader = ByteReader(lambda: stream.read(piece))
    received = []
    while (frame := read_frame(reader.read)) is not None:
        received.append(frame)
    assert received == sent


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 50), st.lists(st.integers(0, 90), max_size=9))
def test_bytes_come_in_order_whether_they_are_given_or_filled_in(
    whole: bytes, piece: int, sizes: list[int]
) -> None:
    stream = io.BytesIO(whole)
    reader, taken = ByteReader(lambda: stream.read(piece)), b""
    for turn, size in enumerate(sizes):
        if turn % 2:
            taken += reader.read(size)
            continue
        part = bytearray(size)
        try:
            reader.read_into(memoryview(part))
        except EOFError:
            assert len(taken) + size > len(whole)
            return
        taken += part
    assert whole.startswith(taken)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_give_a_frame_or_a_named_error_and_never_a_crash(
    noise: bytes, after_a_good_prefix: bool
) -> None:
    data = PREFIX.pack(0x43, 1, 20, 10) + noise if after_a_good_prefix else noise
    stream = io.BytesIO(data)
    try:
        frame = read_frame(stream.read)
    except BadFrame:
        return
    assert frame is None or isinstance(frame, Frame)


@pytest.mark.parametrize("sizes", [(1 << 31, 0), (10, MAX_PAYLOAD + 1), (1 << 20, 1 << 20)])
def test_a_frame_that_claims_to_be_huge_is_refused_before_anything_is_read(sizes: tuple[int, int]) -> None:
    asked: list[int] = []

    def read(count: int) -> bytes:
        asked.append(count)
        return struct.pack(">BBII", 0x43, 1, *sizes)

    with pytest.raises(BadFrame, match="too large"):
        read_frame(read)
    assert asked == [PREFIX.size]


def test_a_header_nested_without_end_is_a_bad_frame() -> None:
    header = b"[" * 60_000
    stream = io.BytesIO(PREFIX.pack(0x43, 1, len(header), 0) + header)
    with pytest.raises(BadFrame, match="header is not what it must be"):
        read_frame(stream.read)


def test_a_name_that_is_no_utf8_survives_a_payload() -> None:
    name = b"\xff\xfe name".decode("utf-8", "surrogateescape")
    assert (
        parse_payload(to_payload({"path": name}))["path"].encode("utf-8", "surrogateescape")
        == b"\xff\xfe name"
    )


def test_a_peer_that_ignores_its_window_breaks_the_link_instead_of_filling_the_memory() -> None:
    inbox = Inbox(lambda count: None)
    with pytest.raises(BadFrame, match="window"):
        for _ in range(100):
            inbox.put(Frame(1, "data", {}, bytes(1 << 20)))
