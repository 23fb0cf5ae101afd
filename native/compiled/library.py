"""Find the compiled library, check that it is complete, up to date and for this processor, and load it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import struct
from dataclasses import dataclass
from pathlib import Path

# The sources are in subfolders of this folder; the library is in its folder `compiled`.
FOLDER = Path(__file__).resolve().parents[1]
STEM = "_ops"
# The namespace of the ops in torch.
NAMESPACE = "clusterctl_native"
CODE = (
    "cpu/cross_entropy.cpp",
    "attention/plain.cpp",
    "attention/avx2.cpp",
    "attention/avx512.cpp",
    "attention/amx.cpp",
    "cpu/add_wide.cpp",
    "cpu/dropout.cpp",
    "cpu/embedding.cpp",
    "cpu/gelu.cpp",
    "cpu/norm.cpp",
    "cpu/product.cpp",
    "cpu/rotary.cpp",
    "cpu/route.cpp",
    "cpu/swiglu.cpp",
    "cpu/adamw.cpp",
    "cpu/square_sum.cpp",
    "memory/pool.cpp",
    "memory/torch_pool.cpp",
    "text/bpe.cpp",
    "text/json_lines.cpp",
    "samples/sample_index.cpp",
    "hashes/checksum.cpp",
    "hashes/sha256.cpp",
    "hashes/sha256_avx512.cpp",
    "decode/packed.cpp",
    "decode/packed_avx512.cpp",
    "decode/paged.cpp",
    "decode/program.cpp",
)
HEADERS = (
    "compiled/native.h",
    "compiled/levels.h",
    "compiled/lanes.h",
    "compiled/transpose_avx512.h",
    "attention/avx512_lanes.h",
    "attention/kernel.h",
    "decode/packed.h",
    "decode/paged.h",
    "decode/team.h",
    "hashes/sha256.h",
    "memory/pool.h",
    "text/bpe_merges.h",
    "text/bpe_words.h",
    "text/unicode_classes.h",
    "text/utf8.h",
)
SOURCES = (*HEADERS, *CODE)
BUILD_HINT = "build it with `python -m native build`"
LEVELS = ("baseline", "AVX2", "AVX-512")
# An environment variable with the highest level to use, for comparisons with another processor.
LEVEL_VARIABLE = "CLUSTERCTL_NATIVE_LEVEL"
# An environment variable; with the value `never`, a node without a fitting library does not compile one.
BUILD_VARIABLE = "CLUSTERCTL_NATIVE_BUILD"
# An environment variable; with the value `never`, torch's buffers do not come from the pool of `native.memory`.
POOL_VARIABLE = "CLUSTERCTL_NATIVE_POOL"

# The ELF machine numbers of the processors that nodes may have.
_MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64", 258: "loongarch64"}


class LibraryMissing(Exception):
    """There is no usable compiled library; the message gives reason and remedy."""


@dataclass(frozen=True)
class Library:
    """The loaded library; `level` is the instruction set that its kernels use on this processor."""

    path: Path
    functions: ctypes.CDLL
    level: int
    openmp: bool

    def describe(self) -> str:
        """Return a description of the instruction set and the threading."""
        processor = LEVELS[self.level] if platform.machine() == "x86_64" else platform.machine()
        return f"C++, {processor}, {'OpenMP' if self.openmp else 'one thread'}"


@functools.cache
def load() -> Library:
    """Return the library in this folder or in the user's cache; LibraryMissing lists every refused file and why."""
    return load_from(FOLDER, cache_folder())


def cache_folder() -> Path:
    """Return the cache folder of libraries that nodes compile from these sources."""
    digest = hashlib.sha256()
    for name in SOURCES:
        with contextlib.suppress(OSError):
            digest.update((FOLDER / name).read_bytes())
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root, "clusterctl", "native", digest.hexdigest()[:16])


