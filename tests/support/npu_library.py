"""Compile the simulated NPU of tests/support/npu_node, and empty libraries by CANN's names (10 s)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NODE = Path(__file__).parent / "npu_node"


def build(folder: Path) -> Path:
    """Return the folder with npu.so, libascendcl.so and libhccl.so; skip the test without a compiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    import torch

    home = Path(torch.__file__).parent
    includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    links = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch", f"-Wl,-rpath,{home / 'lib'}"]
    whole = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", *includes, str(NODE / "device.cpp")]
    subprocess.run([*whole, "-o", str(folder / "npu.so"), *links], check=True, capture_output=True)
    for name in ("libascendcl.so", "libhccl.so"):
        empty = [compiler, "-shared", "-x", "c++", "/dev/null", "-o", str(folder / name)]
        subprocess.run(empty, check=True, capture_output=True)
    return folder
