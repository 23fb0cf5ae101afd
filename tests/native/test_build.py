"""The compiler on demand, the same flags in both builds, and nothing left behind."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from native.compiled import build, library

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler on this machine"
)


# With less optimization than an installation, the compiler takes a quarter of a minute of two processors.
@needs_compiler
@pytest.mark.timeout(600)
def test_what_it_builds_loads_and_nothing_else_is_left(
    copy_of_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = tuple("-O0" if flag == "-O3" else flag for flag in build.COMPILE_FLAGS)
    monkeypatch.setattr(build, "COMPILE_FLAGS", flags)
    before = {path.name for path in copy_of_sources.rglob("*")}
    path = build.build(copy_of_sources)
    assert library.load_from(copy_of_sources).path == path
    assert {path.name for path in copy_of_sources.rglob("*")} == before | {f"_ops.{platform.machine()}.so"}


@pytest.mark.skipif(shutil.which("clang++") is None, reason="clang++ is not installed")
def test_clang_builds_it_too(copy_of_sources: Path) -> None:
    build.build(copy_of_sources, "clang++")
    assert library.load_from(copy_of_sources).level == library.load().level


@needs_compiler
def test_a_source_that_does_not_compile_keeps_the_old_library(
    copy_of_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other sources would be compiled first, which takes minutes.
    monkeypatch.setattr(build, "CODE", ("cpu/cross_entropy.cpp",))
    old = copy_of_sources / "compiled" / f"_ops.{platform.machine()}.so"
    old.write_bytes(b"old")
    (copy_of_sources / "cpu" / "cross_entropy.cpp").write_text("no C++ at all\n")
    with pytest.raises(build.BuildFailed, match=r"ended with 1:(.|\n)*cross_entropy\.cpp:1"):
        build.build(copy_of_sources)
    assert old.read_bytes() == b"old"
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


# One source instead of all: the others take minutes of processor time.
ON_A_NODE = """
from native.compiled import build, library
build.CODE = ("cpu/cross_entropy.cpp",)
library.SOURCES = ("compiled/native.h", *build.CODE)
print(build.ensure())
print(library.why_not() or library.load().path)
"""


@needs_compiler
def test_a_node_without_a_fitting_library_compiles_one_in_the_users_cache(tmp_path: Path) -> None:
    shutil.copytree(library.FOLDER, tmp_path / "native", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    cache = tmp_path / "cache"

    def start(**extra: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(cache), **extra}
        argv = [sys.executable, "-c", ON_A_NODE]
        return subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)

    done, reason = start(CLUSTERCTL_NATIVE_BUILD="never").communicate()[0].splitlines()
    assert done == "" and "it was not compiled here" in reason
    # Two ranks of a node: one compiles, the other waits for it.
    results = [process.communicate()[0].splitlines() for process in [start(), start()]]
    assert sorted(bool(done) for done, _ in results) == [False, True]
    assert any(done.startswith("compiled the C++ library for this node in ") for done, _ in results)
    (path,) = {path for _, path in results}
    assert Path(path).is_relative_to(cache / "clusterctl" / "native")
    # A library in a folder that others can write to is not loaded.
    Path(path).parent.chmod(0o777)
    assert "it was not compiled here" in start(CLUSTERCTL_NATIVE_BUILD="never").communicate()[0]
