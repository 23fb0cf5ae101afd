"""A library is loaded if it is complete and built for this processor from this source; else the reason is given."""

from __future__ import annotations

import platform
import shutil
import struct
from pathlib import Path

import pytest

from native.compiled import library
from native.compiled.library import (
    Library,
    LibraryMissing,
    elf_fault,
    load_from,
)


@pytest.fixture
def installed(copy_of_sources: Path, compiled: Library) -> Path:
    """A folder with sources and their library."""
    shutil.copy(compiled.path, copy_of_sources / "compiled" / "_ops.so")
    return copy_of_sources


def refusal(folder: Path) -> str:
    with pytest.raises(LibraryMissing) as caught:
        load_from(folder)
    assert library.BUILD_HINT in str(caught.value)
    return str(caught.value)


def test_a_whole_library_of_this_source_is_loaded(installed: Path) -> None:
    found = load_from(installed)
    assert found.path == installed / "compiled" / "_ops.so"
    assert found.level in range(len(library.LEVELS))


def test_a_missing_library_says_where_it_was_looked_for(copy_of_sources: Path) -> None:
    assert f"no {copy_of_sources}/compiled/_ops*.so" in refusal(copy_of_sources)


@pytest.mark.parametrize("name", ["compiled/native.h", "cpu/cross_entropy.cpp"])
def test_a_library_of_another_source_is_stale(installed: Path, name: str) -> None:
    with (installed / name).open("a") as file:
        file.write("// changed\n")
    assert f"is stale: {Path(name).name} has changed since it was built" in refusal(installed)


def test_a_stale_library_that_was_rebuilt_is_taken_in_the_same_process(installed: Path) -> None:
    whole = (installed / "compiled" / "_ops.so").read_bytes()
    (installed / "compiled" / "_ops.so").write_bytes(whole.replace(b"BLOCK = 256", b"BLOCK = 255"))
    refusal(installed)
    (installed / "compiled" / "_ops.so").write_bytes(whole)
    assert load_from(installed).level in range(len(library.LEVELS))


def test_a_library_without_its_source_is_not_trusted(installed: Path) -> None:
    (installed / "compiled" / "native.h").unlink()
    assert "cannot be compared with its source" in refusal(installed)


def test_a_library_of_another_processor_is_named(installed: Path) -> None:
    path = installed / "compiled" / "_ops.so"
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, 18, 183 if platform.machine() != "aarch64" else 62)
    path.write_bytes(data)
    assert f"is built for {'aarch64' if platform.machine() != 'aarch64' else 'x86_64'}" in refusal(installed)


def test_a_library_cut_short_at_any_length_is_refused(compiled: Library) -> None:
    data = compiled.path.read_bytes()
    assert elf_fault(data) == ""
    for size in (*range(0, 4096, 97), *range(4096, len(data), 997)):
        assert elf_fault(data[:size]), size
    assert elf_fault(data[:-1]) == "is truncated"


def test_text_in_its_place_is_refused(installed: Path) -> None:
    (installed / "compiled" / "_ops.so").write_text("not a library\n" * 20)
    assert "_ops.so is not a shared library" in refusal(installed)


def test_a_foreign_library_under_its_name_is_refused(installed: Path) -> None:
    # An extension of Python itself.
    import _ctypes

    if not getattr(_ctypes, "__file__", None):
        pytest.skip("this Python has ctypes built in")
    shutil.copy(_ctypes.__file__, installed / "compiled" / "_ops.so")
    assert "is stale" in refusal(installed)


def test_a_good_library_beside_a_stale_one_is_taken(installed: Path) -> None:
    (installed / "compiled" / "_ops.a-stale-one.so").write_bytes(b"")
    assert load_from(installed).path.name == "_ops.so"
