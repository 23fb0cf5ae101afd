from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
import torch

from trainer.checkpoint.manifest import decode_manifest, encode_manifest
from trainer.checkpoint.store import (
    MODEL,
    Checkpoint,
    found,
    latest,
    prune,
    save,
    verify,
)
from trainer.errors import CheckpointError, TrainingFailed

FACTS = {"config": {"model": {}, "optimizer": {}}, "data": {}, "consumed_samples": 0, "optimizer_steps": 0}


WRONG_MANIFESTS = [
    b"[" * 100_000,
    b"null",
    b"3",
    b'{"format": 1}',
    b'{"format": true, "step": 1}',
    b'{"format": 1, "step": "3", "files": {}, "config": {}, "data": {}}',
    b'{"format": 1, "step": 3, "files": {"model.safetensors": []}}',
    b'{"format": 1, "step": 3, "files": {"model.safetensors": {"bytes": "1"}}}',
    b'{"format": 1, "step": 3, "files": {"../model.safetensors": {"bytes": 1, "sha256": "0"}}}',
    b'{"format": 1, "step": 3, "files": [["model.safetensors", {"rha256": 0}]]}',
    b"\xff\xfe",
    b"",
]


def saved(folder: Path, step: int, size: int = 10) -> Checkpoint:
    return save(folder, step, {MODEL: {"w": torch.full((size,), float(step))}}, FACTS, None)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)


def test_what_was_saved_verifies_and_is_read_back(tmp_path: Path) -> None:
    path = saved(tmp_path, 100).path
    assert path.name == "step-00000100"
    assert verify(path).tensors(MODEL)["w"].tolist() == [100.0] * 10
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: flip_a_bit(path / MODEL),
        lambda path: os.truncate(path / MODEL, 20),
        lambda path: (path / MODEL).unlink(),
        lambda path: (path / "manifest.json").unlink(),
        lambda path: (path / "manifest.json").write_text("{"),
        lambda path: (path / "manifest.json").write_text('{"format": 3}'),
        lambda path: (path / "manifest.json").write_text('{"format": 1, "step": 3, "files": {"../x": {}}}'),
        lambda path: (path / "manifest.json").write_text("[]"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path: Path, harm: object) -> None:
    saved(tmp_path, 1)
    path = saved(tmp_path, 2).path
    harm(path)  # type: ignore[operator]
    chosen, skipped = latest(tmp_path)
    assert chosen is not None and chosen.step == 1
    assert len(skipped) == 1 and "step-00000002" in skipped[0]
    with pytest.raises(CheckpointError):
        verify(path)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    file = saved(tmp_path, 1).path / "manifest.json"
    content = file.read_bytes()
    decode_manifest(content, file)
    for place in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            decode_manifest(bytes(flipped), file)


def test_a_thousand_flipped_bits_over_all_files_are_noticed(tmp_path: Path) -> None:
    random = Random(5)
    folder = saved(tmp_path, 1, 300).path
    files = {file: file.read_bytes() for file in folder.iterdir()}
    for _ in range(1000):
        file = random.choice(sorted(files))
        content = bytearray(files[file])
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=file.name):
            verify(folder)
        file.write_bytes(files[file])
    verify(folder)


@pytest.mark.parametrize("content", WRONG_MANIFESTS)
def test_a_manifest_of_the_wrong_kind_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    """Manifests without a hash are read as version 0.1 wrote them, so that their hash does not hide the fault."""
    saved(tmp_path, 1)
    path = saved(tmp_path, 2).path
    (path / "manifest.json").write_bytes(content)
    chosen, skipped = latest(tmp_path)
    assert chosen is not None and chosen.step == 1
    assert f"{path / 'manifest.json'}: " in skipped[0]


def test_a_manifest_of_a_newer_version_says_so(tmp_path: Path) -> None:
    path = saved(tmp_path, 1).path
    (path / "manifest.json").write_bytes(encode_manifest({"format": 99, "new": True}))
    with pytest.raises(CheckpointError, match="format 99 by a newer version"):
        verify(path)