@functools.cache
def attention_level() -> int:
    """Return which products the attention kernel uses on this processor.

    0: those of AVX2 or less; 1: also AVX-512; 2: also AVX-512 with bf16; 3: also AMX with bf16.
    """
    try:
        library = load()
    except LibraryMissing:
        return 0
    return int(library.functions.native_attention_level()) if library.level == len(LEVELS) - 1 else 0


def may_build() -> bool:
    """Return whether the environment allows that a node compiles a library."""
    return os.environ.get(BUILD_VARIABLE) != "never"


def may_pool() -> bool:
    """Return whether the environment allows that torch's buffers come from the pool."""
    return os.environ.get(POOL_VARIABLE) != "never"


def highest_level() -> int:
    """Return the highest level that the environment allows; raise LibraryMissing for an unknown name."""
    name = os.environ.get(LEVEL_VARIABLE, LEVELS[-1])
    if name not in LEVELS:
        raise LibraryMissing(f"{LEVEL_VARIABLE} is {name!r}; try: {', '.join(LEVELS)}")
    return LEVELS.index(name)


def why_not() -> str:
    """Return why there is no library, or an empty string."""
    try:
        load()
    except LibraryMissing as reason:
        return str(reason)
    return ""


def describe(method: str) -> str:
    """Return the description of an op in the library: its method, and the library's instruction set and threading."""
    return f"{method} ({load().describe()})"


def load_from(folder: Path, cache: Path | None = None) -> Library:
    """Return a library in `folder` or in `cache`, built from the sources in `folder` and for this processor."""
    paths = sorted((folder / "compiled").glob(f"{STEM}*.so"))
    if cache is not None and _is_own(cache):
        paths += sorted(cache.glob(f"{STEM}*.so"))
    if not paths:
        raise LibraryMissing(f"it was not compiled here (no {folder / 'compiled' / STEM}*.so); {BUILD_HINT}")
    refused = []
    for path in paths:
        try:
            return _open(path, folder)
        except LibraryMissing as reason:
            refused.append(f"{path.name} {reason}")
    raise LibraryMissing(f"{'; '.join(refused)} (in {folder}); {BUILD_HINT}")


def _open(path: Path, folder: Path) -> Library:
    # Check the file before it is mapped: dlopen of a truncated library can end the process with SIGBUS, and
    # after a stale one was mapped, dlopen returns that one for its path even if it is rebuilt.
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LibraryMissing(f"cannot be read: {error}") from error
    fault = elf_fault(data) or next(filter(None, (_stale(data, folder / name) for name in SOURCES)), "")
    if fault:
        raise LibraryMissing(fault)
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryMissing(f"cannot be loaded: {error}") from error
    level = min(functions.native_level(), highest_level())
    return Library(path, functions, level, bool(functions.native_openmp()))


def _is_own(folder: Path) -> bool:
    """Return whether only this user can write to `folder`, because code of other users must not be loaded."""
    try:
        facts = folder.stat()
    except OSError:
        return False
    return facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def elf_machine(data: bytes) -> str:
    """Return the processor of an ELF file, with the name that `uname -m` uses."""
    return _MACHINES.get(struct.unpack_from("<H", data, 18)[0], "another processor")


def elf_fault(data: bytes) -> str:
    """Return why `data` is not a shared library for this processor, or an empty string."""
    if len(data) < 64 or data[:4] != b"\x7fELF":
        return "is not a shared library"
    machine = elf_machine(data)
    if machine != platform.machine():
        return f"is built for {machine}, and this node is {platform.machine()}"
    sections, size, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58)
    # The section table is at the end of the file.
    return "is truncated" if sections + size * count > len(data) else ""


def _stale(data: bytes, source: Path) -> str:
    """Return why the library was not compiled from `source`, whose text it contains; or an empty string."""
    try:
        text = source.read_bytes()
    except OSError as error:
        return f"cannot be compared with its source: {error}"
    return "" if text + b"\0" in data else f"is stale: {source.name} has changed since it was built"
