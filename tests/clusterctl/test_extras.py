"""The command that installs an extra: from a checkout, from a wheel's file, from an index."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl import extras

ROOT = Path(__file__).resolve().parents[2]


def installed(site: Path, url: str | None) -> str:
    """Copy the launcher as pip installs it, with the address that pip recorded; return its command."""
    shutil.copytree(ROOT / "clusterctl", site / "clusterctl", ignore=shutil.ignore_patterns("__pycache__"))
    record = site / "clusterctl-0.1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: clusterctl\nVersion: 0.1.0\n")
    if url is not None:
        (record / "direct_url.json").write_text(json.dumps({"url": url}))
    program = "from clusterctl.extras import command; print(command('train,serve'))"
    argv = [sys.executable, "-S", "-c", program]
    done = subprocess.run(
        argv, cwd=site, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_checkout_is_named_by_its_folder() -> None:
    expected = [sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[train]"]
    assert shlex.split(extras.command("train")) == expected


@pytest.mark.parametrize("exists", [True, False])
def test_a_wheel_is_named_while_it_exists_and_then_the_index(tmp_path: Path, exists: bool) -> None:
    wheel = tmp_path / "a b" / "clusterctl-0.1.0-py3-none-any.whl"
    if exists:
        wheel.parent.mkdir()
        wheel.touch()
    words = shlex.split(installed(tmp_path / "site", wheel.as_uri()))
    assert words[1:] == ["-m", "pip", "install", f"{wheel if exists else 'clusterctl'}[train,serve]"]


def test_a_package_of_an_index_is_named_by_its_name(tmp_path: Path) -> None:
    assert installed(tmp_path / "site", None).endswith(" 'clusterctl[train,serve]'")
