from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from clusterctl.wire.saved import encode_manifest
from native.hashes import checksum
from tests.conftest import Cases
from tests.support.checkpoints import load_with, save_with, saved, state_at, whole_state
from trainer.checkpoint import keep, read, save, write
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.keep import in_use, is_marked, prune, remove_unfinished
from trainer.checkpoint.manifest import decode_manifest
from trainer.checkpoint.part import Part
from trainer.checkpoint.store import Checkpoint, found, open_checkpoint, verify
from trainer.config.data import DataIdentity
from trainer.config.parts import KeepConfig
from trainer.corpus.indexed import Writer
from trainer.errors import CheckpointError, TrainingFailed
from trainer.files import sha256
from trainer.plan.resolve import read_config
from trainer.samples.dataset import Data
from trainer.side_files import TOKENIZER

PART = "part-00000.safetensors"


def old_manifest(**changes: object) -> bytes:
    """Return a manifest of version 0.1 with some entries changed."""
    facts = {
        "config": {"model": {}, "optimizer": {}},
        "data": {},
        "consumed_samples": 0,
        "optimizer_steps": 0,
    }
    return json.dumps({"format": 1, "step": 3, "files": {}, **facts, **changes}).encode()


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
    old_manifest(loss="0.5"),
    old_manifest(loss_scale={"scale": "2"}),
    old_manifest(base={"source": "/w"}),
    old_manifest(origin=["hf"]),
    old_manifest(state="moments"),
    b"\xff\xfe",
    b"",
]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of a checkpoint."""
    checkpoint = open_checkpoint(folder)
    return checkpoint.read(list(checkpoint.table))


def test_what_was_saved_verifies_and_is_read_back(tmp_path: Path) -> None:
    path = saved(tmp_path, 100).path
    assert path.name == "step-00000100"
    state = state_at(100)
    tensors = verify(path).read(list(state))
    assert all(torch.equal(tensors[key], state[key]) for key in state)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step-00000100"]
    assert (tmp_path / "latest").read_text() == "step-00000100\n"


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: flip_a_bit(path / PART),
        lambda path: os.truncate(path / PART, 20),
        lambda path: (path / PART).unlink(),
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
    ((step, held, notes),) = load_with([tmp_path])
    assert step == 1 and torch.equal(held.state["a.weight"], state_at(1)["a.weight"])
    assert len(notes) == 1 and "step-00000002" in notes[0]
    with pytest.raises(CheckpointError, match=r"step-00000002/.*(damaged|No such file)"):
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


def test_flipped_bits_of_all_files_are_noticed_and_the_older_checkpoint_loads(
    tmp_path: Path, cases: Cases
) -> None:
    """Half of the bits are drawn in proportion to the sizes of the files, half from each file alike."""
    tokenizer = tmp_path / "words.json"
    tokenizer.write_text(json.dumps({f"word {number}": number for number in range(200)}))
    folder = [saved(tmp_path, step, 3, tokenizer=tokenizer, rows=600).path for step in (1, 2)][1]
    files = {file: file.read_bytes() for file in sorted(folder.iterdir())}
    counts = Counter[str]()
    for number, random in cases(300):
        weights = [len(content) for content in files.values()] if random.random() < 0.5 else None
        (file,) = random.choices(list(files), weights)
        content = bytearray(files[file])
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        file.write_bytes(content)
        # By SHA-256, and then as a load does, by the checksums; a load of tensors does not read the tokenizer.
        for look in (verify, read_all)[: 1 if file.name == TOKENIZER else 2]:
            with pytest.raises(CheckpointError, match=file.name):
                look(folder)
        if number % 100 == 0:
            step, _, notes = (loaded := load_with([tmp_path] * 3, rows=600))[0]
            assert step == 1 and any(folder.name in note for note in notes)
            state, expected = whole_state(loaded), state_at(1, 600)
            assert all(torch.equal(state[key], expected[key]) for key in expected)
        file.write_bytes(files[file])
        counts[file.name] += 1
    print(counts)
    verify(folder)
    read_all(folder)


@pytest.mark.parametrize("content", WRONG_MANIFESTS)
def test_a_manifest_of_the_wrong_kind_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    """Manifests without a hash are read as version 0.1 wrote them, so that their hash does not hide the fault."""
    saved(tmp_path, 1)
    path = saved(tmp_path, 2).path
    (path / "manifest.json").write_bytes(content)
    ((step, _, notes),) = load_with([tmp_path])
    assert step == 1 and f"{path / 'manifest.json'}: " in notes[0]


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
    (path / PART).chmod(0o666)
    with pytest.raises(CheckpointError, match="every user"):
        verify(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, 1).path
    (path / PART).rename(tmp_path / "elsewhere")
    (path / PART).symlink_to(tmp_path / "elsewhere")
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
        "import resource, signal, sys; from pathlib import Path\n"
        "from tests.support.checkpoints import saved; from trainer.errors import TrainingFailed\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: saved(Path(sys.argv[1]), 2)\n"
        "except TrainingFailed as error: print(error.message)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "step-00000002: cannot be saved: File too large" in result.stdout, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    verify(tmp_path / "step-00000001")


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path: Path) -> None:
    """Else it would silently begin anew, and prune what could be repaired."""
    assert load_with([tmp_path / "absent"])[0][0] == 0
    flip_a_bit(saved(tmp_path, 1).path / PART)
    with pytest.raises(CheckpointError, match=r"no checkpoint of this run is sound\n.*part-00000") as caught:
        load_with([tmp_path])
    assert "resume: never" in caught.value.hint


def test_pruning_keeps_the_newest_the_regular_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 8):
        saved(tmp_path, step, eval_loss=abs(step - 2.0))
    names = [path.name for path in prune(tmp_path, KeepConfig(2, every=4, best=1), "step-00000007")]
    assert names == ["step-00000005", "step-00000003", "step-00000001"]


def test_pruning_spares_what_was_confirmed_and_what_is_being_read(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)
    with in_use(tmp_path / "step-00000002"):
        assert prune(tmp_path, KeepConfig(1), "step-00000001") == []
        assert len(found(tmp_path)) == 3
    assert [path.name for path in prune(tmp_path, KeepConfig(1), "step-00000001")] == ["step-00000002"]


def test_saving_a_step_again_replaces_it_whole(tmp_path: Path) -> None:
    flip_a_bit(saved(tmp_path, 5).path / PART)
    saved(tmp_path, 5)
    assert verify(tmp_path / "step-00000005").step == 5
    assert [path.name for path in found(tmp_path)] == ["step-00000005"]


def test_a_step_that_was_being_replaced_is_still_found(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    path = saved(tmp_path, 5).path
    path.rename(path.with_name(path.name + ".old"))
    assert load_with([tmp_path])[0][0] == 5


KILLED_SAVE = """
import os, signal, sys, threading
from pathlib import Path
from tests.support.checkpoints import save_with
from trainer.checkpoint import save
base, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
work, calls, lock = getattr(save, name), [], threading.Lock()
def killed(*given):
    with lock:
        result = work(*given)
        calls.append(name)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(save, name, killed)
