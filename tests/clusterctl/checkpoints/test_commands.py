"""`clusterctl checkpoint ...` on a folder, as users type it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.conftest import clean_environment
from tests.support import checkpoints as made


def clusterctl(*words: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "clusterctl", "checkpoint", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, env=clean_environment(), timeout=100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    layout = {
        "world": 2,
        "tensor": 1,
        "pipeline": 1,
        "data": 2,
        "zero": 1,
        "engine": "torch",
        "precision": "fp32",
    }
    for step in (100, 200):
        made.saved(
            tmp_path, step, ranks=2, loss=2.5, tokens=12800, consumed_samples=100, layout=layout, time=0.0
        )
    return tmp_path


def test_list_and_info_show_a_folder(folder: Path) -> None:
    listed = clusterctl("list", folder)
    assert listed.returncode == 0, listed.stderr
    assert "200" in listed.stdout.splitlines()[2]
    assert "complete, latest" in listed.stdout
    rows = json.loads(clusterctl("list", folder, "--json").stdout)["checkpoints"]
    assert [(row["step"], row["health"], row["copies"]) for row in rows] == [
        (200, "complete", 1),
        (100, "complete", 1),
    ]
    shown = clusterctl("info", folder, "--step", 100)
    assert "2 ranks: tensor 1, pipeline 1, data 2, zero 1, torch, fp32" in shown.stdout
    assert "part-00001.safetensors" in shown.stdout
    facts = json.loads(clusterctl("info", folder / "step-00000100", "--json").stdout)
    assert facts["parameters"] == 12 * 6 + 12
    assert facts["files"]["part-00000.safetensors"]["on"] == ["here"]
    assert (facts["step"], facts["loss"], facts["tokens"]) == (100, 2.5, 12800)


def test_verify_names_the_damaged_file_and_tensor(folder: Path) -> None:
    done = clusterctl("verify", folder)
    assert done.returncode == 0, done.stderr
    assert "step-00000200: sound: 2 files on here" in done.stdout
    path = folder / "step-00000100" / "part-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    done = clusterctl("verify", folder, "--all")
    assert done.returncode == 1
    assert "part-00001.safetensors: damaged" in done.stdout
    assert "b.bias" in done.stdout
    assert "step-00000100" in done.stderr
    answer = json.loads(clusterctl("verify", folder, "--step", 100, "--json").stdout)
    assert not answer["ok"]
    assert answer["checkpoints"][0]["damaged"][0]["file"] == "part-00001.safetensors"


def test_a_folder_that_is_no_checkpoint_is_a_wrong_command(tmp_path: Path) -> None:
    done = clusterctl("list", tmp_path)
    assert done.returncode == 2
    assert "no checkpoint in it" in done.stderr
