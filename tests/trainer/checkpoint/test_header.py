from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainer.checkpoint.access import read_header
from trainer.errors import CheckpointError


def test_the_header_of_the_library_is_read(tmp_path: Path) -> None:
    tensors = {"b": torch.zeros(2, 3), "a": torch.zeros(4, dtype=torch.bfloat16), "none": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {name: entry.shape for name, entry in header.entries.items()} == {
        "b": (2, 3),
        "a": (4,),
        "none": (0, 3),
    }
    assert header.metadata == {"format": "pt"}


def entry(shape: Any, begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE: list[tuple[Any, str]] = [
    ({"w": entry([1 << 38], 0, 1 << 40)}, "its place has not that many"),
    ({"w": entry([1 << 38], 0, 8)}, "needs 1,099,511,627,776 bytes"),
    ({"w": entry([1], 0, 4), "v": entry([1], 0, 4)}, "overlaps another"),
    ({"w": entry([1], 4, 8)}, "leaves a gap"),
    ({"w": entry([1], 0, 4)}, "end at byte"),
    ({"w": entry([-2], 0, 8)}, "is wrong"),
    ({"w": entry([True, 2], 0, 8)}, "is wrong"),
    ({"w": entry([2], 0, 8, "object")}, "is wrong"),
    ({"w": [1]}, "is wrong"),
    ({"w": entry([1] * 100, 0, 4)}, "is wrong"),
    ({"__metadata__": {"a": 1}}, "metadata"),
    ([], "not a JSON object"),
]


@pytest.mark.parametrize(("document", "words"), HOSTILE)
def test_a_header_that_lies_is_refused(tmp_path: Path, document: Any, words: str) -> None:
    content = json.dumps(document).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(file)
    assert str(file) in caught.value.message


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, b"\xff" * 7 + b"\x7f{}", b"\x02" + bytes(7) + b"[[", b"\x64" + bytes(7) + b"{}"],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"claims a header of|its header is not JSON"):
        read_header(file)