save_with([base / "a", base / "a", base / "b", base / "b"], 1)
"""


@pytest.mark.parametrize(
    ("point", "count", "step"),
    [
        ("write_parts", 4, 0),
        ("publish", 1, 0),
        ("publish", 2, 1),
        ("write_latest", 1, 1),
    ],
)
def test_a_first_save_that_is_killed_is_no_checkpoint_for_another_layout(
    tmp_path: Path, point: str, count: int, step: int
) -> None:
    words = [sys.executable, "-c", KILLED_SAVE, str(tmp_path), point, str(count)]
    assert subprocess.run(words, timeout=120).returncode == -signal.SIGKILL
    for node in "ab":
        remove_unfinished(tmp_path / node)
    # The files of a complete one would be moved between these nodes by a collective.
    for layout in ("aabb",) if step else ("ab", "aab", "bbbba"):
        loaded = load_with([tmp_path / node for node in layout])
        assert [one[0] for one in loaded] == [step] * len(layout)
        notes = loaded[0][2]
        assert bool(notes) == (point == "publish" and count == 1)
        assert all("the first save did not finish" in note for note in notes)
    half = next((path for path in tmp_path.glob("*/step-00000001") if not step), None)
    if half is not None:
        # Whoever names it wants its numbers.
        with pytest.raises(CheckpointError, match="2 of its 4 files are on no node of this run"):
            load_with([tmp_path / "a", tmp_path / "b"], half)


def test_a_confirmed_checkpoint_with_files_on_other_nodes_is_refused(tmp_path: Path) -> None:
    save_with([tmp_path / "a", tmp_path / "b"], 1)
    for node in "ab":
        with pytest.raises(CheckpointError, match="1 of its 2 files are on no node of this run"):
            load_with([tmp_path / node])


def test_the_manifest_lists_every_file_and_every_tensor(tmp_path: Path) -> None:
    tokenizer = tmp_path / "words.json"
    tokenizer.write_text("{}")
    path = saved(tmp_path / "c", 1, ranks=2, tokenizer=tokenizer).path
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == {PART, "part-00001.safetensors", "tokenizer.json"}
    assert manifest["tensors"]["exp_avg.a.weight"] == {"dtype": "F32", "shape": [12, 6]}
    verify(path)


def test_a_checkpoint_of_version_0_1_loads(tmp_path: Path) -> None:
    state, path = state_at(3), tmp_path / "step-00000003"
    path.mkdir()
    save_file({key: one for key, one in state.items() if "exp" not in key}, path / "model.safetensors")
    save_file({key: one for key, one in state.items() if "exp" in key}, path / "optimizer.safetensors")
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in path.iterdir()}
    facts = {
        "config": {"model": {}, "optimizer": {}},
        "data": {},
        "consumed_samples": 24,
        "optimizer_steps": 3,
    }
    (path / "manifest.json").write_text(
        json.dumps({"format": 1, "step": 3, **facts, "files": files}, indent=2)
    )
    assert verify(path).step == 3
    loaded = load_with([tmp_path] * 2)
    assert loaded[0][0] == 3 and loaded[0][1].optimizer_steps == 3
    assert all(torch.equal(tensor, state[key]) for key, tensor in whole_state(loaded).items())
    flip_a_bit(path / "model.safetensors")
    with pytest.raises(CheckpointError, match="sha256 differs"):
        load_with([tmp_path])


def test_weights_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = state_at(1)
    broken["a.weight"][2, 1] = float("nan")
    monkeypatch.setattr("tests.support.checkpoints.state_at", lambda step, rows=12: broken)
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"part-00000.*: a\.weight holds numbers that are not finite"):
        load_with([tmp_path])


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_other_numbers_of_ranks_and_nodes_load_the_same_state(tmp_path: Path, nodes: int) -> None:
    folders = [tmp_path / str(rank * nodes // 4) for rank in range(4)]
    for step in (1, 2):
        assert not [error for error in save_with(folders, step) if isinstance(error, BaseException)]
    if nodes == 1:
        for ranks in (1, 2, 3):
            loaded = load_with([tmp_path / "0"] * ranks)
            assert [step for step, *_ in loaded] == [2] * ranks
            assert all(torch.equal(tensor, state_at(2)[key]) for key, tensor in whole_state(loaded).items())
    loaded = load_with(folders)
    assert all(torch.equal(tensor, state_at(2)[key]) for key, tensor in whole_state(loaded).items())
    assert {(path / "latest").read_text() for path in folders} == {"step-00000002\n"}
    if nodes > 1:
        shutil.rmtree(folders[-1] / "step-00000002")
        loaded = load_with(folders)
        assert [step for step, *_ in loaded] == [1] * 4
        assert "of its 4 files are on no node" in loaded[0][2][0]


def test_a_step_saved_again_on_one_node_of_two_alone_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for step in (1, 2):
        save_with(folders, step)
    publish = save.publish

    def publish_on_a(aside: Path, target: Path) -> None:
        if "/b/" in str(target):
            raise OSError(5, "Input/output error")
        publish(aside, target)

    with monkeypatch.context() as patch:
        patch.setattr(save, "publish", publish_on_a)
        for _ in range(2):
            assert all(isinstance(error, TrainingFailed) for error in save_with(folders, 2, eval_loss=1.0))
    assert sorted(path.name for path in found(folders[0]))[1:] == [
        f"step-00000002{old}" for old in ("", ".old", ".old1")
    ]
    loaded = load_with(folders)
    assert [step for step, *_ in loaded] == [2, 2]
    assert all(torch.equal(tensor, state_at(2)[key]) for key, tensor in whole_state(loaded).items())
    assert not [error for error in save_with(folders, 2) if isinstance(error, BaseException)]
    assert [path.name for path in found(folders[0])] == ["step-00000002", "step-00000001"]


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_the_older_one_stays(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "a", tmp_path / "b"]
    save_with(folders, 1)
    (tmp_path / "b").rename(tmp_path / "c")
    (tmp_path / "b").write_text("a file stands where the folder was")
    results = save_with(folders, 2)
    assert all(isinstance(error, TrainingFailed) for error in results)
    assert {str(error) for error in results} == {
        f"rank 2 on node3: {tmp_path}/b/step-00000002: cannot be saved: Not a directory"
    }
    assert [path.name for path in found(tmp_path / "a")] == ["step-00000001"]
    assert (tmp_path / "a" / "latest").read_text() == "step-00000001\n"


def test_hashes_do_not_depend_on_how_the_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "PIECE", 64)
    data, random = os.urandom(64 * 40 + 5), Random(3)
    expected = "".join(hashlib.sha256(data[at : at + 64]).hexdigest() for at in range(0, len(data), 64))
    for most in (1, 63, 64, 200, 5000):
        hashes, at = write.PieceHashes(), 0
        while at < len(data):
            end = at + random.randint(1, most)
            hashes.add(memoryview(data)[at:end])
            at = end
        found = hashes.finish()
        assert found["sha256"] == expected
        if checksum.is_available():
            pieces = [memoryview(data)[start : start + 64] for start in range(0, len(data), 64)]
            assert found["checksum128"] == checksum.block_checksums(pieces).hex()


@pytest.mark.parametrize("threads", [1, 3])
def test_windows_runs_and_threads_read_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Pieces smaller than a row, requests larger than a window, and a slice whose neighbours are not read."""
    monkeypatch.setattr(write, "PIECE", 16)
    state, path = state_at(1), saved(tmp_path, 1, ranks=3).path
    for window, run in ((16, 16), (64, 200), (4096, 1 << 20)):
        monkeypatch.setattr(read, "WINDOW", window)
        monkeypatch.setattr(read, "RUN", run)
        checkpoint = verify(path)
        tensors, parts = read.tensors_to_fill(checkpoint.table, list(state))
        parts.append(Part("a.weight", (12, 6), ((3, 9), (2, 5)), torch.zeros(6, 3)))
        read.read_parts(path, parts, checkpoint.pieces_for(parts), checkpoint.digests, threads)
        assert all(torch.equal(tensors[key], state[key]) for key in state)
        assert torch.equal(parts[-1].tensor, state["a.weight"][3:9, 2:5])
    flip_a_bit(path / PART)
    with pytest.raises(CheckpointError, match=r"part-00000.*damaged: bytes"):
        read.read_parts(path, parts, checkpoint.pieces_for(parts), checkpoint.digests, threads)


