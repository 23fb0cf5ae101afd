"""Objects in the pickles of torch.save: which calls of a pickle are read as records."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.errors import CheckpointError
from trainer.weights.files.torch_read import Record, read_torch


class Kind(enum.Enum):
    """Pickled as Python 3.11.0 to 3.11.3 pickle each enum: by the name of the member."""

    FLASH = 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (Kind, "FLASH")


Kind.__module__, Kind.__qualname__ = "megatron.core.enums", "Kind"


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pickle find the class where its name says."""
    import sys
    import types

    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        module = types.ModuleType(name)
        module.Kind = Kind  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_member_of_an_enum_is_a_record_however_python_writes_it(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "saved.pt"
    torch.save({"args": {"kind": Kind.FLASH}}, file, _use_new_zipfile_serialization=zipped)
    kind = read_torch(file)["args"]["kind"]
    assert isinstance(kind, Record) and kind.arguments == ("FLASH",)


class Call:
    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self.arguments


@pytest.mark.parametrize(
    "arguments", [([], "append"), ({}, "items"), (torch.Size, "count"), (torch.dtype, "__init__")]
)
def test_getattr_of_anything_else_is_refused(tmp_path: Path, arguments: tuple[object, ...]) -> None:
    torch.save(Call(*arguments), tmp_path / "saved.pt")
    with pytest.raises(CheckpointError, match=r"saved\.pt: .*getattr for something other than a member"):
        read_torch(tmp_path / "saved.pt")
