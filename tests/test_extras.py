"""Every set of extras resolves from an ordinary index: uv's resolver answers without installing anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What pip and uv may be told on one machine alone: another place for wheels hides what the index would answer.
OWN = ("PIP_FIND_LINKS", "PIP_CONSTRAINT", "UV_FIND_LINKS", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_OFFLINE")


def resolve(python: str, *requirements: str) -> subprocess.CompletedProcess[str]:
    """Return uv's answer for all extras together, and for other requirements: then every subset resolves too.

    For "any" Python it is one answer for all versions and processors; one version also needs wheels for it.
    """
    uv = pytest.importorskip("uv", reason="uv is not installed (pip install uv)").find_uv_bin()
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    environment |= {"UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never"}
    if index := os.environ.get("PIP_INDEX_URL"):
        environment.setdefault("UV_DEFAULT_INDEX", index)
    whole = python == "any"
    target = ["3.10", "--universal"] if whole else [python, "--python-platform", "x86_64-manylinux_2_28"]
    options = ["--all-extras", "--no-header", "--no-annotate", "--python-version", *target]
    done = subprocess.run(
        [uv, "pip", "compile", "pyproject.toml", "-", *options],
        cwd=ROOT,
        env=environment,
        input="\n".join(requirements),
        capture_output=True,
        text=True,
    )
    if "Failed to fetch" in done.stderr and not os.environ.get("CI"):
        pytest.skip(f"no index answers: {done.stderr.strip().splitlines()[-1]}")
    return done


@pytest.mark.slow
@pytest.mark.parametrize("python", ["any", "3.10", "3.11", "3.12", "3.13"])
def test_all_extras_resolve_together(python: str) -> None:
    done = resolve(python)
    assert done.returncode == 0, done.stderr
    assert {"torch", "triton", "deepspeed"} <= {line.partition("==")[0] for line in done.stdout.splitlines()}


@pytest.mark.slow
def test_a_requirement_that_cannot_be_met_is_noticed() -> None:
    done = resolve("3.12", "triton<3.7")
    assert done.returncode != 0
    assert "triton" in done.stderr