@pytest.mark.parametrize("read_back", [True, False])
def test_a_disk_that_changes_what_was_written_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_back: bool
) -> None:
    saved(tmp_path, 1)
    drop = save.drop_cached

    def harm(file: Path, size: int = 0) -> None:
        drop(file, size)
        if file.name == PART:
            flip_a_bit(file)

    monkeypatch.setattr(save, "drop_cached", harm)
    if read_back:
        with pytest.raises(TrainingFailed, match=r"not saved: .*part-00000.*damaged: bytes") as caught:
            saved(tmp_path, 2, read_back=True)
        assert "dmesg" in caught.value.hint
        assert [path.name for path in found(tmp_path)] == ["step-00000001"]
        assert (tmp_path / "latest").read_text() == "step-00000001\n"
    else:
        saved(tmp_path, 2, read_back=False)
        assert load_with([tmp_path])[0][0] == 1


def test_a_mark_of_another_program_protects_a_checkpoint_while_it_is_fresh(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)
    mark = tmp_path / "step-00000002" / ".in-use.copy"
    mark.touch()
    assert [path.name for path in prune(tmp_path, KeepConfig(1), "step-00000003")] == ["step-00000001"]
    assert verify(tmp_path / "step-00000002").step == 2
    os.utime(mark, (time.time() - 601,) * 2)
    assert [path.name for path in prune(tmp_path, KeepConfig(1), "step-00000003")] == ["step-00000002"]


