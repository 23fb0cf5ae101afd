"""Files that the trainer cannot use: an error with place and remedy, and a traceback only for a bug."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.wire.requests import TensorboardRequest, TrainRequest
from tests.support.building import small_tokenizer
from trainer import __main__ as program
from trainer.corpus.build import _as_build_error
from trainer.errors import machine_error
from trainer.train import commands


def failing(number: int, name: str | None, request: type) -> Callable[..., int]:
    def does(_: object) -> int:
        raise OSError(number, os.strerror(number), name)

    does.__annotations__ = {"_": request, "return": int}
    return does


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [
        (errno.EACCES, 2, "check the owner and permissions of this file and its folder"),
        (errno.EROFS, 2, "use a folder that you can write to"),
        (errno.ENOTDIR, 2, "check the path: a part of it is a file"),
        (errno.ENOSPC, 1, "free some space: see `df -h`"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int, remedy: str
) -> None:
    monkeypatch.setattr(commands, "tensorboard", failing(number, "some/file", TensorboardRequest))
    assert program.main(["--called", "clusterctl tensorboard", "tensorboard", "x"]) == code
    assert capsys.readouterr().err == f"error: some/file: {os.strerror(number)}\n  try: {remedy}\n"
    # In the log of a rank.
    monkeypatch.setattr(commands, "train", failing(number, "some/file", TrainRequest))
    with pytest.raises(OSError, match="some/file"):
        program.main(["train", "x"])


def test_other_failures_stay_bugs() -> None:
    assert machine_error(OSError(errno.EACCES, "no name")) is None
    assert machine_error(OSError(errno.EBADF, "bad", "file")) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_tokenizer(tmp_path)
    (tmp_path / "folder").mkdir(mode=0)
    words = ["data-build", "--input", "folder", "--tokenizer", "tokenizer.json", "--output", "out"]
    assert program.main(["--called", "clusterctl data build", *words]) == 2
    assert "error: folder: Permission denied" in capsys.readouterr().err


def test_a_build_without_the_right_to_write_does_not_resume(tmp_path: Path) -> None:
    found = _as_build_error(PermissionError(errno.EACCES, "Permission denied", "ro/x"), tmp_path)
    assert found.exit_code == 2 and "permissions" in found.hint and "resumes" not in found.hint
    assert "resumes" in _as_build_error(OSError(errno.ENOSPC, "full", "x"), tmp_path).hint
