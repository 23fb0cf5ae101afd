"""The compiler on demand, the same flags in both builds, and nothing left behind."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from native.compiled import build, library

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler on this machine"
)


@needs_compiler
def test_what_it_builds_loads_and_nothing_else_is_left(copy_of_sources: Path) -> None:
    before = {path.name for path in copy_of_sources.rglob("*")}
    path = build.build(copy_of_sources)
    assert library.load_from(copy_of_sources).path == path
    assert {path.name for path in copy_of_sources.rglob("*")} == before | {"_ops.so"}


@needs_compiler
def test_a_source_that_does_not_compile_keeps_the_old_library(
    copy_of_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other sources would be compiled first, which takes minutes.
    monkeypatch.setattr(build, "CODE", ("cpu/cross_entropy.cpp",))
    (copy_of_sources / "compiled" / "_ops.so").write_bytes(b"old")
    (copy_of_sources / "cpu" / "cross_entropy.cpp").write_text("no C++ at all\n")
    with pytest.raises(build.BuildFailed, match=r"ended with 1:(.|\n)*cross_entropy\.cpp:1"):
        build.build(copy_of_sources)
    assert (copy_of_sources / "compiled" / "_ops.so").read_bytes() == b"old"
    assert not list(copy_of_sources.rglob(".*"))


@needs_compiler
def test_a_compiler_without_openmp_makes_a_library_for_one_thread(copy_of_sources: Path) -> None:
    own = copy_of_sources / "cxx"
    real = next(filter(None, map(shutil.which, build.COMPILERS)))
    own.write_text(f'#!/bin/sh\nfor a; do [ "$a" = -fopenmp ] && exit 1; done\nexec {real} "$@"\n')
    own.chmod(0o755)
    build.build(copy_of_sources, str(own))
    found = library.load_from(copy_of_sources)
    assert not found.openmp
    assert "one thread" in found.describe()


def test_a_compiler_that_is_not_there_is_said_so(copy_of_sources: Path) -> None:
    with pytest.raises(build.BuildFailed, match="/nonexistent cannot be run"):
        build.build(copy_of_sources, "/nonexistent")


def test_no_compiler_on_the_path_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildFailed, match="install g"):
        build.find_compiler()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_install_compiles_with_the_same_flags_and_may_fail() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    assert extension["optional"] is True
    assert extension["name"] == f"native.compiled.{library.STEM}"
    assert tuple(extension["extra-compile-args"]) == build.COMPILE_FLAGS
    assert tuple(extension["extra-link-args"]) == build.LINK_FLAGS
    assert extension["sources"] == [f"native/{name}" for name in library.CODE]
    assert not any(flag.startswith("-march") for flag in extension["extra-compile-args"])