def test_a_load_marks_the_checkpoint_and_renews_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = saved(tmp_path, 1).path, list[list[str]]()
    fill = Checkpoint.fill

    def look(self: Checkpoint, parts: object) -> None:
        seen.append([file.name for file in path.glob(".in-use.*")])
        assert is_marked(path) and prune(tmp_path, KeepConfig(1), "step-00000009") == []
        fill(self, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoint, "fill", look)
    load_with([tmp_path] * 2)
    assert [len(names) for names in seen] == [1, 1]
    assert not is_marked(path) and not list(path.glob(".in-use.*"))
    monkeypatch.setattr(keep, "RENEWED", 0.01)
    with in_use(path, mark=True):
        (file,) = path.glob(".in-use.*")
        os.utime(file, (0, 0))
        for _ in range(500):
            time.sleep(0.01)
            if is_marked(path):
                break
        assert is_marked(path)


def test_a_damaged_tokenizer_is_noticed_by_a_load(tmp_path: Path) -> None:
    tokenizer = tmp_path / "words.json"
    tokenizer.write_text("{}     ")
    for step in (1, 2):
        path = saved(tmp_path, step, tokenizer=tokenizer).path
    flip_a_bit(path / "tokenizer.json")
    ((step, _, notes),) = load_with([tmp_path])
    assert step == 1 and "tokenizer.json: damaged" in notes[0]


