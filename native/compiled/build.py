"""Compile the C++ library on demand; an installation compiles it through `pyproject.toml`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from native.compiled.library import CODE, FOLDER, STEM

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
# In seconds. A build was measured at 1 s.
TIMEOUT_S = 300


class BuildFailed(Exception):
    """The library was not built; the message contains the compiler's output."""


def build(folder: Path = FOLDER, compiler: str = "") -> Path:
    """Compile the sources in `folder` into `folder/compiled/_ops.so` and return that path.

    The library is written under a temporary name and renamed.
    compiler: a command line such as `ccache g++`; by default the first of `COMPILERS` on the path.
    """
    command = shlex.split(compiler) or find_compiler()
    out = folder / "compiled" / f"{STEM}.so"
    aside = folder / "compiled" / f".{STEM}.{os.getpid()}.building"
    try:
        fault = _compile(command, folder, aside, [*COMPILE_FLAGS], [*LINK_FLAGS])
        # A compiler without OpenMP still makes a library, for one thread; the report says so.
        if fault and _compile(command, folder, aside, _single(COMPILE_FLAGS), _single(LINK_FLAGS)):
            raise BuildFailed(fault)
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    return out


def find_compiler() -> list[str]:
    """Return the first C++ compiler on the path."""
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise BuildFailed(f"no C++ compiler on the path (looked for {', '.join(COMPILERS)}); install g++")
    return [found]


def _compile(command: list[str], folder: Path, out: Path, flags: list[str], link: list[str]) -> str:
    """Run the compiler; return its error output, or an empty string."""
    argv = [*command, *flags, "-fPIC", "-shared", *CODE, "-o", str(out), *link]
    try:
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error}") from error
    if done.returncode == 0:
        return ""
    return f"{shlex.join(argv)} ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}"


def _single(flags: tuple[str, ...]) -> list[str]:
    return [flag.replace("-fopenmp", "-fopenmp-simd") for flag in flags]
