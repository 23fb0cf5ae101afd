"""Tiny wheels and their lock file, made on the spot."""

from __future__ import annotations

import hashlib
import tarfile
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


# A backend of a source archive that needs nothing: it copies the wheel that the archive holds.
BACKEND = """
import pathlib, shutil

def build_wheel(folder, config_settings=None, metadata_directory=None):
    (wheel,) = pathlib.Path(__file__).parent.glob("*.whl")
    shutil.copy(wheel, folder)
    return wheel.name
"""


def make_source(folder: Path, name: str, tag: str = "py3-none-any") -> Path:
    """Write the source archive of a package, from which pip builds a wheel with this tag."""
    folder.mkdir(parents=True, exist_ok=True)
    inside = folder / f"{name}-1.0"
    wheel = make_wheel(inside, name, tag=tag)
    (inside / "backend.py").write_text(BACKEND)
    (inside / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (inside / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(inside, inside.name)
    wheel.unlink()
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
