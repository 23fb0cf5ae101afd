"""The compiled library is there for every test that names it: built where it is missing or stale."""

from __future__ import annotations

import shutil

import pytest

from native.compiled import build, library


@pytest.fixture(scope="session")
def compiled() -> library.Library:
    if library.why_not():
        if not any(map(shutil.which, build.COMPILERS)):
            pytest.skip("no C++ compiler on this machine")
        build.build()
    return library.load()


@pytest.fixture
def copy_of_sources(tmp_path):  # type: ignore[no-untyped-def]
    """A folder with the sources and no library."""
    for name in library.SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(library.FOLDER / name, tmp_path / name)
    return tmp_path
