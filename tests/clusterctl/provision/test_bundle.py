"""Bundles: equal bytes, whole files, and hostile archives."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.provision.bundle import PARTS, Input, open_bundle, write_bundle
from tests.support.wheels import make_wheelhouse


@pytest.fixture
def inputs(tmp_path: Path) -> list[Input]:
    house = make_wheelhouse(tmp_path / "wheels", "alpha")
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    return [
        Input("code/deep/train.py", tmp_path / "train.py"),
        Input("code/run.sh", tmp_path / "run.sh"),
        *[Input(f"wheelhouse/{path.name}", path) for path in house.iterdir()],
    ]


def unpacked(bundle: Path, folder: Path, parts: tuple[str, ...] = PARTS) -> list[str]:
    with open_bundle(bundle) as opened:
        opened.unpack(folder, parts, lambda count: None)
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_equal_files_give_equal_bytes_and_come_back_whole(tmp_path: Path, inputs: list[Input]) -> None:
    contents, digest = write_bundle(tmp_path / "one.tar", inputs)
    for item in inputs:
        os.utime(item.source, (1, 1))
    _, again = write_bundle(tmp_path / "two.tar", list(reversed(inputs)))
    assert digest == again == hashlib.sha256((tmp_path / "two.tar").read_bytes()).hexdigest()
    assert contents.files[0].path == "wheelhouse/requirements.lock"
    with open_bundle(tmp_path / "one.tar") as opened:
        assert [pin.name for pin in opened.lock().pins] == ["alpha"]
    assert unpacked(tmp_path / "one.tar", tmp_path / "out") == sorted(item.path for item in inputs)
    assert (tmp_path / "out/code/deep/train.py").read_text() == "print(1)\n"
    assert (tmp_path / "out/code/run.sh").stat().st_mode & 0o777 == 0o755
    assert unpacked(tmp_path / "one.tar", tmp_path / "part", ("wheelhouse",)) == sorted(
        item.path for item in inputs if item.path.startswith("wheelhouse/")
    )


def member(path: str, data: bytes = b"x", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(path)
    info.size = len(data)
    for name, value in more.items():
        setattr(info, name, value)
    return info, data


def listed(path: str, data: bytes = b"x", **more: Any) -> dict[str, Any]:
    return {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), **more}


def hostile(folder: Path, files: list[dict[str, Any]], *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    path = folder / "hostile.tar"
    with tarfile.open(path, "w") as archive:
        text = json.dumps({"format": 1, "files": files}).encode()
        for info, data in [member("bundle.json", text), *members]:
            archive.addfile(info, io.BytesIO(data))
    return path


LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc", "size": 0}
CASES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a path that leads out": (
        lambda f: hostile(f, [listed("code/../../x")]),
        "is not a path inside the bundle",
    ),
    "an absolute path": (lambda f: hostile(f, [listed("/etc/passwd")]), "is in none of"),
    "another folder": (lambda f: hostile(f, [listed("home/x")]), "is in none of"),
    "a file twice": (lambda f: hostile(f, [listed("code/x"), listed("code/x")]), "is listed twice"),
    "a file that is a folder": (
        lambda f: hostile(f, [listed("code/x"), listed("code/x/y")]),
        "that is a file",
    ),
    "a line break in a name": (lambda f: hostile(f, [listed("code/a\nb")]), "is not a path inside"),
    "a negative size": (lambda f: hostile(f, [listed("code/x", size=-1)]), "its size or SHA-256"),
    "a link": (lambda f: hostile(f, [listed("code/x")], member("code/x", **LINK)), "is not a plain file"),
    "a device": (
        lambda f: hostile(f, [listed("code/x")], member("code/x", type=tarfile.CHRTYPE, size=0)),
        "is not a plain file",
    ),
    "another member": (
        lambda f: hostile(f, [listed("code/x")], member("../evil")),
        "is in the place of",
    ),
    "a further member": (
        lambda f: hostile(f, [listed("code/x")], member("code/x"), member("code/y")),
        "more members follow",
    ),
    "a missing member": (lambda f: hostile(f, [listed("code/x")]), "ends before code/x"),
    "another content": (
        lambda f: hostile(f, [listed("code/x", b"y")], member("code/x")),
        "differs from its SHA-256",
    ),
    "another size": (lambda f: hostile(f, [listed("code/x", b"yy")], member("code/x")), "has 1 bytes"),
    "another format": (
        lambda f: _raw(f, member("bundle.json", b'{"format": 9, "files": []}')),
        "it has format 9",
    ),
    "no list": (lambda f: _raw(f, member("code/x")), "its first member is not bundle.json"),
    "a list that is no JSON": (lambda f: _raw(f, member("bundle.json", b"[" * 100_000)), "nested too deeply"),
}


def _raw(folder: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(folder / "raw.tar", "w") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return folder / "raw.tar"


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_archive_is_refused_and_writes_nothing_outside(tmp_path: Path, name: str) -> None:
    make, text = CASES[name]
    path = make(tmp_path)
    with pytest.raises(UsageError, match=text):
        unpacked(path, tmp_path / "out" / "deep")
    outside = {entry.name for entry in tmp_path.iterdir()} - {path.name, "out"}
    assert not outside and not os.path.lexists(tmp_path / "out" / "x")


def test_a_cut_or_damaged_bundle_is_refused(tmp_path: Path, inputs: list[Input]) -> None:
    write_bundle(tmp_path / "whole.tar", inputs)
    whole = (tmp_path / "whole.tar").read_bytes()
    for name, data in (("half", whole[: len(whole) // 2]), ("empty", b""), ("text", b"hello " * 999)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError, match=str(tmp_path / name)):
            unpacked(tmp_path / name, tmp_path / f"out-{name}")
    at = whole.index(b"print(1)")
    (tmp_path / "bit").write_bytes(whole[:at] + b"P" + whole[at + 1 :])
    with pytest.raises(UsageError, match=r"code/deep/train\.py differs from its SHA-256"):
        unpacked(tmp_path / "bit", tmp_path / "out-bit")
