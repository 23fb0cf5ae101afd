"""`make wheel`: a node without a compiler gets the compiled ops with the package."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from native.compiled import library

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that makes wheels; it takes the library of this tree, because compiling takes 15 s."""
    if library.why_not():
        pytest.skip(library.why_not())
    spec = importlib.util.spec_from_file_location("wheel_maker", ROOT / ".ci" / "wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    own = library.load().path
    monkeypatch.setattr(
        module, "build", lambda folder, compiler: Path(shutil.copy(own, folder / "compiled" / "_ops.so"))
    )
    return module


def test_a_wheel_holds_the_ops_for_any_python_and_its_processor(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["wheel.py", "--out", str(tmp_path)])
    assert maker.main() == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.name.startswith("clusterctl-") and "-py3-none-manylinux_2_" in path.name
    assert path.name.endswith(f"_{os.uname().machine}.whl")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(tmp_path / "site")
    env = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "HOME": str(tmp_path)}
    argv = [sys.executable, "-m", "native", "--json"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    chosen = {op["op"]: op["chosen"] for op in json.loads(done.stdout)["ops"]}
    assert chosen["layer_norm"] == "cpu"
    program = "from native.compiled.library import load; print(load().path)"
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")


def test_the_platform_names_the_newest_libc_that_the_library_needs(maker: ModuleType) -> None:
    header = library.load().path.read_bytes()[:64]
    machine = os.uname().machine
    assert maker.platform_of(header) == f"manylinux_2_17_{machine}"
    assert maker.platform_of(header + b"GLIBC_2.2.5\0GLIBC_2.29\0GLIBC_2.4\0") == f"manylinux_2_29_{machine}"
