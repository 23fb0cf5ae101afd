"""Tiny wheels and their lock file, made on the spot."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str = "1.0", tag: str = "py3-none-any", needs: str = ""
) -> Path:
    """Write a wheel with one module, `NAME.py`, that says its version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
        )
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(
            f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    return path


def lock_line(wheel: Path) -> str:
    name, version = wheel.name.split("-")[:2]
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def make_wheelhouse(folder: Path, *names: str, version: str = "1.0") -> Path:
    """Write wheels, their lock file, and pip's own wheel where this Python brings one."""
    wheels = [make_wheel(folder, name, version) for name in names]
    (folder / "requirements.lock").write_text("".join(map(lock_line, wheels)))
    import ensurepip

    for pip in (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"):
        (folder / pip.name).write_bytes(pip.read_bytes())
    return folder