def test_a_checkpoint_of_another_model_is_refused_with_its_tensors(tmp_path: Path) -> None:
    path = saved(tmp_path, 1).path
    with pytest.raises(CheckpointError) as caught:
        load_with([tmp_path], path, rows=24)
    assert (
        f"{path}: lacks tensors of this model or has other shapes: a.weight, b.bias" in caught.value.message
    )


def test_another_tokenizer_is_refused_by_its_path_unless_a_flag_allows_it(tmp_path: Path) -> None:
    tokenizers = [tmp_path / "a.json", tmp_path / "b.json"]
    for number, file in enumerate(tokenizers):
        file.write_text(str(number))
    checkpoint = saved(tmp_path, 1, tokenizer=tokenizers[0])
    for file, expected in zip(tokenizers, (0, 2), strict=True):
        raw = {"model": "gpt-tiny", "steps": 1, "data": {"prefix": "none", "tokenizer": str(file)}}
        saver = Checkpointer.__new__(Checkpointer)
        saver.config, saver.data, saver.tokenizer = read_config(raw, 1), DataIdentity(), file
        faults = saver._other_data(checkpoint)
        assert len(faults) == expected
    assert f"{tokenizers[1]}: not the one that it was trained with" in faults[0]
    assert "resume_other_data: true" in faults[1]


def test_other_tokens_behind_an_equal_index_are_refused(tmp_path: Path) -> None:
    found = []
    for number in (0, 1):
        prefix = tmp_path / str(number)
        tokens = np.arange(300_000, dtype=np.uint16) % 100
        tokens[150_000:] += number
        with Writer(prefix, np.uint16) as writer:
            writer.add_document([tokens])
        raw = {"model": "gpt-tiny", "steps": 1, "data": {"prefix": str(prefix)}}
        found.append(read_config(raw, 1))
    first, second = (Data(config.data, 64).identity() for config in found)
    assert first.corpora == second.corpora
    assert first.tokens != second.tokens
    checkpoint = saved(tmp_path, 1)
    saver = Checkpointer.__new__(Checkpointer)
    saver.config, saver.tokenizer = found[1], None
    for recorded, expected in ((second, 0), (DataIdentity(second.corpora), 0), (first, 2)):
        saver.data = second
        other = replace(checkpoint, manifest=replace(checkpoint.manifest, data=recorded))
        assert len(saver._other_data(other)) == expected
    assert "the .bin files hold other tokens" in saver._other_data(other)[0]


def test_an_absent_file_is_named_and_a_remedy_is_kept(tmp_path: Path) -> None:
    path = saved(tmp_path, 1).path
    part = next(path.glob("*.safetensors"))
    part.unlink()
    with pytest.raises(CheckpointError) as caught:
        load_with([tmp_path], path)
    assert f"are on no node of this run: {part.name}" in caught.value.message
    path.chmod(0o777)
    with pytest.raises(CheckpointError) as caught:
        load_with([tmp_path], path)
    assert f"(chmod o-w {path}, if you trust what is there)" in caught.value.message


def test_a_folder_that_every_user_can_replace_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "above", 1).path
    path.parent.chmod(0o777)
    with pytest.raises(CheckpointError, match="every user of this machine can replace what is in it"):
        open_checkpoint(path)
    path.parent.chmod(0o1777)
    assert open_checkpoint(path).step == 1
