"""The compiled library is there for every test that names it: built where it is missing or stale."""

from __future__ import annotations

import importlib
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
def our_products(compiled: library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel computes small products too, and on every processor that can run it."""
    # Here, so that tests without torch stay quick.
    from native.cpu import product

    importlib.import_module("native.cpu.linear")
    monkeypatch.setattr(product, "faster_types", product.types)
    for name, value in (
        ("LEAST", 1),
        ("LEAST_ROWS", 1),
        ("LEAST_LINEAR", dict.fromkeys(product.LEAST_LINEAR, 1)),
    ):
        monkeypatch.setattr(product, name, value)


@pytest.fixture
def copy_of_sources(tmp_path):  # type: ignore[no-untyped-def]
    """A folder with the sources and no library."""
    for name in library.SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(library.FOLDER / name, tmp_path / name)
    return tmp_path
