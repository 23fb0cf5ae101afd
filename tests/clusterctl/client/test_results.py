"""Results of function calls are read without running code that a node chose."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from pathlib import Path

import pytest

from clusterctl.client.on_node import plain
from clusterctl.client.results import Failure, read_failure, read_value
from clusterctl.errors import WorkFailed


class Attack:
    """Creates a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


VALUES = [
    *(None, True, 3, -(2**70), 2.5, float("inf"), "text \ud800", b"\0\xff", [], (), {}, set()),
    [1, (2, [3, (b"4",)])],
    {"a": {1, 2}, (1, 2): frozenset({"x"}), "tuple": {"set": [1]}},
]


@pytest.mark.parametrize("value", VALUES, ids=ascii)
def test_plain_values_come_back_as_they_are(value: object) -> None:
    found = read_value("node1", 0, json.dumps(plain(value)).encode(), False)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [1j, Path("/x"), [object()], {1: Attack(Path("/x"))}, len],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_where_the_call_runs(value: object) -> None:
    with pytest.raises(TypeError, match="trust_results=True"):
        plain(value)


def test_a_pickle_in_the_place_of_a_plain_value_is_not_loaded(tmp_path: Path) -> None:
    data = pickle.dumps(Attack(tmp_path / "made"))
    with pytest.raises(WorkFailed, match="node2: the result of rank 3 cannot be read"):
        read_value("node2", 3, data, False)
    assert not (tmp_path / "made").exists()
    # The same data does its work for a caller who trusts the nodes.
    read_value("node2", 3, data, True)
    assert (tmp_path / "made").exists()


def test_a_failure_keeps_its_traceback() -> None:
    answer = {"type": "ValueError", "message": "too small", "traceback": "Traceback ..."}
    found = read_failure("node1", 2, json.dumps(answer).encode())
    assert found == Failure(2, "node1", "ValueError", "too small", "Traceback ...")
    assert str(found) == "rank 2 on node1: ValueError: too small"


DAMAGED = [b"", b"x", b"{}", b'{"a": 1}', b'{"tuple": 1}', b'{"dict": [1]}', b'{"set": [[]]}', b"[" * 100_000]


@pytest.mark.parametrize("data", DAMAGED, ids=lambda data: str(data[:20]))
@pytest.mark.parametrize("trusted", [False, True])
def test_damaged_results_are_an_error_in_words(data: bytes, trusted: bool) -> None:
    with pytest.raises(WorkFailed, match="the result of rank 0 cannot be read"):
        read_value("node1", 0, data, trusted)


def test_every_flipped_bit_is_an_error_in_words_or_a_value() -> None:
    data = json.dumps(plain([1, "text", {"a": (2.5, b"bytes")}])).encode()
    for place in range(len(data) * 8):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        with contextlib.suppress(WorkFailed):
            read_value("node1", 0, bytes(changed), False)
        with contextlib.suppress(WorkFailed):
            read_failure("node1", 0, bytes(changed))
