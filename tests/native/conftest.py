"""The compiled library is there for every test that names it: built where it is missing or stale."""

from __future__ import annotations

import shutil

import pytest

from native import products
from native.compiled import build, library
from native.cpu import product


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
    monkeypatch.setattr(product, "faster_types", product.types)
    monkeypatch.setattr(products, "faster_types", product.types)
    for module in (product, products):
        monkeypatch.setattr(module, "LEAST_ROWS", 1)
    monkeypatch.setattr(product, "LEAST", 1)
    monkeypatch.setattr(products, "LEAST", dict.fromkeys(products.LEAST, 1))


@pytest.fixture
def copy_of_sources(tmp_path):  # type: ignore[no-untyped-def]
    """A folder with the sources and no library."""
    for name in library.SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(library.FOLDER / name, tmp_path / name)
    return tmp_path
