"""A Python environment with the launcher's own dependencies alone, as `pip install clusterctl` makes it."""

from __future__ import annotations

import re
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lean_python(folder: Path) -> Path:
    """Make an environment of links to the packages of this one; return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    for found in _dependencies("clusterctl", {}).values():
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    (site / "clusterctl.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"


def _dependencies(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Add a distribution's dependencies, and theirs, without extras and without those of other systems."""
    for line in distribution(name).requires or ():
        needed = re.match(r"[\w.-]+", line)
        if needed and "extra ==" not in line and needed[0] not in found:
            try:
                found[needed[0]] = distribution(needed[0])
            except PackageNotFoundError:
                continue
            _dependencies(needed[0], found)
    return found
