"""Compile the C++ library on demand; an installation compiles it through `pyproject.toml`."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from native.compiled.library import CODE, FOLDER, STEM, cache_folder, elf_machine, load, may_build, why_not

# The same flags as in pyproject.toml; a test compares them.
COMPILE_FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-lto",
)
LINK_FLAGS = ("-fopenmp", "-Wl,--as-needed")
COMPILERS = ("c++", "g++", "clang++")
# The time limit per file, in seconds. The slowest file took 8 s; with a sanitizer on a busy machine, over 300 s.
TIMEOUT_S = 900


class BuildFailed(Exception):
    """The library was not built; the message contains the compiler's output."""


def build(folder: Path = FOLDER, compiler: str = "", out_folder: Path | None = None) -> Path:
    """Compile the sources in `folder` into `out_folder/_ops.MACHINE.so` and return that path.

    The library is written under a temporary name and renamed.
    compiler: a command line such as `ccache g++`, or a cross compiler; by default the first of `COMPILERS` on the path.
    out_folder: by default `folder/compiled`.
    """
    command = shlex.split(compiler) or find_compiler()
    target = out_folder or folder / "compiled"
    aside = target / f".{STEM}.{os.getpid()}.building"
    try:
        fault = _compile(command, folder, aside, COMPILE_FLAGS, LINK_FLAGS)
        # A library from a compiler without OpenMP uses one thread; the report says so.
        if fault and _compile(command, folder, aside, _single(COMPILE_FLAGS), _single(LINK_FLAGS)):
            raise BuildFailed(fault)
        # The name contains the machine, so that libraries for several processors can be in one folder.
        out = target / f"{STEM}.{elf_machine(aside.read_bytes())}.so"
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    return out


def ensure() -> str:
    """Compile the library for this node if there is none; return a line about what was done, or "".

    The library is stored in the user's cache, under a hash of the sources. One process compiles; others on the node
    wait for it. Without a compiler nothing is done, and `why_not` returns the reason.
    """
    reason = why_not()
    if not reason or not may_build() or not any(map(shutil.which, COMPILERS)):
        return ""
    target, began = cache_folder(), time.monotonic()
    try:
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (target / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            load.cache_clear()
            if not why_not():
                return ""
            path = build(FOLDER, out_folder=target)
    except (BuildFailed, OSError) as error:
        return f"the C++ library cannot be compiled here ({str(error).splitlines()[0]}); it was needed because {reason}"
    finally:
        load.cache_clear()
    return f"compiled the C++ library for this node in {time.monotonic() - began:.0f} s: {path}"


def find_compiler() -> list[str]:
    """Return the first C++ compiler on the path."""
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise BuildFailed(f"no C++ compiler on the path (looked for {', '.join(COMPILERS)}); install g++")
    return [found]


def _compile(
    command: list[str], folder: Path, out: Path, flags: tuple[str, ...], link: tuple[str, ...]
) -> str:
    """Run the compiler, on as many files at a time as there are processors; return its errors, or an empty string."""
    with tempfile.TemporaryDirectory(prefix="clusterctl-native-") as aside:
        objects = [f"{aside}/{number}.o" for number in range(len(CODE))]
        jobs = [
            [*command, *flags, "-fPIC", "-c", source, "-o", made]
            for source, made in zip(CODE, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            faults = list(pool.map(lambda argv: _run(argv, folder), jobs))
        fault = next(filter(None, faults), "")
        return fault or _run([*command, "-shared", *objects, "-o", str(out), *link], folder)


def _run(argv: list[str], folder: Path) -> str:
    """Run one command in `folder`; return its error output, or an empty string."""
    try:
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{argv[0]} cannot be run: {error}") from error
    if done.returncode == 0:
        return ""
    return f"{shlex.join(argv)} ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}"


def _single(flags: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(flag.replace("-fopenmp", "-fopenmp-simd") for flag in flags)
