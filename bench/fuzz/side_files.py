"""Fuzz the readers of other files around a run: sweeps, Slurm jobs, stores, environments, setups, checkpoints."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from bench.fuzz.files import a_folder, as_json, as_lines, in_words, maker
from clusterctl.agent import setups
from clusterctl.agent.records import read_json
from clusterctl.errors import ClusterctlError
from clusterctl.jobs.run_folder import RunDir
from clusterctl.jobs.sweep import FILE as SWEEP
from clusterctl.jobs.sweep import SweepRecord, SweepRequest, Variant, read_sweep
from clusterctl.platforms.rank_table import why_incomplete
from clusterctl.platforms.submission import Submission, read_submission, submission_file
from clusterctl.provision.bundle import LIST, Bundle
from clusterctl.provision.present import seen_in
from clusterctl.storage.client import AnswerLines, FileList, StoredFile, read_list
from clusterctl.wire.typed_json import encode
from trainer.checkpoint.manifest import (
    FORMAT,
    BaseWeights,
    Manifest,
    Origin,
    decode_manifest,
    encode_manifest,
)
from trainer.checkpoint.saved_file import SavedFile
from trainer.config.train_config import TrainConfig
from trainer.errors import CheckpointError, TrainerError
from trainer.evaluate.results import Progress
from trainer.weights.target import JOURNAL, UNFINISHED, open_target


def sweep(data: bytes) -> str:
    with a_folder() as folder:
        (folder / SWEEP).write_bytes(data)
        try:
            record = read_sweep(folder)
        except ClusterctlError as error:
            return in_words(error)
        json.dumps(encode(record))
    return "read"


def slurm_job(data: bytes) -> str:
    with a_folder() as folder:
        run = RunDir(folder)
        submission_file(run).write_bytes(data)
        found = read_submission(run)
        assert found is None or isinstance(found.job, int)
    return "read" if found else "refused"


def platform_table(data: bytes) -> str:
    with a_folder() as folder:
        (folder / "table.json").write_bytes(data)
        try:
            reason = why_incomplete(folder / "table.json")
        except ClusterctlError as error:
            return in_words(error)
    return "refused" if reason else "read"


def stored_list(data: bytes) -> str:
    """Read the list of a folder in a store: no name may point outside the folder, and every file must have a hash."""
    try:
        found = read_list(data.decode("utf-8", "surrogateescape"), "s3://b/f")
    except ClusterctlError as error:
        return in_words(error)
    for name, file in found.files.items():
        assert not os.path.isabs(name) and ".." not in name.split("/"), name
        assert len(file.pieces) == max(1, -(-file.bytes // file.piece))
    return "read"


def store_answers(data: bytes) -> str:
    """Read the answers of the program that moves files on a node."""
    reported: list[int] = []
    lines = AnswerLines(reported.append)
    piece = len(data) // 7 + 1
    for begin in range(0, len(data), piece):
        lines.feed(data[begin : begin + piece])
    assert all(type(count) is int for count in reported)
    return "read" if lines.answer else "refused"


def environment_mark(data: bytes) -> str:
    fingerprint, is_foreign = seen_in(data.decode("utf-8", "surrogateescape") + "\nruns\n")
    assert isinstance(fingerprint, str) and not is_foreign
    return "read" if fingerprint else "refused"


def bundle_list(data: bytes) -> str:
    """Read the list in a bundle, which is the first member of the tar file."""
    with a_folder() as folder:
        with tarfile.open(folder / "b.tar", "w") as archive:
            header = tarfile.TarInfo(LIST)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
        return _bundle(folder / "b.tar")


def bundle(data: bytes) -> str:
    with a_folder() as folder:
        (folder / "b.tar").write_bytes(data)
        return _bundle(folder / "b.tar")


def _bundle(path: Path) -> str:
    try:
        with tarfile.open(path, "r:") as archive:
            contents = Bundle(path, archive).contents
    except (ClusterctlError, tarfile.TarError) as error:
        return in_words(error)
    assert all(".." not in member.path.split("/") for member in contents.files)
    return "read"


def setup_cache(data: bytes) -> str:
    """Read the cached result of a setup: it may only be used if every value is a text."""
    with a_folder() as folder:
        (folder / "kept.json").write_bytes(data)
        kept = read_json(str(folder / "kept.json"))
        fits = kept is not None and setups.fits(kept)
        if kept is not None and fits:
            assert all(isinstance(value, str) for value in kept["set"].values())
            assert all(isinstance(name, str) for name in (*kept["set"], *kept["unset"]))
    return "read" if fits else "refused"


def evaluation(data: bytes) -> str:
    with a_folder() as folder:
        (folder / ".unfinished-k-0.jsonl").write_bytes(data)
        with Progress(folder, "k", 1) as progress:
            scores = progress.read(10)
        assert all(type(index) is int and 0 <= index < 10 for index in scores)
    return "read" if scores else "refused"


IDENTITY = {"source": "s"}


def conversion(data: bytes) -> str:
    """Continue a conversion with a damaged journal: a file without a valid entry must be written again."""
    with a_folder() as folder:
        aside = folder / f"{UNFINISHED}out"
        aside.mkdir()
        (aside / "a.bin").write_bytes(b"xyz")
        (aside / JOURNAL).write_bytes(json.dumps(IDENTITY, sort_keys=True).encode() + b"\n" + data)
        try:
            with open_target(folder / "out", IDENTITY, 3) as target:
                resumed = dict(target.entries)
        except TrainerError as error:
            assert error.message.strip()
            return "refused"
        assert all(entry.bytes == 3 and isinstance(entry.sha256, str) for entry in resumed.values())
    return "read" if resumed else "refused"


SAVED = Manifest(
    7,
    TrainConfig(),
    {"a.weight": (4, 2)},
    {"part-00000.safetensors": SavedFile(9, "0" * 64, [[[0, 4, 0, 2], [0, 1]]])},
    loss_scale={"scale": 2.0},
    base=BaseWeights("/w", "f"),
    origin=Origin("hf", "/w", before=Origin("glm", "/g")),
)


def checkpoint_manifest(data: bytes) -> str:
    """Read a checkpoint's manifest with a correct hash, so that other faults must be found."""
    whole = encode_manifest({})
    # The text that `encode_manifest` writes between the last entry and the hash, and after the hash.
    key, end = whole[2 : whole.rindex(b'": "') + 4], whole[-4:]
    content = data.rstrip().removesuffix(b"}") + key
    hashed = content + hashlib.sha256(content).hexdigest().encode() + end
    result = "refused"
    for text in (data, hashed):
        try:
            found = decode_manifest(text, Path("manifest.json"))
        except CheckpointError as error:
            assert error.message.startswith("manifest.json: ")
            continue
        result = "read"
        if found.format == FORMAT:
            again = decode_manifest(encode_manifest(found.as_json()), Path("again"))
            assert replace(again, faults=found.faults, about=found.about) == found
    return result


