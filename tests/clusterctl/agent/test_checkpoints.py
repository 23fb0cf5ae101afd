"""Checkpoints as a node's agent reads them, with the standard library alone, compared with what the trainer writes."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterctl.agent.files import checkpoints
from clusterctl.agent.request import Refused
from clusterctl.wire import saved
from clusterctl.wire.saved import encode_manifest
from tests.support import checkpoints as made
from trainer.checkpoint.keep import in_use
from trainer.checkpoint.part import MOMENTS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2):
        made.saved(tmp_path, step, ranks=3, loss=1.0 / step, tokens=100 * step)
    return tmp_path


def faults(step: Path) -> dict[str, tuple[str, str]]:
    answer = checkpoints.verify(str(step), lambda done: None)
    broken = {entry["file"]: (entry["fault"], entry["tensor"]) for entry in answer["faults"]}
    found = {
        name: (check["fault"], check["tensor"]) for name, check in answer["files"].items() if check["fault"]
    }
    return broken | found


def test_a_list_has_the_newest_first_with_the_facts_of_the_manifest(folder: Path) -> None:
    listing = checkpoints.listing(str(folder))
    newest, older = listing["checkpoints"]
    assert (newest["step"], older["step"]) == (2, 1)
    assert (newest["loss"], newest["tokens"], newest["state"]) == (0.5, 200, "all")
    assert newest["have"] == ["part-00000.safetensors", "part-00001.safetensors", "part-00002.safetensors"]
    assert newest["count"] == 3
    assert not newest["faults"]
    assert listing["latest"] == "step-00000002"
    assert listing["disk"]["free"] > 0


def test_a_folder_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    listing = checkpoints.listing(str(tmp_path / "no"))
    assert listing["missing"]
    assert not listing["checkpoints"]


def test_files_of_another_size_and_links_are_faults_and_do_not_count(folder: Path) -> None:
    step = folder / "step-00000002"
    (step / "part-00000.safetensors").write_bytes(b"short")
    (step / "part-00001.safetensors").rename(folder / "away")
    (step / "part-00001.safetensors").symlink_to(folder / "away")
    entry = checkpoints.describe(str(step))
    assert entry["have"] == ["part-00002.safetensors"]
    assert "has 5 bytes" in entry["faults"][0]
    assert "not a regular file" in entry["faults"][1]


def test_a_folder_that_every_user_can_change_is_refused(folder: Path) -> None:
    step = folder / "step-00000002"
    step.chmod(0o777)
    assert "every user of this machine can change" in checkpoints.describe(str(step))["faults"][0]


def test_every_flipped_bit_is_detected_and_its_file_named(folder: Path) -> None:
    step = folder / "step-00000001"
    assert not faults(step)
    chance = random.Random(7)
    for path in sorted(step.iterdir()):
        whole = path.read_bytes()
        for _ in range(150):
            at, bit = chance.randrange(len(whole)), chance.randrange(8)
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            assert path.name in faults(step), (path.name, at, bit)
        path.write_bytes(whole)
    assert not faults(step)


def test_damage_in_the_data_names_the_tensor(folder: Path) -> None:
    path = folder / "step-00000001" / "part-00000.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    fault, tensor = faults(folder / "step-00000001")[path.name]
    assert "sha256 differs" in fault
    assert "b.bias" in tensor


def test_weights_that_are_not_finite_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: int, rows: int = 12) -> Any:
        state = plain(step, rows)
        state["a.weight"][7, 2] = torch.nan
        # Moments may be anything, and so may large finite weights.
        state["exp_avg.a.weight"][0, 0] = torch.inf
        state["b.bias"][3] = -3.0e38
        return state

    plain = made.state_at
    monkeypatch.setattr(made, "state_at", broken)
    made.saved(tmp_path, 1, ranks=2)
    found = faults(tmp_path / "step-00000001")
    assert list(found) == ["part-00001.safetensors"]
    assert found["part-00001.safetensors"][1] == "a.weight@6:12,0:6"


def rewritten(step: Path, **changes: Any) -> None:
    """Write a manifest with other entries and its right hash."""
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["sha256"]
    (step / "manifest.json").write_bytes(encode_manifest({**manifest, **changes}))


def test_a_newer_format_wrong_names_and_gaps_in_the_table_are_refused(folder: Path) -> None:
    step = folder / "step-00000001"
    manifest = json.loads((step / "manifest.json").read_text())
    rewritten(step, format=3)
    assert "format 3 by a newer version" in faults(step)["manifest.json"][0]
    outside = {**manifest["files"], "../part": manifest["files"]["part-00000.safetensors"]}
    rewritten(step, format=2, files=outside)
    assert "files['../part'] missing or of the wrong kind" in faults(step)["manifest.json"][0]
    fewer = {name: entry for name, entry in manifest["files"].items() if name != "part-00002.safetensors"}
    rewritten(step, files=fewer)
    assert faults(step)["manifest.json"] == ("its files do not hold a.weight exactly once", "a.weight")


def test_a_header_that_claims_terabytes_allocates_nothing(folder: Path) -> None:
    path = folder / "step-00000001" / "part-00000.safetensors"
    path.write_bytes((1 << 42).to_bytes(8, "little") + path.read_bytes()[8:])
    assert "claims a header of 4398046511104 bytes" in faults(folder / "step-00000001")[path.name][0]


def test_a_checkpoint_in_use_is_not_removed(folder: Path) -> None:
    step = folder / "step-00000001"
    with in_use(step):
        assert checkpoints.remove(str(step), "", check=False)["kept"] == "it is being read or copied"
    with checkpoints.protected(str(step), "token"):
        assert checkpoints.is_marked(str(step))
        assert checkpoints.remove(str(step), "", check=True)["kept"]
    mark = step / f"{saved.IN_USE}other"
    mark.touch()
    assert checkpoints.remove(str(step), "", check=False)["kept"]
    old = time.time() - 2 * saved.FRESH
    os.utime(mark, (old, old))
    assert checkpoints.remove(str(step), "another digest", check=False)["kept"] == "it was saved again"
    assert checkpoints.remove(str(step), checkpoints.digest_of(str(step)), check=False)["bytes"] > 0
    assert not step.exists()
    assert (folder / "step-00000002").is_dir()


def test_only_folders_of_checkpoints_are_removed(folder: Path) -> None:
    with pytest.raises(Refused, match="not the folder of a checkpoint"):
        checkpoints.remove(str(folder), "", check=False)


def test_version_0_1_is_read(tmp_path: Path) -> None:
    step = tmp_path / "step-00000005"
    step.mkdir()
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, step / "model.safetensors")
    import hashlib

    content = (step / "model.safetensors").read_bytes()
    files = {"model.safetensors": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    (step / "manifest.json").write_text(json.dumps({"format": 1, "step": 5, "files": files}))
    assert not faults(step)
    (step / "model.safetensors").write_bytes(content[:-1] + b"x")
    assert "sha256 differs" in faults(step)["model.safetensors"][0]


def test_the_names_of_moments_agree_with_the_trainers() -> None:
    assert tuple(name[:-1] for name in saved.MOMENTS) == MOMENTS