def test_a_folder_or_file_that_every_user_can_change_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, 1).path
    path.chmod(0o777)
    with pytest.raises(CheckpointError, match="every user"):
        verify(path)
    path.chmod(0o755)
    (path / MODEL).chmod(0o666)
    with pytest.raises(CheckpointError, match="every user"):
        verify(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, 1).path
    (path / MODEL).rename(tmp_path / "elsewhere")
    (path / MODEL).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="not a regular file"):
        verify(path)


@pytest.mark.parametrize(("number", "words"), [(28, "No space left"), (30, "Read-only"), (13, "Permission")])
def test_a_disk_that_refuses_is_reported_with_path_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(TrainingFailed, match=rf"step-00000001: cannot be saved: {words}") as caught:
        saved(tmp_path, 1)
    assert caught.value.hint


def test_a_disk_that_fills_up_during_a_save_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    saved(tmp_path, 1)
    code = (
        "import resource, signal, sys, torch; from pathlib import Path\n"
        "from trainer.checkpoint.store import MODEL, save; from trainer.errors import TrainingFailed\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: save(Path(sys.argv[1]), 2, {MODEL: {'w': torch.zeros(10_000)}}, {}, None)\n"
        "except TrainingFailed as error: print(error.message)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "step-00000002: cannot be saved: File too large" in result.stdout, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    verify(tmp_path / "step-00000001")


def test_without_any_good_one_nothing_is_chosen(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") == (None, [])
    flip_a_bit(saved(tmp_path, 1).path / MODEL)
    chosen, skipped = latest(tmp_path)
    assert chosen is None and len(skipped) == 1


def test_pruning_keeps_the_newest_and_never_removes_the_only_good_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)
    assert [path.name for path in prune(tmp_path, 2)] == ["step-00000001"]
    for step in (2, 3):
        flip_a_bit(tmp_path / f"step-0000000{step}" / MODEL)
    saved(tmp_path, 1)
    assert prune(tmp_path, 2) == []
    assert len(found(tmp_path)) == 3


def test_saving_a_step_again_replaces_it_whole(tmp_path: Path) -> None:
    flip_a_bit(saved(tmp_path, 5).path / MODEL)
    saved(tmp_path, 5)
    assert verify(tmp_path / "step-00000005").step == 5
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-00000009-1").mkdir()
    (tmp_path / ".tmp-step-00000009-1" / MODEL).write_bytes(b"half")
    saved(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_a_full_disk_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(TrainingFailed, match=r"step-00000001: cannot be saved: No space left") as caught:
        saved(tmp_path, 1)
    assert "needs 0 MB, the disk has" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_a_kill_in_the_middle_of_saving_never_costs_the_last_good_one(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from trainer.checkpoint.store import MODEL, save\n"
        "facts = {'config': {'model': {}, 'optimizer': {}}, 'data': {}, 'consumed_samples': 0, 'optimizer_steps': 0}\n"
        "for step in range(1, 10**6):\n"
        "    save(Path(sys.argv[1]), step, {MODEL: {'w': torch.zeros(200_000)}}, facts, None)\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(5):
        last = int(process.stdout.readline())
    time.sleep(0.0123)
    process.send_signal(signal.SIGKILL)
    last = max([last, *(int(line) for line in process.stdout.read().split())])
    process.wait()
    chosen, skipped = latest(tmp_path)
    assert chosen is not None and chosen.step >= last and not skipped


def test_the_manifest_lists_every_file_with_size_and_hash(tmp_path: Path) -> None:
    tokenizer = tmp_path / "words.json"
    tokenizer.write_text("{}")
    path = save(tmp_path / "c", 1, {MODEL: {"w": torch.zeros(1)}}, FACTS, tokenizer).path
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == {MODEL, "tokenizer.json"}
    assert all({"bytes", "sha256"} == set(entry) for entry in manifest["files"].values())
