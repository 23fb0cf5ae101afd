"""Wheelhouses: which wheels fit which Python, and damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import InputFaults, UsageError
from clusterctl.provision.lock import parse_lock, read_lock
from clusterctl.provision.wheelhouse import (
    ArchiveInfo,
    Target,
    built_for,
    check_hashes,
    lacks,
    make_wheelhouse,
    older_tags,
    open_wheelhouse,
    requirements_of_extra,
)
from clusterctl.wire.typed_json import decode
from tests.support.wheels import lock_line, make_source, make_wheel


@pytest.mark.parametrize(
    ("tag", "python", "machine", "fits"),
    [
        ("py3-none-any", (3, 8), "aarch64", True),
        ("py2.py3-none-any", (3, 13), "x86_64", True),
        ("cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64", (3, 11), "x86_64", True),
        ("cp311-cp311-manylinux_2_28_aarch64", (3, 11), "x86_64", False),
        ("cp311-cp311-linux_x86_64", (3, 10), "x86_64", False),
        ("cp39-abi3-manylinux2014_x86_64", (3, 12), "x86_64", True),
        ("cp312-abi3-manylinux2014_x86_64", (3, 11), "x86_64", False),
        ("cp311-cp311-win_amd64", (3, 11), "x86_64", False),
        ("cp311-cp311-musllinux_1_2_x86_64", (3, 11), "x86_64", True),
    ],
)
def test_a_wheel_fits_by_its_name(
    tmp_path: Path, tag: str, python: tuple[int, int], machine: str, fits: bool
) -> None:
    lock = parse_lock(lock_line(make_wheel(tmp_path, "some_thing", "1.0+cpu", tag)), "lock")
    faults = lacks(open_wheelhouse(tmp_path), lock, python, machine)
    assert bool(faults) is not fits
    if faults:
        assert f"no wheel of some-thing 1.0+cpu for Python {python[0]}.{python[1]} on {machine}" in str(
            faults[0]
        )


def test_a_damaged_and_a_foreign_wheel_are_told_apart(tmp_path: Path) -> None:
    good, bad = make_wheel(tmp_path, "good"), make_wheel(tmp_path, "bad")
    make_wheel(tmp_path, "foreign")
    lock = parse_lock(lock_line(good) + lock_line(bad), "lock")
    house = open_wheelhouse(tmp_path)
    check_hashes(house, lock)
    bad.write_bytes(bad.read_bytes() + b" ")
    with pytest.raises(
        InputFaults, match=r"bad-1\.0-py3-none-any\.whl: its SHA-256 is not in line 2 of lock"
    ) as raised:
        check_hashes(house, lock)
    assert len(raised.value.faults) == 1
    assert house.files_for(lock) == [bad.name, good.name]
    with pytest.raises(UsageError, match="contains no wheels"):
        open_wheelhouse(tmp_path.parent)


def test_a_wheelhouse_is_made_with_pip_from_a_folder_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    make_wheel(source, "outer", needs="inner==2.0")
    make_wheel(source, "inner", "2.0")
    make_wheel(source, "pip", "99.0")
    # No index is asked: the folder has everything.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    told: list[str] = []
    target = Target(find_links=(str(source),))
    lock, count = make_wheelhouse(["outer"], tmp_path / "house", target, told.append)
    assert count == 3
    assert read_lock(tmp_path / "house" / "requirements.lock").text == lock.text
    assert [(pin.name, pin.version) for pin in lock.pins] == [
        ("inner", "2.0"),
        ("outer", "1.0"),
        ("pip", "99.0"),
    ]
    with pytest.raises(UsageError, match=r"pip could not fetch the wheels: .*nowhere"):
        make_wheelhouse(["nowhere"], tmp_path / "other", target, told.append)


def test_the_hash_is_read_as_every_pip_reports_it() -> None:
    old, new = {"hash": "sha256=ab"}, {"hashes": {"sha256": "ab"}}
    for facts in (old, new, old | new):
        assert decode(ArchiveInfo, facts).sha256 == "ab"
    for facts in ({}, {"hash": "md5=ab"}, {"hashes": {"md5": "ab"}}):
        assert decode(ArchiveInfo, facts).sha256 is None


def test_a_package_with_only_a_source_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, house = tmp_path / "source", tmp_path / "house"
    make_source(source, "pure")
    make_source(source, "bound", "cp311-cp311-linux_x86_64")
    make_wheel(source, "pip", "99.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    other = {"find_links": (str(source),), "python": "3.12", "platforms": ("manylinux_2_28_aarch64",)}
    with pytest.raises(UsageError, match=r"pip could not fetch the wheels: .*pure") as refused:
        make_wheelhouse(["pure"], house, Target(**other), str)
    assert "--build NAME" in refused.value.hint
    lock, count = make_wheelhouse(["pure"], house, Target(**other, built=built_for(["pure"], ["Pure"])), str)
    assert count == 2 and (house / "pure-1.0-py3-none-any.whl").exists()
    (source / "pure-1.0.tar.gz").unlink()
    again, _ = make_wheelhouse(["pure"], house, Target(**other, built=("pure",)), str)
    assert again.text == lock.text
    with pytest.raises(UsageError, match=r"bound-1\.0-cp311-cp311-linux_x86_64\.whl only fits this machine"):
        make_wheelhouse(["bound"], house, Target(**other, built=("bound",)), str)


def test_a_package_is_built_in_the_version_that_is_required() -> None:
    required = ["torch==2.13.*", "deepspeed<0.20,>=0.19"]
    assert built_for(required, ["deepspeed", "Other_name"]) == ("deepspeed<0.20,>=0.19", "Other_name")


def test_wheels_of_older_systems_are_taken_too() -> None:
    tags = older_tags("manylinux_2_28_aarch64")
    assert tags[0] == "manylinux_2_28_aarch64"
    assert {"manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"} < set(tags)
    assert "manylinux_2_29_aarch64" not in tags
    assert older_tags("manylinux2014_x86_64") == ["manylinux2014_x86_64"]


def test_an_extra_of_the_program_names_its_requirements() -> None:
    assert any(line.startswith("torch") for line in requirements_of_extra("train"))
    with pytest.raises(UsageError, match="no extra is called 'nothing'"):
        requirements_of_extra("nothing")
