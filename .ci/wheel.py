#!/usr/bin/env python3
"""Write a wheel with the compiled library, so that nodes need no compiler.

The library is for the processor that the compiler makes code for, so a cross compiler makes the wheel of another one.
It uses no part of Python, so one wheel serves every version of Python 3.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from native.compiled.build import build  # noqa: E402
from native.compiled.library import elf_machine  # noqa: E402

PACKAGES = ("clusterctl", "trainer", "native")
FILES = ("pyproject.toml", "README.md", "LICENSE")
GLIBC = re.compile(rb"GLIBC_2\.(\d+)\0")


def main() -> int:
    """Write one wheel and print its path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--compiler", default="", help="such as aarch64-linux-gnu-g++; default: c++, g++ or clang++"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="the folder of the wheel (default: dist)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as aside:
        tree = Path(aside, "tree")
        copy_tree(tree)
        library = build(tree / "native", options.compiler).read_bytes()
        options.out.mkdir(parents=True, exist_ok=True)
        print(make_wheel(tree, platform_of(library), options.out))
    return 0


def copy_tree(to: Path) -> None:
    """Copy what belongs into a wheel, with a project file that takes the library as it is and compiles nothing."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, to / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, to / name)
    project = (to / "pyproject.toml").read_text()
    project = re.sub(
        r"\[\[tool\.setuptools\.ext-modules\]\].*?^optional = true\n",
        "",
        project,
        flags=re.DOTALL | re.MULTILINE,
    )
    project = project.replace('"native.compiled" = ["*.h"]', '"native.compiled" = ["*.h", "*.so"]')
    (to / "pyproject.toml").write_text(project)


def platform_of(library: bytes) -> str:
    """Return the wheel's platform tag: the newest glibc that the library asks for, and its processor."""
    newest = max((int(minor) for minor in GLIBC.findall(library)), default=17)
    return f"manylinux_2_{max(newest, 17)}_{elf_machine(library)}"


def make_wheel(tree: Path, platform: str, out: Path) -> Path:
    """Build the wheel of `tree` for a platform; return its path in `out`."""
    with tempfile.TemporaryDirectory() as aside:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        options = ["--no-build-isolation", f"--config-settings=--build-option=--plat-name={platform}"]
        subprocess.run([*pip, *options, "--wheel-dir", aside, str(tree)], check=True)
        (wheel,) = Path(aside).glob("*.whl")
        return Path(shutil.move(wheel, out / wheel.name))


if __name__ == "__main__":
    sys.exit(main())
