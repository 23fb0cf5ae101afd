"""`clusterctl checkpoint ...` on a folder, as users type it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.jobs.run_folder import find_run
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
            tmp_path,
            step,
            ranks=2,
            loss=2.5,
            tokens=12800,
            consumed_samples=100,
            about={"layout": layout, "time": 0.0},
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
    assert "step-00000200: valid: 2 files here" in done.stdout
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


def test_diff_shows_what_differs_between_layouts(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    made.saved(other, 100, ranks=3)
    same = clusterctl("diff", folder / "step-00000100", other / "step-00000100")
    assert same.returncode == 0, same.stderr
    assert "0 of 6 tensors differ" in same.stdout
    done = clusterctl("diff", folder / "step-00000100", folder / "step-00000200")
    assert done.returncode == 1
    assert "6 of 6 tensors differ" in done.stdout
    assert "a.weight" in done.stdout
    answer = json.loads(
        clusterctl("diff", folder / "step-00000100", folder / "step-00000200", "--json").stdout
    )
    assert not answer["equal"]
    assert answer["tensors"]["b.bias"]["numbers"] == 12


def test_prune_asks_what_to_keep_and_deletes_the_rest(folder: Path) -> None:
    assert "no option says which checkpoints to keep" in clusterctl("prune", folder).stderr
    listed = clusterctl("prune", folder, "--keep-last", 1, "--dry-run")
    assert "would delete step-00000100" in listed.stdout
    refused = clusterctl("prune", folder, "--keep-last", 1)
    assert refused.returncode == 2
    done = clusterctl("prune", folder, "--keep-last", 1, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["kept"] for row in json.loads(done.stdout)["checkpoints"]] == ["the newest complete one", ""]
    assert [path.name for path in folder.glob("step-*")] == ["step-00000200"]


def test_pull_copies_a_folder_and_refuses_a_damaged_one(folder: Path, tmp_path: Path) -> None:
    dest = tmp_path / "copy"
    done = clusterctl("pull", folder, "--step", 100, "-o", dest)
    assert done.returncode == 0, done.stderr
    assert clusterctl("verify", dest).returncode == 0
    again = clusterctl("pull", folder, "--step", 100, "-o", dest, "--json")
    assert json.loads(again.stdout)["bytes"] == 0
    other = clusterctl("pull", folder, "--step", 200, "-o", dest)
    assert "another checkpoint is there" in other.stderr
    path = folder / "step-00000200" / "part-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    damaged = clusterctl("pull", folder, "-o", tmp_path / "bad")
    assert damaged.returncode == 4
    assert "it was not put in place" in damaged.stderr
    assert not (tmp_path / "bad").exists()


def test_pull_refuses_a_wrong_place_before_it_fetches(folder: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_text("mine")
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    expected = {
        file: "a file, not a folder",
        file / "below": "a file, not a folder",
        other: "contains other files, such as notes.txt",
        Path(): "does not name a folder",
    }
    for place, problem in expected.items():
        done = clusterctl("pull", folder, "-o", place)
        assert (done.returncode, problem in done.stderr) == (2, True), done.stderr
    assert file.read_text() == "mine"
    assert [path.name for path in other.iterdir()] == ["notes.txt"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".incoming")]


def test_verify_names_absent_files(folder: Path) -> None:
    (folder / "step-00000200" / "part-00001.safetensors").unlink()
    done = clusterctl("verify", folder, "--step", 200)
    assert done.returncode == 1
    assert "step-00000200/part-00001.safetensors: missing, on every machine" in done.stdout
    assert clusterctl("verify", folder, "--step", 200, "--all").returncode == 2


def test_an_empty_name_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the name of the run is empty"):
        find_run(tmp_path, "")
    with pytest.raises(UsageError, match=r"/nowhere/x: no such file or folder"):
        find_run(tmp_path, "/nowhere/x")


def test_a_folder_that_every_user_can_replace_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    done = clusterctl("verify", folder)
    assert done.returncode == 1
    assert f"chmod o-w {folder}, if you trust what is there" in done.stdout
    folder.chmod(0o1777)
    assert clusterctl("verify", folder).returncode == 0