def _whole_bundle() -> Iterator[bytes]:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        content = json.dumps(BUNDLE).encode()
        header = tarfile.TarInfo(LIST)
        header.size = len(content)
        archive.addfile(header, io.BytesIO(content))
    yield data.getvalue()


SWEPT = SweepRecord(SweepRequest("job.yaml"), (Variant("lr=1", ("train.lr=1",), "r-1", "finished"),))
HASH = "0" * 64
LISTED = FileList({"a/b": StoredFile(5, 4, (HASH, HASH))}, step=3, digest=HASH)
BUNDLE = {"format": 1, "files": [{"path": "code/a.py", "size": 3, "sha256": HASH, "executable": False}]}
KEPT = {"set": {"A": "1"}, "unset": ["B"], "before": {"A": None, "B": None}, "seconds": 0.1}
ANSWERS = [{"bytes": 5}, {"result": ["a"]}, {"refused": "no", "hint": "x"}]
JOURNALED = [{"name": "a.bin", "bytes": 3, "sha256": HASH}, {"name": "b", "bytes": 1, "sha256": HASH}]

# For each reader the function that makes inputs, and the function that checks the rules for an input.
READERS: dict[str, tuple[Callable[[Random], bytes], Callable[[bytes], str]]] = {
    "sweep": (maker(as_json(encode(SWEPT))), sweep),
    "slurmjob": (maker(as_json(encode(Submission(7, 1.7e9)))), slurm_job),
    "platformtable": (maker(as_json({"status": "completed"}, {"status": "x"})), platform_table),
    "storedlist": (maker([LISTED.text().encode()]), stored_list),
    "storeanswers": (maker(as_lines(ANSWERS)), store_answers),
    "mark": (maker(as_json({"fingerprint": HASH})), environment_mark),
    "bundlelist": (maker(as_json(BUNDLE)), bundle_list),
    "bundle": (maker(list(_whole_bundle())), bundle),
    "setup": (maker(as_json(KEPT)), setup_cache),
    "evaluation": (maker([b"[0, -1.5, true]\n[1, -2.0, false]\n"]), evaluation),
    "conversion": (maker(as_lines(JOURNALED)), conversion),
    "checkpoint": (maker(as_json(SAVED.as_json(), {**SAVED.as_json(), "format": 1})), checkpoint_manifest),
}
